"""The second pass sees what the first saw: random numbers, autocast, buffers, inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import infloss
from cached import (
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


def test_dropout(device: torch.device) -> None:
    """Row 31: dropout 0.5; the gradients of one graph under the same masks."""
    img, txt = Encoder(1, dropout=0.5).to(device), Encoder(2, dropout=0.5).to(device)
    x, y = rows(seed=1).to(device), rows(seed=2).to(device)
    assert_same_step(
        lambda: cached_loss(contrastive, [(img, x, 4), (txt, y, 3)]),
        lambda: contrastive(in_one_graph(img, x, 4), in_one_graph(txt, y, 3)),
        parameters_of(img, txt),
    )


def test_dropout_where_the_inputs_show_no_device(device: torch.device) -> None:
    """Row 32: strings in, a head with dropout on top, and a GPU that only the model shows."""
    model = Encoder(dropout=0.5).to(device)

    def encode(texts: list[str]) -> Tensor:
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.float64, device=device)
        return F.dropout(model(lengths[:, None].expand(-1, WIDTH)), 0.3)

    words = ["a", "bcd", "ef", "ghijk", "lmno"]
    assert_same_step(
        lambda: cached_loss(contrastive, [(encode, words, 2), (encode, words[::-1], 2)]),
        lambda: contrastive(
            *(
                torch.cat([encode(part) for part in (one[:2], one[2:4], one[4:])])
                for one in (words, words[::-1])
            )
        ),
        parameters_of(model),
    )


def test_the_random_numbers_go_on_as_after_one_pass(device: torch.device) -> None:
    model, x = Encoder(dropout=0.5).to(device), rows().to(device)
    torch.manual_seed(1)
    in_one_graph(model, x, 4)
    expected = torch.rand(3, device=device)
    torch.manual_seed(1)
    loss = cached_loss(lambda a: contrastive(a, a), [(model, x, 4)])
    loss.backward()
    assert torch.equal(torch.rand(3, device=device), expected)


def half(device: torch.device, cache: bool = True) -> torch.autocast:
    """bfloat16; without a cache, each chunk casts the weights, as the second pass does."""
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=cache)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_of_the_first_pass(backward_inside: bool, device: torch.device) -> None:
    """Encoded under autocast; run backward outside of it, or within."""
    model, x, y = Encoder().to(device).float(), *(rows(seed=s).to(device).float() for s in (1, 2))
    seen: list[torch.dtype] = []

    def loss_fn(a: Tensor, b: Tensor) -> Tensor:
        seen.extend((a.dtype, b.dtype))
        return contrastive(a, b)

    def cached() -> Tensor:
        with half(device):
            loss = cached_loss(loss_fn, [(model, x, 3), (model, y, 4)])
            if backward_inside:
                loss.backward()
        return loss.detach().requires_grad_() if backward_inside else loss

    def plain() -> Tensor:
        with half(device, cache=False):
            return loss_fn(in_one_graph(model, x, 3), in_one_graph(model, y, 4))

    assert_same_step(cached, plain, parameters_of(model), rtol=1e-4, atol=1e-6)
    assert seen == [torch.bfloat16] * 4


def test_autocast_keeps_no_casts_of_the_first_pass(device: torch.device) -> None:
    """Made without a graph, they would stand for the parameters later in the region."""
    model, x = Encoder().to(device).float(), rows().to(device).float()

    def extra() -> Tensor:
        with half(device):
            cached_loss(lambda a: contrastive(a, a), [(model, x, 4)])
            return model(x).square().mean()

    def plain() -> Tensor:
        with half(device):
            return model(x).square().mean()

    assert_same_step(extra, plain, parameters_of(model))


class Normed(nn.Module):
    """A tower with a layer of normalisation."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Linear(8, 8)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_batch_norm_in_train_mode() -> None:
    """Row 34: a warning that names the module; running statistics updated once a chunk."""
    model, x, y = Normed(nn.BatchNorm1d(8)), rows(12, seed=1), rows(12, seed=2)
    buffers = {name: one.clone() for name, one in model.named_buffers()}

    def step(encode: Callable[[], Tensor]) -> Tensor:
        model.load_state_dict(buffers, strict=False)
        return encode()

    message = (
        "towers[0]: model: batch norm in train mode takes its statistics from each chunk, not from "
        "the batch: body.1. GroupNorm, LayerNorm or eval() do not"
    )
    with pytest.warns(UserWarning, match="batch norm") as caught:
        assert_same_step(
            lambda: step(lambda: cached_loss(contrastive, [(model, x, 4), (model, y, 4)])),
            lambda: step(lambda: contrastive(in_one_graph(model, x, 4), in_one_graph(model, y, 4))),
            parameters_of(model),
        )
    assert {one.filename for one in caught} == {__file__}
    assert str(caught[0].message) == message
    expected = dict(model.named_buffers())
    assert expected["body.1.num_batches_tracked"] == 6
    model.load_state_dict(buffers, strict=False)
    with pytest.warns(UserWarning, match="batch norm"):
        loss = cached_loss(contrastive, [(model, x, 4), (model, y, 4)])
    for _ in range(2):
        for name, one in model.named_buffers():
            assert torch.equal(one, expected[name]), name
        if loss.grad_fn is not None:
            loss.backward()
            loss = loss.detach()


@pytest.mark.parametrize(
    ("norm", "train", "chunk"),
    [
        (nn.BatchNorm1d(8), False, 4),
        (nn.BatchNorm1d(8), True, 12),
        (nn.GroupNorm(2, 8), True, 4),
        (nn.LayerNorm(8), True, 4),
    ],
    ids=["eval", "one chunk", "group norm", "layer norm"],
)
def test_no_warning_of_norms(norm: nn.Module, train: bool, chunk: int) -> None:
    model, x = Normed(norm).train(train), rows(12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached_loss(lambda a: contrastive(a, a), [(model, x, chunk)])


class Counting(nn.Module):
    """A tower whose output depends on a buffer that every call updates in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder, self.how = Encoder(), how
        self.calls: Any
        start = None if how == "lazily" else torch.zeros(1, dtype=torch.float64)
        self.register_buffer("calls", start)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "anew":
            self.calls = self.calls + 0.5
            self.calls = self.calls + 0.5
        elif self.how == "in place":
            self.calls += 1
        elif self.how == "behind the version":
            self.calls.data.add_(1)
        elif self.how == "growing":
            self.calls = torch.cat([self.calls, self.calls[-1:] + 1])
        else:
            self.calls = x.new_ones(1) if self.calls is None else self.calls + 1
        return self.encoder(x + self.calls[-1])


HOW = ["anew", "in place", "behind the version", "growing", "lazily"]


@pytest.mark.parametrize("how", HOW)
def test_buffers_that_the_output_depends_on(how: str) -> None:
    x, y = rows(seed=1), rows(seed=2)
    model, other = Counting(how), Counting(how)
    found = gradients(
        lambda: cached_loss(contrastive, [(model, x, 3), (model, y, 4)]), parameters_of(model)
    )
    expected = gradients(
        lambda: contrastive(in_one_graph(other, x, 3), in_one_graph(other, y, 4)),
        parameters_of(other),
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(model.calls, other.calls)
    loss = cached_loss(contrastive, [(model, x, 3), (model, y, 4)])
    model(x)
    before = model.calls.clone()
    loss.backward()
    assert torch.equal(model.calls, before)


def test_weights_that_are_cached() -> None:
    """As for autocast: what the first pass leaves in the cache has no graph."""
    model, x = Encoder(), rows()
    parametrizations.weight_norm(model.hidden)

    def loss(cached: bool) -> Tensor:
        with parametrize.cached():
            main = contrastive(model(x), model(x.flip(0)))
            if cached:
                main = cached_loss(contrastive, [(model, x, 4), (model, x.flip(0), 4)])
            return main + model(x).square().mean()

    assert_same_step(lambda: loss(True), lambda: loss(False), parameters_of(model))


def test_another_mode_before_backward() -> None:
    model, x = Encoder(dropout=0.5), rows()
    loss = cached_loss(lambda a: contrastive(a, a), [(model, x, 4)])
    model.eval()
    message = r"^towers\[0\]: model: expected train\(\) or eval\(\) as it was until backward has"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


class Careless(nn.Module):
    """A tower that edits its inputs: tensors in place, and its dict."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs["x"].mul_(2).add_(1)
        inputs["rep"] = self.encoder(inputs["x"])
        inputs["texts"].append("more")
        return {"rep": inputs["rep"]}


@pytest.mark.parametrize("chunk", [4, 100])
def test_inputs_that_the_model_edits(chunk: int) -> None:
    """Row 32: nothing of it reaches the caller's inputs, or the second pass."""
    model, x = Careless(), rows()
    texts = ["a"] * len(x)
    inputs = {"x": x.clone(), "texts": texts}

    def loss_fn(out: dict[str, Tensor]) -> Tensor:
        return contrastive(out["rep"], out["rep"].flip(0))

    assert_same_step(
        lambda: cached_loss(loss_fn, [(model, [inputs], chunk)]),
        lambda: loss_fn({"rep": model.encoder(2 * x + 1)}),
        parameters_of(model),
    )
    assert set(inputs) == {"x", "texts"}
    assert torch.equal(inputs["x"], x)
    assert texts == ["a"] * len(x)


def test_inputs_edited_before_backward() -> None:
    model, x = Encoder(), rows()
    loss = cached_loss(lambda a: contrastive(a, a), [(model, x, 4)])
    x.zero_()
    message = (
        r"^towers\[0\]: inputs: expected as they were until backward has run, "
        r"got tensors edited in place since$"
    )
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_parameters_changed_before_backward() -> None:
    model, x = Encoder(), rows()
    loss = cached_loss(lambda a: contrastive(a, a), [(model, x, 4)])
    with torch.no_grad():
        model.output.bias.add_(1)
    message = r"^towers\[0\]: model: expected its parameters as they were until backward has run"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_backward_twice() -> None:
    model, x = Encoder(), rows()
    loss = cached_loss(lambda a: contrastive(a, a), [(model, x, 4)])
    loss.backward(retain_graph=True)
    found = [one.grad.clone() for one in model.parameters()]  # type: ignore
    with pytest.raises(RuntimeError, match=r"^cached_loss: expected one backward pass, got a sec"):
        loss.backward()
    for one, before in zip(model.parameters(), found, strict=True):
        assert torch.equal(one.grad, before)  # type: ignore


def test_second_derivative() -> None:
    model, x = Encoder(), rows().requires_grad_()
    loss = cached_loss(lambda a: (a**2).sum(), [(model, x, 4)])
    with pytest.raises(NotImplementedError, match=r"^cached_loss: expected no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_representation_that_the_loss_does_not_use() -> None:
    img, txt, x = Encoder(1), Encoder(2), rows()
    message = "expected a representation that the loss depends on, got one that it does not"
    loss = cached_loss(lambda a, b: contrastive(a, a), [(img, x, 4), (txt, x, 4)])
    with pytest.raises(ValueError, match=rf"^towers\[1\]: {message}"):
        loss.backward()
    loss = cached_loss(
        lambda out: contrastive(out["a"], out["a"]),
        [(lambda x: {"a": img(x), "b": txt(x)}, x, 4)],
    )
    with pytest.raises(ValueError, match=rf"^towers\[0\]\['b'\]: {message}"):
        loss.backward()


def fail(*_: Any) -> None:
    torch.rand(3)
    raise ZeroDivisionError


def test_a_failing_second_pass_leaves_the_state_in_order() -> None:
    """Random numbers and buffers are where they were, whatever the model raised."""
    model, x = Counting("in place"), rows()
    loss = cached_loss(lambda a: contrastive(a, a), [(model, x, 4)])
    state = torch.get_rng_state()
    model.encoder.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 3


def test_the_loss_is_the_last_to_see_the_chunks() -> None:
    """``infloss.info_nce`` on targets of its own, chunks or not."""
    model, x, y = Encoder(), rows(6, seed=1), rows(9, seed=2)
    target = torch.tensor([8, 0, 3, 3, 1, 7])

    def loss_fn(query: Tensor, key: Tensor) -> Tensor:
        return infloss.info_nce(query, key, target, 4.0)

    assert_same_step(
        lambda: cached_loss(loss_fn, [(model, x, 4), (model, y, 4)]),
        lambda: loss_fn(model(x), model(y)),
        parameters_of(model),
    )
