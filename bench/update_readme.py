"""Regenerate the tables of the documentation from bench/results.

A block of README.md or docs/*.md that reads ::

    <!-- bench:NAME:begin -->
    <!-- bench:NAME:end -->

is filled with the table of bench/results/NAME.json and one line that says where it was measured.
The first marker may choose: ``<!-- bench:NAME:begin columns=peer,peak_mib where=dim:768 -->``
shows those columns of the rows whose ``dim`` is 768 (several conditions are joined by commas).

``python bench/update_readme.py`` rewrites the files; ``--check`` writes nothing and exits 1 when
one is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from record import RESULTS, ROOT, Column, Result, footer, markdown_table, read_result

_BLOCK = re.compile(
    r"(?P<begin><!-- bench:(?P<name>[\w-]+):begin(?P<options>[^>]*?) -->)"
    r".*?"
    r"(?P<end><!-- bench:(?P=name):end -->)",
    re.DOTALL,
)
_BEGIN = re.compile(r"<!-- bench:[\w-]+:begin[^>]*-->")


def parse_options(text: str) -> dict[str, str]:
    """The ``key=value`` words of a begin marker. Raises ValueError for any other word."""
    options = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or key not in ("columns", "where"):
            raise ValueError(f"marker option: got {word!r}, expected columns=... or where=...")
        options[key] = value
    return options


def select(result: Result, options: dict[str, str]) -> tuple[list[Column], list[dict[str, object]]]:
    """Columns and rows that ``options`` choose. Raises ValueError for a name that is not there."""
    known = {column.key: column for column in result.columns}
    keys = options["columns"].split(",") if "columns" in options else list(known)
    conditions = options["where"].split(",") if "where" in options else []
    wanted = [condition.partition(":")[::2] for condition in conditions]
    for key in [*keys, *(key for key, _ in wanted)]:
        if key not in known:
            raise ValueError(f"{result.name}: got column {key!r}, expected one of {sorted(known)}")
    rows = [row for row in result.rows if all(str(row.get(k)) == v for k, v in wanted)]
    if not rows:
        raise ValueError(f"{result.name}: no row satisfies where={options.get('where')}")
    return [known[key] for key in keys], rows


def render(result: Result, options: dict[str, str]) -> str:
    """The text between two markers: the table, an empty line, the footer."""
    columns, rows = select(result, options)
    return f"{markdown_table(columns, rows)}\n\n{footer(result)}"


def replace_blocks(text: str, load: Callable[[str], Result]) -> str:
    """``text`` with every block between markers regenerated from ``load(NAME)``.

    Raises ValueError when a begin marker has no end marker.
    """

    def fill(match: re.Match[str]) -> str:
        table = render(load(match["name"]), parse_options(match["options"]))
        return f"{match['begin']}\n{table}\n{match['end']}"

    if len(_BEGIN.findall(text)) != len(_BLOCK.findall(text)):
        raise ValueError("a bench:NAME:begin marker has no bench:NAME:end marker")
    return _BLOCK.sub(fill, text)


def documents(root: Path) -> list[Path]:
    """The files that may hold tables."""
    return [path for path in [root / "README.md", *sorted(root.glob("docs/*.md"))] if path.exists()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Regenerate the documentation's tables.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    parser.add_argument("--results-dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)

    stale = []
    for path in documents(options.root):
        old = path.read_text()
        try:
            new = replace_blocks(old, lambda name: read_result(name, options.results_dir))
        except (ValueError, FileNotFoundError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        if new == old:
            continue
        stale.append(path)
        if not options.check:
            path.write_text(new)
    for path in stale:
        print(f"{path}: {'out of date' if options.check else 'updated'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
