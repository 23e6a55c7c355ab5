"""The demo under torchrun trains as it does in one process: one loss curve, whatever the ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
THINNING = 10  # one emoji in ten: 308 to train on, of 214 concepts
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

# Runs the demo in a given dtype, as its command line has no use for any but float32.
DRIVER = f"""
import sys
import torch
torch.set_default_dtype(getattr(torch, sys.argv.pop(1)))
sys.path.insert(0, {str(EXAMPLES)!r})
import train_emoji
train_emoji.main()
"""

# Two batches of 107 pairs an epoch, which neither two nor three ranks share evenly.
SAMPLED = ("--batch-size", "128", "--epochs", "3")
# One batch of 308 pictures, with six captions each.
WHOLE = ("--full-batch", "--epochs", "3")
# The same in three chunks, the last of 52, through another tower.
CHUNKED = ("--chunk-size", "128", "--epochs", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the emoji."""
    with np.load(EXAMPLES / "data" / "emoji.npz") as archive:
        fields = dict(archive)
    languages = fields.pop("languages")
    path = tmp_path_factory.mktemp("data") / "emoji.npz"
    np.savez(path, languages=languages, **{name: f[::THINNING] for name, f in fields.items()})
    return path


def losses(folder: Path, data: Path, ranks: int, dtype: str, *options: str) -> np.ndarray:
    """The loss of each step of a run of the demo in ``folder``, where it leaves its files."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    output = folder / f"{ranks}.png"
    launcher = [*TORCHRUN, str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(driver), dtype, "--device", "cpu", *options]
    run = subprocess.run(
        [*command, "--data", str(data), "--output", str(output)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("recall over") == 1  # of all ranks, the main one alone prints
    differences = re.findall(r"in one piece: relative difference (\S+);", run.stdout)
    assert len(differences) == (ranks == 1 and "--chunk-size" in options)
    assert all(float(one) < 1e-12 for one in differences)
    numbers = json.loads(output.with_suffix(".json").read_text())
    assert numbers["ranks"] == ranks
    assert numbers["steps"] == len(numbers["losses"])
    return np.array(numbers["losses"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "options"),
    [((2, 3), SAMPLED), ((3,), WHOLE), ((2,), CHUNKED)],
    ids=["sampled", "full-batch", "chunks"],
)
def test_ranks_train_as_one_process_does(
    tmp_path: Path, data: Path, counts: tuple[int, ...], options: tuple[str, ...]
) -> None:
    """In float64, where Adam's first steps, of size lr * sign(gradient), hide no rounding.

    Rounding leaves 1e-13 of these losses or less; a mask, a shift or a statistic that is not
    the whole batch's changes them by more than 1e-3.
    """
    alone = losses(tmp_path, data, 1, "float64", *options)
    if options == CHUNKED:  # two steps of a warm-up: the loss moves, not yet down
        assert abs(alone[-1] - alone[0]) > 0.05
    else:
        assert alone[-1] < alone[0] - 0.05
    for ranks in counts:
        spread = losses(tmp_path, data, ranks, "float64", *options)
        np.testing.assert_allclose(spread, alone, rtol=1e-10, err_msg=f"{ranks} ranks")


@pytest.mark.slow
def test_float32_ranks_train_as_one_process_does(tmp_path: Path, data: Path) -> None:
    """The first loss agrees to the rounding of a mean of some hundred values.

    Later ones do as far as those of one process with one thread and with two, which differ by
    up to 1e-3: where a gradient is next to nothing, its rounding decides which way Adam goes.
    """
    alone = losses(tmp_path, data, 1, "float32", *SAMPLED)
    assert abs(alone[-1] - alone[0]) > 0.05  # training moves
    spread = losses(tmp_path, data, 2, "float32", *SAMPLED)
    np.testing.assert_allclose(spread[0], alone[0], rtol=2e-6)
    np.testing.assert_allclose(spread, alone, rtol=5e-3)
