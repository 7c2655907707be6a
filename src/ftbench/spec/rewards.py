"""Reward functions of a user's own, `path/to/file.py:function`: how a spec names them, and what can be said of one
before anything runs. The other half is `worker/rewards.py`, which alone executes the file."""

import ast
import os
import re
import warnings
from pathlib import Path
from typing import Any

from ftbench.errors import file_problem
from ftbench.spec.base import nearest

_NAMED = re.compile(r".+\.py:[^\W\d]\w*", re.DOTALL)


def named(value: object) -> object:
    """Return the functions that a spec names, one or several, as a tuple. Raise ValueError for what names none."""
    if value is None:
        return None
    rewards = [value] if isinstance(value, str) else value
    if not (isinstance(rewards, (list, tuple)) and rewards):
        raise ValueError("must be path/to/file.py:function, or a list of such")
    if wrong := [each for each in rewards if not (isinstance(each, str) and _NAMED.fullmatch(each))]:
        raise ValueError(f"{wrong[0]!r:.80} names no function: write path/to/file.py:function")
    return tuple(rewards)


def parts(reward: str) -> tuple[Path, str]:
    """Return file and function of a name."""
    file, _, function = reward.rpartition(":")
    return Path(file), function


def absolute(value: Any, folder: Path) -> Any:
    """Return names with their paths absolute against `folder`; what is no name as it is."""
    if isinstance(value, list):
        return [absolute(each, folder) for each in value]
    if not (isinstance(value, str) and _NAMED.fullmatch(value)):
        return value
    file, function = parts(value)
    return f"{os.path.abspath(folder / os.path.expanduser(file))}:{function}"


def problem(reward: str) -> str | None:
    """Return why a function cannot be there, from the text of its file, which is not executed."""
    file, function = parts(reward)
    if not file.is_file():
        return f"{file}: {'is no file' if file.exists() else 'no such file'}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except OSError as error:
        return f"{file}: {file_problem(error)}"
    except SyntaxError as error:
        where = "" if error.lineno is None else f", line {error.lineno}"
        return f"{file}{where}: no Python: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{file}: no Python: {str(error) or 'nested too deeply'}"
    names = set(_bound(tree))
    if function in names or "*" in names:
        return None
    return f"{file} has no function {function}{nearest(function, sorted(names))}"


def _bound(tree: ast.AST) -> list[str]:
    """Return every name that is bound somewhere in a module; `*` where it takes all of another's."""
    nodes = list(ast.walk(tree))
    defined = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    assigned = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return defined + assigned + [node.asname or node.name for node in nodes if isinstance(node, ast.alias)]
