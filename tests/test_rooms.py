"""The layering of the source tree: what each room may know."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DESK = {"csrc/ops.cpp", "csrc/module.cpp"}
SETTINGS = {"functional.py", "modules.py", "config.py", "build.py"}
TORCH_HEADER = re.compile(r'#\s*include\s*[<"](torch|ATen|c10)/')
ENVIRONMENT = re.compile(r"\b(secure_)?getenv\b")


def sources(folder: str, *suffixes: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


NATIVE = sources("csrc", ".cpp", ".cu", ".h", ".cuh", ".hpp")
PACKAGE = sources("infloss", ".py")


def test_the_tree_was_found() -> None:
    assert {relative(path) for path in NATIVE} >= DESK
    assert {path.name for path in PACKAGE} >= SETTINGS


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_torch_headers_only_at_the_desk(path: Path) -> None:
    """So that the kernels build and run without torch."""
    if relative(path) not in DESK:
        assert not TORCH_HEADER.search(path.read_text())


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_native_code_reads_no_environment(path: Path) -> None:
    assert not ENVIRONMENT.search(path.read_text())


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_python_below_the_door_reads_no_environment(path: Path) -> None:
    if path.name in SETTINGS:
        return
    names = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
    assert not names & {"environ", "getenv", "environb"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def public_definitions(path: Path) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Module-level functions and classes without underscore; overloads are only signatures."""
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            decorators = {getattr(decorator, "id", "") for decorator in node.decorator_list}
            if "overload" not in decorators:
                yield node


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_public_functions_and_classes_are_documented(path: Path) -> None:
    bare = [node.name for node in public_definitions(path) if not ast.get_docstring(node)]
    assert not bare


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_public_functions_are_annotated(path: Path) -> None:
    for node in public_definitions(path):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg != "self"]
            assert not bare, f"{node.name}: {bare}"
            assert node.returns is not None, node.name


def test_one_oracle_and_one_tolerance_rule() -> None:
    """Whatever judges an output of the package judges it by infloss/reference.py."""
    owners = [
        relative(path)
        for folder in ("infloss", "tests", "bench", "examples")
        for path in sources(folder, ".py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name in ("deviation", "floor_of")
    ]
    assert set(owners) == {"infloss/reference.py"}
