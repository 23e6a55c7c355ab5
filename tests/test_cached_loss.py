"""Losses over encoders in chunks, against the same chunks in one ordinary graph."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infloss
from cached import (
    DIM,
    WIDTH,
    Encoder,
    assert_same_step,
    contrastive,
    gradients,
    in_one_graph,
    parameters_of,
    rows,
)
from infloss import cached_loss


@pytest.mark.parametrize("sizes", [(3, 4), (1, 11), (11, 100), (5, 2)], ids=str)
def test_two_towers_in_chunks(sizes: tuple[int, int], device: torch.device) -> None:
    """Ragged last chunks, other sizes for each tower, and one chunk for all."""
    img, txt = Encoder(1).to(device), Encoder(2).to(device)
    x, y = rows(seed=1).to(device), rows(seed=2).to(device)
    log_scale = torch.tensor(1.5, dtype=torch.float64, device=device, requires_grad=True)

    def loss_fn(a: Tensor, b: Tensor) -> Tensor:
        return infloss.contrastive_loss(a, b, log_scale.exp())

    assert_same_step(
        lambda: cached_loss(loss_fn, [(img, x, sizes[0]), (txt, y, sizes[1])]),
        lambda: loss_fn(img(x), txt(y)),
        [*parameters_of(img, txt), log_scale],
    )
    expected = [min(sizes[0], 11 - start) for start in range(0, 11, sizes[0])]
    assert img.rows == [*expected, *expected, 11]


def test_one_tower_and_three() -> None:
    towers = [Encoder(seed) for seed in range(3)]
    batches = [rows(7, seed=seed) for seed in range(3)]

    def three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return contrastive(a, b) + contrastive(b, c)

    assert_same_step(
        lambda: cached_loss(three, list(zip(towers, batches, (2, 3, 4), strict=True))),
        lambda: three(*(tower(x) for tower, x in zip(towers, batches, strict=True))),
        parameters_of(*towers),
    )

    def alone(a: Tensor) -> Tensor:
        return contrastive(a, a.flip(0))

    assert_same_step(
        lambda: cached_loss(alone, [(towers[0], batches[0], 2)]),
        lambda: alone(towers[0](batches[0])),
        parameters_of(towers[0]),
    )


def test_the_same_model_twice() -> None:
    model, x, y = Encoder(), rows(seed=1), rows(seed=2)
    assert_same_step(
        lambda: cached_loss(contrastive, [(model, x, 3), (model, y, 4)]),
        lambda: contrastive(model(x), model(y)),
        parameters_of(model),
    )


@dataclass
class Both:
    """As a model may return several things."""

    query: Tensor
    keys: list[Tensor]
    note: str = ""


class Pairs(nn.Module):
    """One forward pass that returns two embeddings and a scale, in a container of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.img, self.txt, self.kind = Encoder(1), Encoder(2), kind
        self.log_scale = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))

    def forward(self, x: Tensor, *, y: Tensor) -> Any:
        img, txt, scale = self.img(x), self.txt(y), self.log_scale.exp()
        if self.kind == "tuple":
            return img, txt, scale
        if self.kind == "dict":
            return {"img": img, "txt": {"rows": txt}, "scale": scale, "hidden": None}
        return Both(img, [txt, scale], "kept")


def loss_of_pairs(out: Any) -> Tensor:
    if isinstance(out, dict):
        assert out["hidden"] is None
        return infloss.contrastive_loss(out["img"], out["txt"]["rows"], out["scale"])
    if isinstance(out, Both):
        assert out.note == "kept"
        return infloss.contrastive_loss(out.query, *out.keys)
    return infloss.contrastive_loss(*out)


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_several_representations(kind: str) -> None:
    """Row 33 of the public reports: one forward that returns two embeddings, and a scale."""
    model, x, y = Pairs(kind), rows(seed=1), rows(seed=2)
    assert_same_step(
        lambda: cached_loss(loss_of_pairs, [(model, ([x], {"y": y}), 4)]),
        lambda: loss_of_pairs(model(x, y=y)),
        parameters_of(model),
    )


def test_more_representations_than_inputs() -> None:
    model, x, y = Encoder(1), rows(5, seed=1), rows(10, seed=2)

    def keys(x: Tensor) -> Tensor:
        return model(x.reshape(-1, WIDTH))  # two for each row

    def loss_fn(query: Tensor, key: Tensor) -> Tensor:
        return infloss.info_nce(query, key, logit_scale=3.0)

    pairs = y.reshape(5, 2, WIDTH)
    assert_same_step(
        lambda: cached_loss(loss_fn, [(model, x, 2), (keys, pairs, 2)]),
        lambda: loss_fn(model(x), model(y)),
        parameters_of(model),
    )


def test_without_gradients_it_is_the_loss_in_chunks() -> None:
    model, x, y = Encoder(), rows(seed=1), rows(seed=2)
    with torch.no_grad():
        loss = cached_loss(contrastive, [(model, x, 4), (model, y, 5)])
        assert model.rows == [4, 4, 3, 5, 5, 1]
        torch.testing.assert_close(loss, contrastive(model(x), model(y)))
    assert not loss.requires_grad
    with torch.inference_mode():
        assert torch.equal(cached_loss(contrastive, [(model, x, 4), (model, y, 5)]), loss)


def test_a_frozen_tower_runs_once() -> None:
    img, txt = Encoder(1).requires_grad_(False), Encoder(2)
    x, y = rows(seed=1), rows(seed=2)
    assert_same_step(
        lambda: cached_loss(contrastive, [(img, x, 4), (txt, y, 4)]),
        lambda: contrastive(img(x), txt(y)),
        parameters_of(img, txt),
    )
    assert img.rows == [4, 4, 3, 11]
    txt.requires_grad_(False)
    assert not cached_loss(contrastive, [(img, x, 4), (txt, y, 4)]).requires_grad


def test_a_function_with_frozen_modules_that_do_not_show() -> None:
    """What a function calls may not be seen: then only its outputs tell."""
    hidden = [[Encoder(1).requires_grad_(False)]]
    txt, x, y = Encoder(2), rows(seed=1), rows(seed=2)
    assert_same_step(
        lambda: cached_loss(contrastive, [(lambda x: hidden[0][0](x), x, 4), (txt, y, 4)]),
        lambda: contrastive(hidden[0][0](x), txt(y)),
        parameters_of(txt),
    )


def test_parameters_that_are_no_modules() -> None:
    """A frozen module in sight says nothing of what else a function uses."""
    frozen, x = Encoder().requires_grad_(False), rows()
    head = torch.eye(DIM, dtype=torch.float64).mul(1.5).requires_grad_()
    assert_same_step(
        lambda: cached_loss(contrastive, [(lambda x: frozen(x) @ head, x, 4), (frozen, x, 4)]),
        lambda: contrastive(frozen(x) @ head, frozen(x)),
        [head],
    )


def test_a_model_made_in_inference_mode() -> None:
    x, txt = rows(), Encoder()
    with torch.inference_mode():
        frozen = Encoder(1).requires_grad_(False)
    assert_same_step(
        lambda: cached_loss(contrastive, [(frozen, x, 4), (txt, x, 4)]),
        lambda: contrastive(frozen(x), txt(x)),
        parameters_of(txt),
    )


def test_complex_representations() -> None:
    model, x = Encoder(), rows()

    def spectrum(x: Tensor) -> Tensor:
        return torch.fft.rfft(model(x))

    def loss_fn(a: Tensor) -> Tensor:
        return contrastive(a.real, a.imag)

    assert_same_step(
        lambda: cached_loss(loss_fn, [(spectrum, x, 4)]),
        lambda: loss_fn(spectrum(x)),
        parameters_of(model),
    )


def test_inputs_that_want_gradients() -> None:
    """A chunked tower on top of an ordinary module, whose gradient it takes on."""
    stem, img, txt = nn.Linear(WIDTH, WIDTH).double(), Encoder(1), Encoder(2)
    x, y, shared = rows(seed=1), rows(seed=2), rows(1, seed=3)

    def add(x: Tensor, one: Tensor) -> Tensor:
        return txt(x + one)

    def towers(split: Any = None) -> list[Any]:
        second = infloss.Tower(add, [stem(y), stem(shared)], 4)
        return [infloss.Tower(img, stem(x), 3, split=split), second]

    expected = lambda: contrastive(img(stem(x)), add(stem(y), stem(shared)))  # noqa: E731
    parameters = parameters_of(stem, img, txt)
    assert_same_step(lambda: cached_loss(contrastive, towers()), expected, parameters)
    by_user = functools.partial(towers, lambda x, size: list(x.split(size)))
    assert_same_step(lambda: cached_loss(contrastive, by_user()), expected, parameters)


def test_it_adds_up_with_other_losses() -> None:
    model, x, y = Encoder(), rows(seed=1), rows(seed=2)

    def total(main: Tensor) -> Tensor:
        decay = sum((one**2).sum() for one in model.parameters())
        return 3 * main + 0.1 * decay + model(y).pow(2).mean()

    assert_same_step(
        lambda: total(cached_loss(contrastive, [(model, x, 3), (model, y, 4)])),
        lambda: total(contrastive(model(x), model(y))),
        parameters_of(model),
    )


def test_accumulation_over_batches() -> None:
    """Row 4: three chunks of twelve pairs, and twice that in a step; every gradient exact."""
    model, log_scale = Encoder(), torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    batches = [(rows(12, seed=seed), rows(12, seed=9 + seed)) for seed in range(2)]

    def loss_fn(a: Tensor, b: Tensor) -> Tensor:
        return infloss.contrastive_loss(a, b, log_scale.exp())

    def cached() -> Tensor:
        losses = [cached_loss(loss_fn, [(model, x, 4), (model, y, 4)]) / 2 for x, y in batches]
        losses[0].backward()
        return losses[1] + losses[0].detach()

    assert_same_step(
        cached,
        lambda: sum(loss_fn(model(x), model(y)) / 2 for x, y in batches),  # type: ignore
        [*parameters_of(model), log_scale],
    )


def test_two_cached_losses_of_one_model_in_one_backward() -> None:
    model, x, y = Encoder(), rows(seed=1), rows(seed=2)

    def cached(x: Tensor) -> Tensor:
        return cached_loss(contrastive, [(model, x, 3), (model, x.flip(0), 4)])

    assert_same_step(
        lambda: cached(x) + cached(y),
        lambda: sum(contrastive(model(one), model(one.flip(0))) for one in (x, y)),  # type: ignore
        parameters_of(model),
    )


def test_what_the_loss_returns_besides_is_passed_on() -> None:
    model, x = Encoder(), rows(seed=1)

    def loss_fn(a: Tensor, b: Tensor) -> Any:
        return infloss.contrastive_loss(a, b, return_stats=True)

    out = cached_loss(loss_fn, [(model, x, 3), (model, x, 4)])
    assert isinstance(out, infloss.ContrastiveOutput)
    _, found = gradients(lambda: out.loss, parameters_of(model))
    assert all(one is not None for one in found)


def test_no_activations_are_kept_between_the_passes() -> None:
    """Rows 28 and 30: what autograd saves is of the size of the representations."""
    model, x = Encoder(width=4096), rows(64)
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cached_loss(contrastive, [(model, x, 8), (model, x, 8)])
    assert 0 < saved < 64 * 4096 / 16
    loss.backward()


def test_nothing_is_kept_after_backward() -> None:
    """Neither inputs nor outputs live on in the loss tensor."""
    model, x = Encoder(), rows()
    outputs: list[Tensor] = []

    def loss_fn(a: Tensor, b: Tensor) -> Tensor:
        outputs.append(a)
        return contrastive(a, b)

    loss = cached_loss(loss_fn, [(model, x, 4), (model, x, 4)])
    loss.backward()
    (mark,) = [weakref.ref(one) for one in outputs]
    outputs.clear()
    del loss
    assert mark() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_cached_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    """The loss sees float32 representations; a gradient is rounded once, where it enters."""
    model, x = Encoder().to(device, dtype), rows().to(device, dtype)
    seen: list[torch.dtype] = []

    def loss_fn(a: Tensor, b: Tensor) -> Tensor:
        seen.extend((a.dtype, b.dtype))
        return contrastive(a, b)

    towers = [(model, x, 4), (model, x.flip(0), 4)]
    assert_same_step(
        lambda: cached_loss(loss_fn, towers, cache_dtype=torch.float32),
        lambda: loss_fn(*(in_one_graph(model, part, 4).float() for part in (x, x.flip(0)))),
        parameters_of(model),
        rtol=2e-2,
        atol=2e-3,
    )
    assert seen == [torch.float32] * 4
    cached_loss(loss_fn, towers)
    assert seen[4:] == [dtype] * 2


def test_inputs_stream_from_the_cpu(cuda: torch.device) -> None:
    model, x = Encoder().to(cuda), rows()
    on_cpu = {"x": x.pin_memory()}
    loss = cached_loss(contrastive, [(model, on_cpu, 3), (model, x.flip(0), 4)])
    assert loss.device.type == "cuda"
    assert_same_step(
        lambda: cached_loss(contrastive, [(model, on_cpu, 3), (model, x.flip(0), 4)]),
        lambda: contrastive(model(x.to(cuda)), model(x.flip(0).to(cuda))),
        parameters_of(model),
    )


def test_inside_a_compiled_function(fresh_dynamo: None) -> None:
    model, x, y = Encoder(), rows(seed=1), rows(seed=2)

    def step() -> Tensor:
        return 2 * cached_loss(contrastive, [(model, x, 3), (model, y, 4)])

    compiled = torch.compile(step, backend="eager")
    assert_same_step(compiled, lambda: 2 * contrastive(model(x), model(y)), parameters_of(model))


def test_compiled_encoders(fresh_dynamo: None) -> None:
    model, x, y = Encoder(), rows(seed=1), rows(seed=2)
    compiled = torch.compile(model, backend="aot_eager")
    assert_same_step(
        lambda: cached_loss(contrastive, [(compiled, x, 4), (compiled, y, 4)]),
        lambda: contrastive(model(x), model(y)),
        parameters_of(model),
    )


@pytest.mark.parametrize("count", [0, 1])
def test_very_small_batches(count: int) -> None:
    """A shard may be empty; its tower still runs, and gets gradients of zero."""
    model, x = Encoder(), rows(count)
    found = gradients(
        lambda: cached_loss(lambda a: (a**2).sum(), [(model, x, 4)]), parameters_of(model)
    )[1]
    assert model.rows == [count, count]
    assert all(one is not None and (count > 0 or not one.any()) for one in found)
    assert found[-1].numel() == DIM
