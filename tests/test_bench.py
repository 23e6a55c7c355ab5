"""The benchmark frame: its own oracle, its tables, its targets."""

from pathlib import Path
from typing import Any

import pytest
import torch

import accuracy
import adapters
import cpu
import infloss
import oracle
import record
import update_readme
from infloss import reference

COLUMNS = [record.Column("peer", "loss"), record.Column("ms", "ms", ".1f")]
ENVIRONMENT = {
    "device": "a device",
    "threads": 2,
    "driver": None,
    "torch": "9.9",
    "cuda": None,
    "python": "3.99",
    "infloss": {"infloss": "1.2.3"},
    "commit": "0123456789abcdef",
    "dirty": False,
    "date": "2000-01-01",
}


def result(rows: list[dict[str, Any]], **changes: Any) -> record.Result:
    environment = {**ENVIRONMENT, **changes}
    return record.Result("name", "title", ["python bench/x.py"], environment, {}, COLUMNS, rows)


def test_the_chunked_oracle_is_the_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(oracle._CHUNK_BYTES, "cpu", 8 * 17 * 5)  # five rows at a time
    torch.manual_seed(0)
    img, txt = (torch.randn(17, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = reference.contrastive_loss(img, txt, 9.0).mean()
    loss.backward()
    chunked = oracle.chunked_gradients(img.detach(), txt.detach(), 9.0, torch.float64)
    torch.testing.assert_close(chunked.loss, loss.detach())
    torch.testing.assert_close(chunked.img, img.grad)
    torch.testing.assert_close(chunked.txt, txt.grad)


@pytest.mark.parametrize("name", ["infloss", "dense", "dense-once", "chunked"])
def test_adapters_compute_the_same_loss(name: str) -> None:
    torch.manual_seed(0)
    img, txt = torch.randn(33, 8), torch.randn(33, 8)
    loss = adapters.PEERS[name].build(torch.device("cpu"))(img, txt, 14.3)
    torch.testing.assert_close(loss, reference.contrastive_loss(img, txt, 14.3).mean())


def test_a_wrong_gradient_breaks_the_contract() -> None:
    torch.manual_seed(0)
    img, txt = torch.randn(33, 8), torch.randn(33, 8)
    judge = oracle.make_oracle(img, txt, 14.3)
    right = oracle.chunked_gradients(img, txt, 14.3, torch.float32)
    wrong = oracle.Gradients(right.loss, right.img * 1.001, right.txt)
    assert judge.errors(right).within_contract
    assert not judge.errors(wrong).within_contract


def test_tables_fill_the_blocks_that_ask_for_them() -> None:
    rows = [{"peer": "a", "ms": 1.25}, {"peer": "b|c", "ms": None}]
    begin, end = "<!-- bench:name:begin columns=ms,peer where=peer:a -->", "<!-- bench:name:end -->"
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    filled = update_readme.replace_blocks(text, lambda name: result(rows))
    assert "old" not in filled
    assert "| 1.2 | a    |" in filled
    assert "b\\|c" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n")
    assert "commit 0123456789ab" in filled
    assert update_readme.replace_blocks(filled, lambda name: result(rows)) == filled


def test_a_block_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="no bench:NAME:end marker"):
        update_readme.replace_blocks("<!-- bench:name:begin -->", lambda name: result([]))


def test_rows_of_another_commit_are_not_mixed_in() -> None:
    with pytest.raises(ValueError, match="cannot append, commit was"):
        record.merge(result([]), result([], commit="other"), ["peer"])


def test_a_target_without_its_figure_is_missed() -> None:
    fine = {"batch": 1, "dim": 1, "peer": "dense", "time_ratio": 0.1, "memory_ratio": 0.01}
    slow = {**fine, "time_ratio": 0.71}
    unmeasured = {"batch": 65536, "dim": 64, "peer": "infloss"}
    assert cpu.missed_targets([fine]) == []
    assert len(cpu.missed_targets([fine, slow, unmeasured])) == 2


TINY = ["--device", "cpu", "--batch", "24", "--dim", "12"]


def test_the_accuracy_table_judges_every_output(tmp_path: Path) -> None:
    assert accuracy.main([*TINY, "--path", "portable", "--results-dir", str(tmp_path)]) == 0
    written = record.read_result("accuracy", tmp_path)
    assert written.settings["path"] == "portable"
    assert len(written.rows) == len(accuracy.KINDS) * len(accuracy.SCALES) * 6
    for row in written.rows:
        medium = row["precision"] == "medium"
        assert row["status"] == (accuracy.NOT_JUDGED if medium else accuracy.OK)
        for name in accuracy.Outputs._fields:
            vanishes = row["pairs"] == "identical" and row["scale"] == 100
            assert vanishes or medium or 0 <= row[f"{name}_error"] <= row[f"{name}_allowed"]


def test_the_accuracy_table_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = infloss.contrastive_loss
    monkeypatch.setattr(infloss, "contrastive_loss", lambda x, y, s: right(x, y, 1.001 * s))
    assert accuracy.main([*TINY, "--dtype", "fp32", "--results-dir", str(tmp_path)]) == 1
    for row in record.read_result("accuracy", tmp_path).rows:
        if row["precision"] == "highest" and row["pairs"] == "weak":
            assert row["status"] == "wrong: loss, dx, dy, dscale"
        if row["precision"] == "medium":
            assert row["status"] == accuracy.NOT_JUDGED


def test_an_accuracy_table_with_nothing_judged_fails(tmp_path: Path) -> None:
    """Compiled kernels take no CPU tensors, so every dtype is left out."""
    assert accuracy.main([*TINY, "--path", "sm80", "--results-dir", str(tmp_path)]) == 1


def test_an_output_below_its_dtype_shows_no_error() -> None:
    exact = torch.full((3,), 1e-40, dtype=torch.float64)
    assert accuracy.compare(exact.float(), exact.float(), exact, 1e-5) is None
    assert accuracy.compare(exact, exact, exact, 1e-5) is not None
