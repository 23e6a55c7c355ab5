"""The gradient cache's class and decorators, called as scripts for the package grad_cache do."""

from __future__ import annotations

import re
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infloss
from cached import WIDTH, Encoder, assert_same_step, contrastive, in_one_graph, parameters_of, rows
from infloss import GradCache
from infloss.grad_cache import cached, cat_input_tensor

Output = namedtuple("Output", ["hidden", "pooler_output"])


class Bert(nn.Module):
    """An encoder with keyword inputs and an output of several things."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = Encoder(seed, dropout)

    def forward(self, x: Tensor, shift: Any = 0.0) -> Output:
        rep = self.encoder(x + shift)
        return Output(rep * 2, rep)


class SimpleContrastiveLoss:
    """One direction, as the package's examples take it."""

    def __call__(self, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(x @ y.T, torch.arange(len(x), device=x.device), reduction=reduction)


def pooled(out: Output) -> Tensor:
    return out.pooler_output


def step(cache: GradCache, *inputs: Any, **options: Any) -> Any:
    """A step for ``assert_same_step``, whose own backward then adds nothing."""

    def run() -> Tensor:
        loss = cache(*inputs, **options)
        assert not loss.requires_grad
        return loss.requires_grad_()

    return run


X, Y, SHIFT = rows(seed=1), rows(seed=2), rows(seed=3)
KINDS: dict[str, tuple[Any, Any]] = {
    "tensor": (X, lambda model: model(X)),
    "list": ([X, SHIFT], lambda model: model(X, SHIFT)),
    "dict": ({"x": X, "shift": SHIFT}, lambda model: model(x=X, shift=SHIFT)),
    "UserDict": (UserDict(x=X, shift=SHIFT), lambda model: model(x=X, shift=SHIFT)),
    "both": (([X], {"shift": SHIFT}), lambda model: model(X, shift=SHIFT)),
}


@pytest.mark.parametrize("sizes", [2, [3, 4]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step(kind: str, sizes: Any) -> None:
    inputs, call = KINDS[kind]
    first, second, loss_fn = Bert(1), Bert(2), SimpleContrastiveLoss()
    cache = GradCache([first, second], sizes, loss_fn, get_rep_fn=pooled)
    assert_same_step(
        step(cache, inputs, Y, no_sync_except_last=True, reduction="sum"),
        lambda: loss_fn(pooled(call(first)), pooled(second(Y)), reduction="sum"),
        parameters_of(first, second),
    )


def test_tied_encoders_and_dropout() -> None:
    model = Bert(dropout=0.5)
    cache = GradCache(models=[model, model], chunk_sizes=3, loss_fn=contrastive, get_rep_fn=pooled)
    encode = lambda x: in_one_graph(lambda part: pooled(model(part)), x, 3)  # noqa: E731
    assert_same_step(
        step(cache, X, Y), lambda: contrastive(encode(X), encode(Y)), parameters_of(model)
    )


def test_strings_and_a_split_of_ones_own() -> None:
    model = Encoder()

    class OfTexts(GradCache):
        """One that is overridden the way the package's users do."""

        def model_call(self, model: Any, model_input: Any) -> Any:
            lengths = [[float(len(text))] * WIDTH for text in model_input]
            return model(torch.tensor(lengths, dtype=torch.float64))

        def compute_loss(self, *reps: Tensor, **loss_kwargs: Any) -> Tensor:
            return 2 * super().compute_loss(*reps, **loss_kwargs)

    texts = ["a", "bcd", "ef", "ghijk", "lmno"]
    plain = OfTexts([model], 1, contrastive)
    encode = lambda texts: plain.model_call(model, texts)  # noqa: E731
    expected = lambda: 2 * contrastive(encode(texts), encode(texts[::-1]))  # noqa: E731
    by_rows = OfTexts([model, model], 2, contrastive)
    assert_same_step(step(by_rows, texts, texts[::-1]), expected, parameters_of(model))

    def words(text: str, size: int) -> list[list[str]]:
        parts = text.split()
        return [parts[start : start + size] for start in range(0, len(parts), size)]

    joined = OfTexts([model, model], 2, contrastive, split_input_fn=words)
    inputs = " ".join(texts), " ".join(texts[::-1])
    assert_same_step(step(joined, *inputs), expected, parameters_of(model))


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA")
def test_half_precision_with_a_scaler(device: torch.device) -> None:
    """Models and loss under autocast, gradients scaled; float32 casts in each chunk."""
    model = Encoder().float().to(device)
    x, y = (one.float().to(device) for one in (X, Y))
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    dtype = torch.get_autocast_dtype(device.type)
    seen: list[torch.dtype] = []

    def loss_fn(a: Tensor, b: Tensor) -> Tensor:
        seen.extend((a.dtype, b.dtype))
        return contrastive(a, b)

    def plain() -> Tensor:
        with torch.autocast(device.type, cache_enabled=False):
            return 1024 * loss_fn(in_one_graph(model, x, 4), in_one_graph(model, y, 4))

    cache = GradCache([model, model], 4, loss_fn, fp16=True, scaler=scaler)

    def ours() -> Tensor:
        return 1024 * step(cache, x, y)()

    assert_same_step(ours, plain, parameters_of(model), rtol=1e-3, atol=1e-3)
    assert seen == [dtype] * 4


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no models": ({"models": []}, ValueError, "models: expected at least one, got none"),
    "chunks of none": ({"chunk_sizes": 0}, ValueError, "chunk_sizes: expected 1 or more, got 0"),
    "chunk sizes": (
        {"chunk_sizes": [2]},
        ValueError,
        "chunk_sizes: expected one for each of 2 models, got 1",
    ),
    "a size": ({"chunk_sizes": [2, "3"]}, TypeError, "chunk_sizes: expected an int, got str"),
    "scaler": (
        {"fp16": True},
        ValueError,
        "scaler: expected a GradScaler with fp16=True, got None",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_no_cache(wrong: str) -> None:
    options, kind, message = REFUSED[wrong]
    model = Encoder()
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        GradCache(**{"models": [model] * 2, "chunk_sizes": 2, "loss_fn": contrastive, **options})


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_or_more_inputs_than_models(count: int) -> None:
    model = Encoder()
    cache = GradCache([model, model], 2, contrastive)
    message = rf"^model_inputs: expected one for each of 2 models, got {count}$"
    with pytest.raises(ValueError, match=message):
        cache.cache_step(*[X] * count)
    assert model.rows == []


def functional_step(models: list[Any], pieces: list[Any], loss_fn: Any) -> Tensor:
    """Pieces of a batch as a loader yields them."""
    lists: list[list[Tensor]] = [[], []]
    replays: list[Any] = []
    for piece in pieces:
        for reps, model, x in zip(lists, models, piece, strict=True):
            rep, replay = encode_piece(model, x)
            reps.append(rep)
            replays.append((replay, rep))
    loss = loss_fn(lists[0], txt=lists[1])
    loss.backward()
    for replay, rep in replays:
        replay(rep)
    return loss.detach().requires_grad_()


@cached
def encode_piece(model: nn.Module, x: Tensor) -> Tensor:
    """A dropout of its own beside the model's (row 31: the functional form, too)."""
    return F.dropout(model(x), 0.25)


@cat_input_tensor
def loss_of_lists(img: Tensor, *, txt: Tensor) -> Tensor:
    return infloss.contrastive_loss(img, txt, 5.0)


def test_decorators_under_dropout(device: torch.device) -> None:
    img, txt = Encoder(1, dropout=0.5).to(device), Encoder(2, dropout=0.5).to(device)
    pieces = list(zip(X.to(device).split(4), Y.to(device).split(4), strict=True))

    def plain() -> Tensor:
        encode = encode_piece.__wrapped__  # type: ignore
        reps = [(encode(img, x), encode(txt, y)) for x, y in pieces]
        return contrastive(*(torch.cat(column) for column in zip(*reps, strict=True)))

    assert_same_step(
        lambda: functional_step([img, txt], pieces, loss_of_lists), plain, parameters_of(img, txt)
    )


def test_a_decorated_call_with_two_representations() -> None:
    model = Encoder()

    @cached
    @torch.autocast("cpu", torch.bfloat16)
    def encode(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return model(x), model(y)

    model.float()
    a, b, replay = encode(X.float(), Y.float())
    assert a.dtype == b.dtype == torch.bfloat16
    contrastive(a, b).backward()
    with pytest.raises(ValueError, match=r"^reps: expected the 2 that the call returned, got 1$"):
        replay(a)


def test_a_replay_runs_once() -> None:
    model = Encoder()
    rep, replay = cached(model)(X)
    message = r"^cached: expected a representation that the loss depends on, got one that it does "
    with pytest.raises(ValueError, match=message):
        replay(rep)
    rep, replay = cached(model)(X)
    contrastive(rep, rep.flip(0)).backward()
    replay((rep,))
    with pytest.raises(RuntimeError, match=r"^cached: expected one replay of a call, got a second"):
        replay(rep)


def test_lists_of_other_things_stay() -> None:
    @cat_input_tensor
    def together(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    args, kwargs = together([X, X], [1, 2], 3, a=[Y], b=[], c=[X, None])
    assert torch.equal(args[0], torch.cat([X, X]))
    assert args[1:] == ([1, 2], 3)
    assert torch.equal(kwargs["a"], Y)
    assert kwargs["b"] == []
    assert kwargs["c"][1] is None
