"""Building and installing: without nvcc, required CUDA, architecture lists, pins, CMake."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch

import infloss

ROOT = Path(__file__).parent.parent
NO_NVCC = {"CUDA_HOME": "/nonexistent", "CUDA_PATH": "/nonexistent"}
BUILD_SWITCHES = ("FORCE_CUDA", "INFLOSS_REQUIRE_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS")
PROBE = """
import torch, infloss
info = infloss.build_info()
assert info["cuda"] is None and info["cuda_archs"] == (), info
x = torch.eye(4, requires_grad=True)
loss = infloss.contrastive_loss(x, x.detach(), 1.0)
loss.backward()
expected = torch.nn.functional.cross_entropy(torch.eye(4), torch.arange(4))
torch.testing.assert_close(loss, expected)
"""


def run(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in BUILD_SWITCHES}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The functions of setup.py, run without building anything."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    before = dict(os.environ)
    for name in BUILD_SWITCHES:
        os.environ.pop(name, None)
    os.environ["FORCE_CUDA"] = "0"
    yield runpy.run_path("setup.py")
    os.environ.clear()
    os.environ.update(before)


def copy_of_sources(folder: Path) -> Path:
    """The sources without build products, so that a test build leaves the tree alone."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("csrc", "infloss"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_builds_and_works_without_nvcc(tmp_path: Path) -> None:
    source = copy_of_sources(tmp_path / "source")
    target = tmp_path / "site"
    arguments = ("--no-build-isolation", "--no-deps", "--target", target, source)
    built = run(sys.executable, "-m", "pip", "install", "-v", *arguments, env=NO_NVCC)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "building WITHOUT CUDA kernels" in built.stdout + built.stderr
    probe = run(sys.executable, "-c", PROBE, env={"PYTHONPATH": str(target)}, cwd=tmp_path)
    assert probe.returncode == 0, probe.stderr


def test_a_source_distribution_can_be_built_from(tmp_path: Path) -> None:
    source = copy_of_sources(tmp_path / "source")
    made = run(sys.executable, "setup.py", "-q", "sdist", env={"FORCE_CUDA": "0"}, cwd=source)
    assert made.returncode == 0, made.stderr
    (archive,) = (source / "dist").iterdir()
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    for path in (ROOT / "csrc").rglob("*.*"):
        assert str(path.relative_to(ROOT)) in names


def test_required_cuda_without_nvcc_is_an_error() -> None:
    built = run(
        sys.executable, "setup.py", "--version", env={**NO_NVCC, "INFLOSS_REQUIRE_CUDA": "1"}
    )
    assert built.returncode != 0
    assert "CUDA kernels are required, but" in built.stderr


@pytest.mark.parametrize(
    ("asked", "built"),
    [
        ("", "8.0+PTX;9.0a"),
        ("9.0", "9.0a"),
        ("8.0 9.0+PTX", "8.0;9.0a+PTX"),
        ("9.0a;12.0", "9.0a;12.0"),
        ("Hopper", "9.0a+PTX"),
    ],
)
def test_hopper_is_built_with_its_own_instructions(
    setup_script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, asked: str, built: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert setup_script["cuda_archs"]() == built


@pytest.mark.parametrize(("free_gib", "cores", "jobs"), [(1.0, 8, 1), (7.0, 8, 2), (900.0, 8, 8)])
def test_jobs_are_capped_by_free_memory(
    setup_script: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    free_gib: float,
    cores: int,
    jobs: int,
) -> None:
    cap_jobs = setup_script["cap_jobs"]
    monkeypatch.setitem(cap_jobs.__globals__, "free_memory_gib", lambda: free_gib)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    cap_jobs()
    assert os.environ["MAX_JOBS"] == str(jobs)


def test_a_users_max_jobs_is_kept(
    setup_script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "5")
    setup_script["cap_jobs"]()
    assert os.environ["MAX_JOBS"] == "5"


def test_precommit_pins_are_those_of_ci() -> None:
    lint = re.search(r"^lint = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert lint
    pins = set(re.findall(r"[\w-]+==[\d.]+", lint.group(1)))
    hooks = re.findall(r"\[([\w-]+==[\d.]+)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks
    assert set(hooks) <= pins


def test_a_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(infloss, "_C")
    monkeypatch.setitem(sys.modules, "infloss._C", None)
    with pytest.raises(ImportError, match="start Python outside the source folder"):
        runpy.run_path(str(ROOT / "infloss" / "library.py"))


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("nvcc") and shutil.which("cmake") and shutil.which("ninja")),
    reason="needs nvcc, cmake and ninja on the PATH",
)
def test_kernels_build_without_torch(tmp_path: Path) -> None:
    configured = run(
        "cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", "-DCMAKE_CUDA_ARCHITECTURES=90a"
    )
    assert configured.returncode == 0, configured.stdout + configured.stderr
    built = run("cmake", "--build", tmp_path)
    assert built.returncode == 0, built.stdout
    checked = run(tmp_path / "check_stats")
    expected = 0 if torch.cuda.is_available() else 77
    assert checked.returncode == expected, checked.stdout + checked.stderr
