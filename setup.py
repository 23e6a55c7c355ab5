"""Builds infloss._C on LibTorch's stable ABI, with CUDA kernels where nvcc and a CUDA torch are.

Environment: ``INFLOSS_REQUIRE_CUDA=1`` (or ``FORCE_CUDA=1``) makes a build without CUDA an error,
``FORCE_CUDA=0`` builds without CUDA, ``TORCH_CUDA_ARCH_LIST`` chooses architectures, ``MAX_JOBS``
bounds parallel compilations.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import setup

TORCH_TARGET_2_11 = "0x020b000000000000"
DEFAULT_ARCHS = "8.0+PTX;9.0a"
GIB_PER_JOB = 3

COMMON_SOURCES = ["csrc/module.cpp", "csrc/ops.cpp"]


def env_flag(name: str) -> bool | None:
    value = os.environ.get(name)
    return None if value is None else value not in ("", "0")


def ask_nvcc(pattern: str, *arguments: str) -> str | None:
    """First group of ``pattern`` in what the chosen nvcc prints; None without nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        return None
    run = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=False)
    found = re.search(pattern, run.stdout + run.stderr)
    return found.group(1) if found else None


def nvcc_version() -> str | None:
    """Release of the toolkit, such as "13.0"."""
    return ask_nvcc(r"release (\d+\.\d+)", "--version")


def locate_toolkit() -> None:
    """Set CUDA_HOME for torch; an nvcc on the PATH may be a wrapper outside its toolkit."""
    top = ask_nvcc(r"TOP=(\S+)", "--dryrun", "-x", "cu", "/dev/null")
    if top:
        os.environ["CUDA_HOME"] = str(Path(top).resolve())


def why_no_cuda() -> str | None:
    """The reason why CUDA cannot be built here, or None if it can."""
    if env_flag("FORCE_CUDA") is False:
        return "FORCE_CUDA=0 is set"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    toolkit = nvcc_version()
    if toolkit is None:
        return f"no nvcc was found (CUDA_HOME is {os.environ.get('CUDA_HOME')})"
    if toolkit.split(".")[0] != torch.version.cuda.split(".")[0]:
        return f"nvcc is of CUDA {toolkit}, torch of CUDA {torch.version.cuda}"
    return None


def announce_missing_cuda(reason: str) -> None:
    if env_flag("INFLOSS_REQUIRE_CUDA") or env_flag("FORCE_CUDA"):
        sys.exit(f"infloss: CUDA kernels are required, but {reason}.")
    line = "=" * 78
    print(
        f"{line}\ninfloss: building WITHOUT CUDA kernels: {reason}.\n"
        "The portable path will serve every device. INFLOSS_REQUIRE_CUDA=1 makes this an error.\n"
        f"{line}",
        file=sys.stderr,
        flush=True,
    )


def cuda_archs() -> str:
    """TORCH_CUDA_ARCH_LIST, or the default, with 9.0 as 9.0a: wgmma and TMA exist only there."""
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS
    archs = archs.replace(" ", ";").replace("Hopper", "9.0+PTX")
    return re.sub(r"\b9\.0(?!a)", "9.0a", archs)


def free_memory_gib() -> float:
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return float("inf")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    return int(found.group(1)) / 2**20 if found else float("inf")


def cap_jobs() -> None:
    """Bound parallel compilations by cores and free memory, unless the user did."""
    by_memory = free_memory_gib() // GIB_PER_JOB
    jobs = max(1, int(min(os.cpu_count() or 1, by_memory)))
    os.environ.setdefault("MAX_JOBS", str(jobs))


def extension():
    reason = why_no_cuda()
    archs = "" if reason else cuda_archs()
    if reason:
        announce_missing_cuda(reason)
    else:
        os.environ["TORCH_CUDA_ARCH_LIST"] = archs
    macros = [
        ("TORCH_TARGET_VERSION", TORCH_TARGET_2_11),
        ("INFLOSS_CUDA_ARCHS", f'"{archs.replace(";", " ")}"'),
        ("INFLOSS_CUDA_VERSION", f'"{"" if reason else nvcc_version()}"'),
        ("INFLOSS_TORCH_VERSION", f'"{torch.__version__}"'),
    ]
    flags = {"cxx": ["-O3", "-std=c++20", "-fvisibility=hidden"], "nvcc": ["-O3", "-std=c++20"]}
    sources = list(COMMON_SOURCES)
    if not reason:
        macros += [("USE_CUDA", None), ("INFLOSS_WITH_CUDA", None)]
        sources += sorted(str(path) for path in Path("csrc").rglob("*.cu"))
    build = CppExtension if reason else CUDAExtension
    return build(
        name="infloss._C",
        sources=sources,
        include_dirs=[str(Path("csrc").resolve())],
        depends=sorted(str(path) for path in Path("csrc").rglob("*.*h")),
        define_macros=macros,
        extra_compile_args=flags,
        py_limited_api=True,
    )


cap_jobs()
if env_flag("FORCE_CUDA") is not False:
    locate_toolkit()
# torch settles on its toolkit when this module is imported
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
