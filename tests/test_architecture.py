"""Check the structure of the source: size of functions and modules, imports, and names."""

from __future__ import annotations

import ast
import re
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

pytestmark = pytest.mark.xdist_group("test_architecture")  # so that one process parses the source
SOURCE = Path(__file__).resolve().parents[1] / "src" / "ftbench"
FILES = sorted(SOURCE.rglob("*.py"))
MODULE_LINES, FUNCTION_LINES, MEDIAN_FUNCTION_LINES = 300, 50, 8
PRONOUNS = {"found", "told", "place", "one", "mine", "asked", "here"}
# Module → the package that installs it, if the names differ.
INSTALLED_BY = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "PIL": "pillow", "compression": "backports.zstd",
              "backports": "backports.zstd", "pydantic_core": "pydantic", "typing_extensions": "pydantic",
              "tokenizers": "transformers",
              "safetensors": "transformers", "huggingface_hub": "transformers", "pyarrow": "datasets",
              "markupsafe": "jinja2", "liger_kernel": "liger-kernel", "triton": "torch",
              "unsloth_zoo": "unsloth"}  # fmt: skip


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Return each node of the source with its module."""
    return [(path, node) for path in FILES for node in ast.walk(tree_of(path))]


def definitions(*kinds: type) -> Iterator[tuple[str, ast.AST]]:
    """Yield `module.py:name` and node of each definition."""
    for path, node in nodes():
        if isinstance(node, kinds):
            yield f"{path.relative_to(SOURCE)}:{node.name}", node


def lines(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def test_class_names_are_unique():
    places = defaultdict(set)
    for where, node in definitions(ast.ClassDef):
        places[node.name].add(where)
    assert {name for name, files in places.items() if len(files) > 1} == set()


def test_modules_have_at_most_300_lines():
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name for name, length in lengths.items() if length > MODULE_LINES} == set()


def test_functions_have_at_most_50_lines():
    lengths = {where: lines(node) for where, node in definitions(ast.FunctionDef, ast.AsyncFunctionDef)}
    assert {where for where, length in lengths.items() if length > FUNCTION_LINES} == set()
    assert statistics.median(lengths.values()) <= MEDIAN_FUNCTION_LINES


def test_imports_have_no_cycle():
    graph = grimp.build_graph("ftbench", cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(list(TopologicalSorter(imports).static_order())) == len(imports)


def test_top_level_imports_are_declared_dependencies():
    """Imports inside functions may be optional; imports at the top of a module may not."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [package for name, extra in project["optional-dependencies"].items() if name != "dev" for package in extra]
    declared = {re.match(r"[\w.-]+", package)[0] for package in [*project["dependencies"], *extras]}
    names: list[tuple[Path, str]] = []
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.Import):
                names += [(path, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names.append((path, node.module))
    tops = {(str(path.relative_to(SOURCE)), name.split(".")[0]) for path, name in names}
    foreign = {(path, top) for path, top in tops if top != "ftbench" and top not in sys.stdlib_module_names}
    assert not {(path, top) for path, top in foreign if INSTALLED_BY.get(top, top) not in declared}


def defined_names() -> Iterator[str]:
    """Yield `module.py:name` of each function, class, parameter and variable."""
    for path, node in nodes():
        name = getattr(node, "name", None) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
        name = node.arg if isinstance(node, ast.arg) else name
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else name
        if name:
            yield f"{path.relative_to(SOURCE)}:{name.strip('_')}"


def test_names_are_not_pronouns():
    pronouns = {where for where in defined_names() if re.search(rf":({'|'.join(PRONOUNS)}|what_.*)$", where)}
    assert pronouns == set()


def test_modules_have_a_docstring():
    assert [path for path in FILES if path.stat().st_size and not ast.get_docstring(tree_of(path))] == []


def top_names(path: Path) -> set[str]:
    """Return the names that can be imported from a module or a package."""
    below = {each.stem for each in path.parent.iterdir()} if path.name == "__init__.py" else set()
    nodes = [node for statement in tree_of(path).body for node in ast.walk(statement)]
    named = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {alias.asname or alias.name for node in nodes if isinstance(node, (ast.ImportFrom, ast.Import))
                for alias in node.names}  # fmt: skip
    return below | named | imported | {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_imports_of_gpu_tests_exist():
    """They are inside of functions, and no test without a GPU runs them."""
    files = [*Path(__file__).parent.glob("gpu/*.py"), Path(__file__).with_name("compile_kernels.py")]
    for node in (node for path in files for node in ast.walk(tree_of(path))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "ftbench":
            folder = SOURCE.joinpath(*node.module.split(".")[1:])
            module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            assert {alias.name for alias in node.names} <= top_names(module), module
