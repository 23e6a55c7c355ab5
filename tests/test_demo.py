"""The demo runs from a checkout and leaves a picture and its numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_one_epoch_of_the_demo(tmp_path: Path, device: torch.device) -> None:
    output = tmp_path / "demo.png"
    command = ["train_emoji.py", "--epochs", "1", "--device", str(device), "--output", str(output)]
    run = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    numbers = json.loads(output.with_suffix(".json").read_text())
    assert numbers["steps"] == 6
    assert numbers["chance"]
    assert numbers["before"] != numbers["after"]
    with Image.open(output) as picture:
        assert min(picture.size) > 500
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 1000
