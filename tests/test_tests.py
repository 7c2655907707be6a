"""Rules for tests: no assert reads a clock, and runs are forked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"}


def reads_clock(node: ast.AST, timed: set[str]) -> bool:
    """Return whether an expression calls `time.<clock>()` or uses a variable with such a value."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in CLOCKS:
            if isinstance(part.func.value, ast.Name) and part.func.value.id == "time":
                return True
        elif isinstance(part, ast.Name) and part.id in timed:
            return True
    return False


def clock_asserts(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each assert that depends on a clock read in the same function."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        timed: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and reads_clock(node.value, timed):
                timed |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and reads_clock(node.test, timed):
                yield node.lineno


def test_the_check_finds_clocks_and_derived_values():
    code = "def f():\n a = time.monotonic()\n b = time.time() - a\n assert b < 5\n assert g() == 1\n"
    assert list(clock_asserts(ast.parse(code))) == [4]


def test_no_assert_reads_a_clock():
    texts = {path: path.read_text("utf-8") for path in sorted(TESTS.rglob("*.py"))}
    assert [(path, line) for path, text in texts.items() if "time." in text
            for line in clock_asserts(ast.parse(text))] == []  # fmt: skip


def test_file_names_are_unique():
    """pytest imports each test file by its name, and a second file of that name stops the collection."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len({*names})
