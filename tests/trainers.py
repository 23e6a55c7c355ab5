"""Small two-tower trainings, on one process or on ranks under DDP, FSDP2 and torch.compile."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import infloss
from infloss.distributed import ring
from support import normal

STEPS = 2
LEARNING_RATE = 0.05
LOGIT_SCALE = 5.0
WIDTH = 6  # of what the towers read

Pair = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    """What a training is, and how ranks share it."""

    sizes: tuple[int, ...]  # rows of each rank at first; see shards()
    wrapper: str = "ddp"  # or "fsdp"
    strategy: str = "ring"
    grad_reduction: str = "mean"  # what the loss is told: "mean", "sum"
    averages: bool = True  # the wrapper averages gradients over ranks; False: it adds them up
    loss: str = "inside"  # the wrapped module, or "outside"; "own": inside, with a scale of (1,)
    micro_batches: int = 1  # of a step
    frozen: str = ""  # or "txt"
    compiled: str = ""  # or "towers", "model"
    mesh: tuple[int, ...] = ()  # () for a flat group
    flags: dict[str, Any] = field(default_factory=dict)  # of the wrapper

    def alone(self) -> "Plan":
        """The same training by one process."""
        return Plan((sum(self.sizes),), micro_batches=self.micro_batches, frozen=self.frozen)


class Trained(NamedTuple):
    """What a training leaves behind."""

    losses: list[Tensor]
    parameters: dict[str, Tensor]  # whole ones
    graphs: int  # compiled


class Tower(nn.Module):
    """An encoder whose forward is a user's own code, as torch.compile wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(WIDTH, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x).tanh())


class Encoders(nn.Module):
    """Two towers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.img, self.txt = Tower(), Tower()

    def forward(self, img: Tensor, txt: Tensor) -> Pair:
        return self.img(img), self.txt(txt)


class WithLoss(nn.Module):
    """Towers and criterion in one module, whose forward is the loss."""

    def __init__(self, encoders: Encoders, criterion: nn.Module) -> None:
        super().__init__()
        self.encoders, self.criterion = encoders, criterion

    def forward(self, img: Tensor, txt: Tensor) -> Tensor:
        return self.criterion(*self.encoders(img, txt))


class OwnScale(nn.Module):
    """A user's criterion, whose logit scale has the shape (1,) that FSDP2 can shard."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.log_logit_scale = nn.Parameter(torch.tensor([LOGIT_SCALE]).log())
        self.options = options

    def forward(self, img: Tensor, txt: Tensor) -> Tensor:
        return infloss.contrastive_loss(img, txt, self.log_logit_scale.exp(), **self.options)


def batch(step: int, rows: int, dtype: torch.dtype = torch.float64) -> Pair:
    """Pairs that share half of what they are; others in each step."""
    img, noise = normal(rows, WIDTH, seed=2 * step), normal(rows, WIDTH, seed=2 * step + 1)
    return img.to(dtype), (img + noise).to(dtype)


def shards(plan: Plan, rank: int) -> list[list[Pair]]:
    """The rank's part of each step's micro-batches; the ranks swap sizes from one to the next."""
    steps = []
    for step in range(STEPS):
        micro = []
        for part in range(plan.micro_batches):
            turn = (step + part) % len(plan.sizes)
            sizes = plan.sizes[turn:] + plan.sizes[:turn]
            img, txt = batch(step * plan.micro_batches + part, sum(sizes))
            micro.append((img.split(sizes)[rank], txt.split(sizes)[rank]))
        steps.append(micro)
    return steps


def train(group: Any, plan: Plan) -> Trained:
    """Train as planned, on this rank's shards; ``group`` None: on the whole batches."""
    if group is None:
        model = WithLoss(encoders_of(plan), infloss.ContrastiveLoss(LOGIT_SCALE)).double()
        losses = fit(model, trainable(model), shards(plan, 0))
        return Trained(losses, named(model), 0)
    ring.BLOCK_ROWS = 3
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    if plan.mesh:
        group = init_device_mesh("cpu", plan.mesh, mesh_dim_names=("node", "rank"))
    model = WithLoss(encoders_of(plan), criterion_of(plan, group)).double()
    if plan.compiled == "towers":
        for tower in (model.encoders.img, model.encoders.txt):
            tower.compile(backend=counter)
    forward, no_sync = WRAPPERS[plan.wrapper](model, group, plan)
    if plan.compiled == "model":
        forward = torch.compile(forward, backend=counter)
    reduce = functools.partial(reduce_by_hand, by_hand(model, plan), group, plan.averages)
    losses = fit(forward, trainable(model), shards(plan, dist.get_rank()), no_sync, reduce)
    return Trained(losses, named(model), counter.frame_count)


def encoders_of(plan: Plan) -> Encoders:
    encoders = Encoders()
    encoders.txt.requires_grad_(plan.frozen != "txt")
    return encoders


def criterion_of(plan: Plan, group: Any) -> nn.Module:
    options = {
        "group": group,
        "strategy": plan.strategy,
        "grad_reduction": plan.grad_reduction,
    }
    if plan.loss == "own":
        return OwnScale(**options)
    return infloss.ContrastiveLoss(LOGIT_SCALE, **options)


def under_ddp(model: WithLoss, group: Any, plan: Plan) -> tuple[Forward, Callable[[], Any]]:
    """The loss of a batch under DDP, and the context in which gradients stay on their rank."""
    wrapped = model if plan.loss == "inside" else model.encoders
    ddp = DistributedDataParallel(wrapped, process_group=group, **plan.flags)
    if not plan.averages:
        ddp.register_comm_hook(group, summed)
    if plan.loss == "inside":
        return ddp, ddp.no_sync
    return lambda img, txt: model.criterion(*ddp(img, txt)), ddp.no_sync


def summed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that adds gradients up, where the default averages them.

    (DDP compares the annotations of hooks with types, which they must not be strings for.)
    """
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def under_fsdp(model: WithLoss, group: Any, plan: Plan) -> tuple[Forward, Callable[[], Any]]:
    """The same under FSDP2, which shards no parameter of shape ().

    ``ContrastiveLoss`` holds one such; it is ignored, and the trainer averages its gradient.
    """
    mesh = group if isinstance(group, DeviceMesh) else DeviceMesh.from_group(group, "cpu")
    root = model.encoders if plan.loss == "outside" else model
    ignored = set(by_hand(model, plan)) & set(root.parameters())
    sharded = [model.encoders.img, model.encoders.txt, root]
    for module in sharded:
        fully_shard(module, mesh=mesh, ignored_params=ignored, **plan.flags)
        if not plan.averages:
            module.set_gradient_divide_factor(1.0)

    @contextlib.contextmanager
    def no_sync() -> Any:
        root.set_requires_gradient_sync(False)
        yield
        root.set_requires_gradient_sync(True)

    return model, no_sync


WRAPPERS = {"ddp": under_ddp, "fsdp": under_fsdp}


def by_hand(model: WithLoss, plan: Plan) -> list[nn.Parameter]:
    """The parameters whose gradients the wrapper does not reduce."""
    ours = plan.loss == "outside" or (plan.wrapper == "fsdp" and plan.loss == "inside")
    return [model.criterion.log_logit_scale] if ours else []


def reduce_by_hand(parameters: Sequence[nn.Parameter], group: Any, averages: bool) -> None:
    """What a wrapper does to the gradients of its own parameters, for those that it has not."""
    # a mesh is as large as the world here
    flat = dist.group.WORLD if isinstance(group, DeviceMesh) else group
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=flat)
        if averages:
            parameter.grad /= dist.get_world_size(flat)


def fit(
    forward: Forward,
    parameters: list[nn.Parameter],
    steps: list[list[Pair]],
    no_sync: Callable[[], Any] = contextlib.nullcontext,
    reduce: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Plain SGD on the mean of each step's micro-batches' losses; these losses."""
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE)
    losses = []
    for micro_batches in steps:
        optimizer.zero_grad()
        for index, (img, txt) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else no_sync():
                loss = forward(img, txt)
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        reduce()
        optimizer.step()
    return losses


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def named(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }
