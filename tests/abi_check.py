"""Run the installed infloss, compiled library included, under another Python and torch.

    python tests/abi_check.py /path/to/other/python

The other interpreter needs a torch with the same CUDA major version (or none on both sides), and
nothing of infloss: it gets a copy of the installed package. Prints both sides' versions; exits
non-zero if the other side cannot load the library or gets another loss.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import infloss

PROBE = """
import sys, torch, infloss
generator = torch.Generator().manual_seed(0)
img = torch.randn(70, 33, generator=generator, dtype=torch.float64).to({device!r})
txt = torch.randn(70, 33, generator=generator, dtype=torch.float64).to({device!r})
loss = infloss.contrastive_loss(img.requires_grad_(), txt)
loss.backward()
info = infloss.build_info()
print(f"{{loss.item():.12f}} {{img.grad.norm().item():.12f}}")
print(f"python {{sys.version.split()[0]}}, torch {{info['torch']}}, "
      f"library built with torch {{info['built_with_torch']}}", file=sys.stderr)
"""


def probe(python: str, package_parent: Path, device: str) -> str:
    """Loss and gradient norm as one interpreter prints them, given infloss's parent folder."""
    run = subprocess.run(
        [python, "-c", PROBE.format(device=device)],
        env={"PYTHONPATH": str(package_parent), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return run.stdout


def main(other: str) -> None:
    package = Path(infloss.__file__).parent
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(package, Path(folder) / "infloss")
        ours = probe(sys.executable, Path(folder), device)
        theirs = probe(other, Path(folder), device)
    if ours != theirs:
        sys.exit(f"results differ:\n{ours}{theirs}")
    print(f"the same on {device}: loss, gradient norm = {ours.strip()}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
