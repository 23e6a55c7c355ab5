"""The losses' options that are no tensors."""

from dataclasses import dataclass

from infloss import checks


@dataclass(frozen=True)
class Options:
    """As :func:`infloss.contrastive_loss` describes them."""

    normalize: bool
    reduction: str
    strategy: str
    grad_reduction: str
    assume_even: bool
    return_stats: bool

    def check(self) -> None:
        """Raise TypeError or ValueError for what is no such option."""
        checks.flag("normalize", self.normalize)
        checks.one_of("reduction", self.reduction, checks.REDUCTIONS)
        checks.one_of("strategy", self.strategy, checks.STRATEGIES)
        checks.one_of("grad_reduction", self.grad_reduction, checks.GRAD_REDUCTIONS)
        checks.flag("assume_even", self.assume_even)
        checks.flag("return_stats", self.return_stats)
