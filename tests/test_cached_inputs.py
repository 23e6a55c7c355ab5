"""How a tower's inputs are cut into chunks, and what is refused before any model runs."""

from __future__ import annotations

import re
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infloss
from cached import WIDTH, Encoder, assert_same_step, contrastive, parameters_of, rows
from infloss import Tower, cached_loss
from infloss.grad_cache.inputs import Chunk
from support import normal

Pair = namedtuple("Pair", ["left", "right"])


def chunks_of(tower: Tower) -> list[Chunk]:
    return tower.chunks("tower")


def call(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("no model is to run")


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


INPUTS: dict[str, tuple[Any, list[tuple[list[Any], dict[str, Any]]]]] = {
    "a tensor": (numbers(3), [([[0, 1]], {}), ([[2]], {})]),
    "a list": ([numbers(3), numbers(3)], [([[0, 1], [0, 1]], {}), ([[2], [2]], {})]),
    "a tuple": ((numbers(3), "mean"), [([[0, 1], "mean"], {}), ([[2], "mean"], {})]),
    "a dict": ({"x": numbers(3)}, [([], {"x": [0, 1]}), ([], {"x": [2]})]),
    "a UserDict": (UserDict(x=numbers(3)), [([], {"x": [0, 1]}), ([], {"x": [2]})]),
    "both": (
        ([numbers(3)], {"y": numbers(3), "flag": True}),
        [([[0, 1]], {"y": [0, 1], "flag": True}), ([[2]], {"y": [2], "flag": True})],
    ),
    "strings": (["a", "b", "c"], [([["a", "b"]], {}), ([["c"]], {})]),
    "strings beside a tensor": (
        [numbers(3), ["a", "b", "c"], ["one", "prompt"][:1]],
        [([[0, 1], ["a", "b"], ["one"]], {}), ([[2], ["c"], ["one"]], {})],
    ),
    "one for all": (
        [numbers(3), numbers(1), torch.tensor(7), None],
        [([[0, 1], [0], 7, None], {}), ([[2], [0], 7, None], {})],
    ),
    "containers": (
        ([{"ids": numbers(3)}], {"pair": Pair(numbers(3), [numbers(3)])}),
        [
            ([{"ids": [0, 1]}], {"pair": Pair([0, 1], [[0, 1]])}),
            ([{"ids": [2]}], {"pair": Pair([2], [[2]])}),
        ],
    ),
}


def plain(value: Any) -> Any:
    """Tensors as lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, Pair):
        return Pair(*map(plain, value))
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", INPUTS)
def test_chunks_of_two_rows(kind: str) -> None:
    inputs, expected = INPUTS[kind]
    found = [(plain(one.args), plain(one.kwargs)) for one in chunks_of(Tower(call, inputs, 2))]
    assert found == expected


def test_other_things_are_split_by_the_user() -> None:
    tower = Tower(call, "abcde", 2, split=lambda text, size: [text[:size], {"rest": text[size:]}])
    assert [(one.args, one.kwargs) for one in chunks_of(tower)] == [
        (["ab"], {}),
        ([], {"rest": "cde"}),
    ]


LENGTHS = [3, 1, 5, 5, 2, 1, 1, 6]


def padded() -> dict[str, Tensor]:
    """Ids with their mask, padded to 8 columns on the right."""
    mask = torch.arange(8) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": numbers(8, 8), "attention_mask": mask.long(), "label": numbers(8)}


def test_chunks_of_ten_tokens() -> None:
    """Greedy in order: rows times the longest row's tokens stay within the budget."""
    chunks = chunks_of(Tower(call, padded(), max_tokens=10))
    shapes = [tuple(one.kwargs["input_ids"].shape) for one in chunks]
    assert shapes == [(2, 3), (2, 5), (3, 2), (1, 6)]
    assert [one.kwargs["label"].tolist() for one in chunks] == [[0, 1], [2, 3], [4, 5, 6], [7]]
    for one in chunks:
        assert one.kwargs["attention_mask"].shape == one.kwargs["input_ids"].shape
        assert one.kwargs["attention_mask"].any(0).all()
    ids = torch.cat([one.kwargs["input_ids"].flatten() for one in chunks])
    kept = numbers(8, 8)[padded()["attention_mask"].bool()]
    assert set(kept.tolist()) <= set(ids.tolist())


def test_padding_on_the_left_is_kept() -> None:
    inputs = {name: one.flip(-1) if one.dim() > 1 else one for name, one in padded().items()}
    chunks = chunks_of(Tower(call, inputs, max_tokens=16))
    assert [tuple(one.kwargs["input_ids"].shape) for one in chunks] == [(2, 8)] * 4


class Bag(nn.Module):
    """Mean over a row's tokens of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8, dtype=torch.float64)
        with torch.no_grad():
            self.embedding.weight.copy_(normal(64, 8))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, label: Tensor) -> Tensor:
        mask = attention_mask[:, :, None].double()
        return (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)


def test_gradients_of_a_token_budget() -> None:
    model, inputs = Bag(), padded()
    other = {**inputs, "input_ids": inputs["input_ids"].flip(0)}
    assert_same_step(
        lambda: cached_loss(
            contrastive,
            [Tower(model, inputs, max_tokens=10), Tower(model, UserDict(other), max_tokens=17)],
        ),
        lambda: contrastive(model(**inputs), model(**other)),
        parameters_of(model),
    )


def test_gradients_of_strings_and_keywords() -> None:
    model = Encoder()
    words = [chr(97 + index) * (index + 1) for index in range(5)]

    def encode(texts: list[str], *, scale: float) -> Tensor:
        counts = torch.tensor([[float(len(text))] * WIDTH for text in texts], dtype=torch.float64)
        return scale * model(counts)

    x = rows(5)
    assert_same_step(
        lambda: cached_loss(contrastive, [(encode, ([words], {"scale": 0.3}), 2), (model, x, 3)]),
        lambda: contrastive(encode(words, scale=0.3), model(x)),
        parameters_of(model),
    )


X = rows(4)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no towers": ([], ValueError, "towers: expected at least one, got none"),
    "a dict of towers": ({}, TypeError, "towers: expected a list of towers, got dict"),
    "one tower by itself": (
        Tower(call, X, 2),
        TypeError,
        "towers: expected a list of towers, got Tower",
    ),
    "two values": (
        [(call, X, 2), (call, X)],
        TypeError,
        "towers[1]: expected a Tower or (model, inputs, chunk_size), got 2 values",
    ),
    "no tower": (
        [call],
        TypeError,
        "towers[0]: expected a Tower or (model, inputs, chunk_size), got function",
    ),
    "model": ([("m", X, 2)], TypeError, "towers[0]: model: expected a callable, got str"),
    "chunk of none": (
        [(call, X, 0)],
        ValueError,
        "towers[0]: chunk_size: expected 1 or more, got 0",
    ),
    "half a row": (
        [(call, X, 1.5)],
        TypeError,
        "towers[0]: chunk_size: expected an int, got float",
    ),
    "a flag": ([(call, X, True)], TypeError, "towers[0]: chunk_size: expected an int, got bool"),
    "no size": (
        [Tower(call, X)],
        ValueError,
        "towers[0]: expected either chunk_size or max_tokens, got neither",
    ),
    "two sizes": (
        [Tower(call, X, 2, max_tokens=2)],
        ValueError,
        "towers[0]: expected either chunk_size or max_tokens, got both",
    ),
    "no tokens": (
        [Tower(call, X, max_tokens=-1)],
        ValueError,
        "towers[0]: max_tokens: expected 1 or more, got -1",
    ),
    "no mask": (
        [Tower(call, X, max_tokens=5)],
        ValueError,
        "towers[0]: max_tokens: expected an 'attention_mask' among the inputs, got none",
    ),
    "a mask of one dimension": (
        [Tower(call, {"attention_mask": torch.ones(4)}, max_tokens=5)],
        ValueError,
        "towers[0]: attention_mask: expected shape [4, L], got [4]",
    ),
    "a long row": (
        [Tower(call, padded(), max_tokens=5)],
        ValueError,
        "towers[0]: max_tokens: expected at least the 6 tokens of the longest row, got 5",
    ),
    "split": (
        [Tower(call, X, 2, split=[])],  # type: ignore
        TypeError,
        "towers[0]: split: expected a callable, got list",
    ),
    "split by tokens": (
        [Tower(call, X, max_tokens=2, split=call)],
        ValueError,
        "towers[0]: split: expected a chunk_size beside it, got max_tokens",
    ),
    "split into nothing": (
        [Tower(call, X, 2, split=lambda *_: [])],
        ValueError,
        "towers[0]: split: expected a list with at least one chunk, got none",
    ),
    "split into one": (
        [Tower(call, X, 2, split=lambda *_: X)],
        ValueError,
        "towers[0]: split: expected a list with at least one chunk, got Tensor",
    ),
    "nothing to split": (
        [(call, [1, None], 2)],
        TypeError,
        "towers[0]: inputs: expected a tensor or a list of strings among them, to be split; "
        "pass split= for anything else",
    ),
    "rows that differ": (
        [(call, ([rows(4)], {"y": rows(5), "z": ["a"] * 4}), 2)],
        ValueError,
        "towers[0]: inputs: expected as many rows in all of them, "
        "got 4 at [0], 5 at ['y'], 4 at ['z']",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_no_tower(wrong: str) -> None:
    towers, kind, message = REFUSED[wrong]
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        cached_loss(contrastive, towers)


def test_what_is_no_loss_or_dtype() -> None:
    with pytest.raises(TypeError, match=r"^loss_fn: expected a callable, got NoneType$"):
        cached_loss(None, [(call, X, 2)])  # type: ignore
    message = r"^cache_dtype: expected a floating dtype or None, got torch\.int64$"
    with pytest.raises(TypeError, match=message):
        cached_loss(contrastive, [(call, X, 2)], cache_dtype=torch.int64)
    message = r"^cache_dtype: expected a floating dtype or None, got 'fp32'$"
    with pytest.raises(TypeError, match=message):
        cached_loss(contrastive, [(call, X, 2)], cache_dtype="fp32")  # type: ignore


def test_towers_of_different_batches() -> None:
    """The loss says whether it needs as many rows; in-batch negatives of one side may be more."""
    model = Encoder()
    with pytest.raises(ValueError, match=r"^txt: expected 4 rows as img, got 5$"):
        cached_loss(contrastive, [(model, rows(4), 2), (model, rows(5), 2)])


OUTPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "no tensor": (
        lambda x: None,
        TypeError,
        "towers[0]: expected a tensor, or a tuple, dict or dataclass with tensors, as the model's "
        "output, got NoneType",
    ),
    "other containers": (
        lambda x: {"a": x} if len(x) == 2 else [x, x],
        ValueError,
        "towers[0]['a']: expected outputs [\"towers[0]['a']\"] of every chunk, "
        "got ['towers[0][0]', 'towers[0][1]']",
    ),
    "a mean": (
        lambda x: {"rows": x, "mean": x.mean() * 0 + len(x)},
        ValueError,
        "towers[0]['mean']: expected an output of shape [] to be the same for every chunk, "
        "got [2.0, 1.0]",
    ),
    "tokens": (
        lambda x: x[:, : len(x)],
        ValueError,
        "towers[0]: expected one shape of a row in every chunk, got [(1,), (2,)]",
    ),
}


@pytest.mark.parametrize("wrong", OUTPUTS)
def test_outputs_that_cannot_be_joined(wrong: str) -> None:
    model, kind, message = OUTPUTS[wrong]
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        cached_loss(lambda a: a, [(model, rows(3), 2)])


def test_the_package_exports_them() -> None:
    assert {"GradCache", "Tower", "cached_loss"} <= set(infloss.__all__)
