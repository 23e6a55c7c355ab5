"""Results on disk: where they were measured, what their columns mean, and how a table looks.

No torch at import time: the documentation's tables are checked on machines that have none.
"""

from __future__ import annotations

import datetime
import importlib
import json
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
UNKNOWN = "unknown"

_UNRECORDED = ("--results-dir", "--commit")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table: its key in a row, its heading, and a format for numbers ("" = as is)."""

    key: str
    title: str
    format: str = ""


def environment(device_name: str, commit: str | None = None) -> dict[str, Any]:
    """Where and with what a result was measured, as plain JSON values.

    ``device_name`` is a torch device ("cuda", "cpu"). ``commit`` names the code for a tree that was
    copied without its git folder; otherwise git is asked, and "unknown" stands for no answer.
    """
    import torch

    device = torch.device(device_name)
    on_gpu = device.type == "cuda"
    revision, dirty = (commit, False) if commit else git_state(ROOT)
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "driver": driver_version() if on_gpu else None,
        "threads": None if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "infloss": build_info(),
        "commit": revision,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def build_info() -> dict[str, Any] | None:
    """``infloss.build_info()`` as JSON values, or None where infloss does not import."""
    try:
        info = importlib.import_module("infloss").build_info()
    except (ImportError, AttributeError):
        return None
    plain: dict[str, Any] = json.loads(json.dumps(info, default=str))
    return plain


def git_state(root: Path) -> tuple[str, bool | None]:
    """Commit and whether tracked files differ from it; ("unknown", None) without git.

    Results are not part of what is measured, so a changed bench/results leaves the tree clean.
    """
    revision = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if revision is None:
        return UNKNOWN, None
    others = ["--", ".", ":!bench/results"]
    changes = _output(["git", "-C", str(root), "status", "--porcelain", *others])
    return revision, changes is None or bool(changes)


def driver_version() -> str:
    """The NVIDIA driver's version, from nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (_output(query) or UNKNOWN).splitlines()[0]


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def command_line(script: str, arguments: Iterable[str]) -> str:
    """The command that made a result, as a reader can repeat it from the repository root.

    Options that say where the result goes or what the code is called are left out.
    """
    words, kept = iter(arguments), []
    for word in words:
        option, equals, _ = word.partition("=")
        if option not in _UNRECORDED:
            kept.append(word)
        elif not equals:
            next(words, None)
    return shlex.join(["python", script, *kept])


@dataclass
class Result:
    """One results file. ``bench/README.md`` documents the schema."""

    name: str
    title: str
    commands: list[str]
    environment: dict[str, Any]
    settings: dict[str, Any]
    columns: list[Column]
    rows: list[dict[str, Any]]

    def write(self, folder: Path = RESULTS) -> Path:
        """Write NAME.json, whole or not at all, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False)
        draft = path.with_suffix(".json.part")
        draft.write_text(text + "\n")
        draft.replace(path)
        return path


def read_result(name: str, folder: Path = RESULTS) -> Result:
    """Read NAME.json. Raises ValueError for another schema, FileNotFoundError without a file."""
    data = json.loads((folder / f"{name}.json").read_text())
    found = data.pop("schema", None)
    if found != SCHEMA:
        raise ValueError(f"{name}.json: got schema {found!r}, expected {SCHEMA}")
    columns = [Column(**column) for column in data.pop("columns")]
    return Result(columns=columns, **data)


def merge(old: Result, new: Result, keys: Sequence[str]) -> Result:
    """``new`` with the rows of ``old`` that it does not measure again, told apart by ``keys``.

    Raises ValueError unless both come from the same device, versions, commit and settings: one
    table has one footer.
    """
    for part in ("environment", "settings"):
        was, now = getattr(old, part), getattr(new, part)
        for key in was.keys() | now.keys():
            if key != "date" and was.get(key) != now.get(key):
                raise ValueError(
                    f"{new.name}: cannot append, {key} was {was.get(key)!r}, is {now.get(key)!r}"
                )
    again = {tuple(row[key] for key in keys) for row in new.rows}
    kept = [row for row in old.rows if tuple(row[key] for key in keys) not in again]
    commands = list(dict.fromkeys([*old.commands, *new.commands]))
    return Result(
        new.name, new.title, commands, new.environment, new.settings, new.columns, kept + new.rows
    )


def format_cell(value: object, spec: str = "") -> str:
    """One cell: nothing measured is "-", a number follows ``spec``, "|" is escaped."""
    if value is None:
        return "-"
    if spec and isinstance(value, (int, float)) and not isinstance(value, bool):
        return format(value, spec)
    return str(value).replace("|", "\\|")


def markdown_table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """A Markdown table, padded to align in plain text: numbers to the right, words to the left."""
    body = [[format_cell(row.get(c.key), c.format) for c in columns] for row in rows]
    grid = [[c.title for c in columns], *body]
    widths = [max(3, *(len(line[i]) for line in grid)) for i in range(len(columns))]
    rules = ["-" * (width - 1) for width in widths]
    rule = [dash + (":" if c.format else "-") for c, dash in zip(columns, rules, strict=True)]
    lines = [grid[0], rule, *body]
    return "\n".join(_table_line(line, columns, widths) for line in lines)


def footer(result: Result) -> str:
    """One line: device, versions, commit, date and the command that made the table."""
    env = result.environment
    commit = str(env["commit"])[:12] + (" with local changes" if env["dirty"] else "")
    info = env["infloss"] or {}
    parts = [
        env["device"],
        f"{env['threads']} threads" if env["threads"] else None,
        f"driver {env['driver']}" if env["driver"] else None,
        f"torch {env['torch']}",
        f"CUDA {env['cuda']}" if env["cuda"] else None,
        f"Python {env['python']}",
        f"infloss {info.get('infloss', UNKNOWN)}",
        f"commit {commit}",
        env["date"],
    ]
    made = ", then ".join(f"`{command}`" for command in result.commands)
    return f"{', '.join(part for part in parts if part)}: {made}"


def _table_line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if column.format else cell.ljust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    return "| " + " | ".join(padded) + " |"


def _output(command: Sequence[str]) -> str | None:
    """A command's standard output, stripped; None when it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
