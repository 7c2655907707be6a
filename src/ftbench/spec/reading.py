"""A YAML file → plain data, for text that nobody vouches for: no tags, no alias bombs, no giants, no duplicate keys;
and a model's config.json."""

import json
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from ftbench.errors import SpecError, file_problem, json_problem
from ftbench.spec.base import MAX_NUMBER, nearest

MAX_BYTES = 1 << 16  # a second of parsing at most
MAX_CONFIG_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 40

# YAML 1.1 reads 1:30 as 90 and 017 as 15, which nobody means.
_SURPRISING = re.compile(r"[-+]?([0-9][0-9_]*:[0-9:._]+|0[0-7_]*[1-7][0-7_]*)")


class _Mistake(yaml.constructor.ConstructorError):
    """A value that cannot be meant, on its line."""

    def __init__(self, sentence: str, node: yaml.Node) -> None:
        super().__init__(None, None, sentence, node.start_mark)


class _AmbiguousError(_Mistake):
    """A value that is not what it looks like: no plain text either."""


class _Constructor(yaml.constructor.SafeConstructor):
    """Safe construction of plain values, in which a value that does not fit its tag (`!!float ""`), a tag of others
    and a value that is not what it looks like are errors of the YAML, on their line."""

    def __init__(self, dates: bool) -> None:
        super().__init__()
        self._dates = dates

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind, text = node.tag.rpartition(":")[2], str(node.value)
        if kind in ("set", "binary", "omap", "pairs"):
            raise _Mistake(f"!!{kind} is a tag; specs hold plain values only", node)
        large = _AmbiguousError(f"{text[:40]} is larger than any number of a spec ({MAX_NUMBER:,})", node)
        if kind == "int" and len(text) > 100:  # Python reads no more than 4,300 digits
            raise large
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):
            raise _Mistake(f"{text[:40]!r} cannot be read as {kind}", node) from None
        if isinstance(value, date) and not self._dates:
            raise _AmbiguousError(f"{value} is a date in YAML: quote it", node)
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise large
        if isinstance(value, (int, float)) and _SURPRISING.fullmatch(text):
            raise _AmbiguousError(f"{text} is the number {value:g} in YAML 1.1: write that, or quote the text", node)
        if isinstance(value, str) and "\0" in value:
            raise _Mistake(f"{value[:40]!r} holds a NUL character, which no text of a spec does", node)
        return value


def read_yaml(
    path: Path, what: str = "a spec", needs: str = "at least `model:` (see configs/ for examples)", dates: bool = False
) -> dict[str, Any]:
    """Return the mapping in `path`, which is to be `what`. Raises SpecError with file and line for anything else."""
    text = _text(path, what)
    try:
        data = _value(text, path, dates)
    except yaml.YAMLError as error:
        raise SpecError(f"{path}{_where(error, text)}: {_reason(error)}") from None
    except RecursionError:
        raise SpecError(f"{path}: nested too deeply (more than {MAX_DEPTH} levels)") from None
    if data is _NOTHING:
        raise SpecError(f"{path}: the file is empty; {what} needs {needs}")
    if not isinstance(data, dict):
        example = " (`model: …`)" if what == "a spec" else ""
        kind = {list: "a list", str: "a text", type(None): "nothing"}.get(type(data), f"a {type(data).__name__}")
        raise SpecError(f"{path}: {what} is a mapping of keys{example}, not {kind}")
    return data


def parse_value(text: str) -> Any:
    """Return the value of `--set key=VALUE`, read as YAML; text that is no YAML is text. Raises SpecError for what YAML
    reads as another value than it looks like."""
    try:
        value = _value(text, Path("--set"))
    except _AmbiguousError as error:
        raise SpecError(str(error.problem)) from None
    except (yaml.YAMLError, RecursionError):
        return text
    return None if value is _NOTHING else value


_NOTHING = object()


def _value(text: str, path: Path, dates: bool = False) -> Any:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None:
        return _NOTHING
    _check(path, node)
    return _Constructor(dates).construct_document(node)


def line_of(path: Path, key: Sequence[str | int]) -> int | None:
    """Return the line on which a key stands, from 1; None if the file does not have it."""
    try:
        node = _tree(_text(path))
    except (yaml.YAMLError, SpecError, RecursionError):
        return None
    line = None
    for part in key:
        if not isinstance(node, yaml.MappingNode):
            return line
        pair = next((pair for pair in node.value if getattr(pair[0], "value", None) == str(part)), None)
        if pair is None:
            return line
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


def location(path: Path, key: Sequence[str | int]) -> str:
    """Return `file:line` of a key; the file alone if it does not have it."""
    line = line_of(path, key)
    return f"{path}:{line}" if line else str(path)


@lru_cache(maxsize=16)  # asked once for each mistake in the text
def _tree(text: str) -> yaml.Node | None:
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _text(path: Path, what: str = "a spec", most: int = MAX_BYTES) -> str:
    kind = what.partition(" ")[2]
    try:
        mode, size = (status := path.stat()).st_mode, status.st_size
        if stat.S_ISDIR(mode):
            raise SpecError(f"{path}: is a directory, not {what.removesuffix(' file')} file")
        if not stat.S_ISREG(mode):  # reading one may wait for ever, or never end
            raise SpecError(f"{path}: is a pipe or a device; {what} is a file")
        if size > most:
            raise SpecError(f"{path}: {size:,} bytes is no {kind}; at most {most:,} are read")
        with path.open("rb") as file:  # a file under /proc has size 0 and may be long
            raw = file.read(most + 1)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file{_neighbours(path)}") from None
    except OSError as error:
        raise SpecError(f"{path}: {file_problem(error)}") from None
    except ValueError:  # a NUL, or half of a character
        raise SpecError(f"{str(path)!r} cannot be the name of a file") from None
    if len(raw) > most:
        raise SpecError(f"{path}: more than {most:,} bytes is no {kind}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SpecError(f"{path}:{line}: byte {error.start} is not UTF-8; {what} is UTF-8 text") from None


def _neighbours(path: Path) -> str:
    try:
        return nearest(path.name, [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")])
    except OSError:
        return f"; the folder {path.parent} does not exist"


def _check(path: Path, root: yaml.Node) -> None:
    """Refuse what is nested too deeply or too large, counting every alias as if it were written out."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise SpecError(f"{path}: nested too deeply (more than {MAX_DEPTH} levels), or an alias that holds itself")
        if id(node) not in sizes:
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in _children(node))
        return sizes[id(node)]

    if size(root, 0) > MAX_NODES:
        raise SpecError(f"{path}: more than {MAX_NODES:,} values once its aliases are written out; a spec is smaller")


def _children(node: yaml.Node) -> list[yaml.Node]:
    """Return the nodes in a node, keys as the text that is written (`on`, `1`). Refuse a key written twice."""
    if not isinstance(node, yaml.MappingNode):
        return node.value if isinstance(node, yaml.SequenceNode) else []
    keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    seen: set[str] = set()
    for key in keys:
        if key.value in seen:
            raise _Mistake(f"the key {key.value!r} stands twice", key)
        seen.add(key.value)
        key.tag = "tag:yaml.org,2002:str"
    return [part for pair in node.value for part in pair]


def _where(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f":{text.count(chr(10), 0, error.position) + 1}"
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark else ""


def _reason(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    if "could not determine a constructor for the tag" in problem:
        return f"{problem.split('tag ')[-1]} is a tag; specs hold plain values only"
    if problem.startswith("but "):
        problem = f"{getattr(error, 'context', '')}, {problem}"
    return f"not valid YAML: {problem}"


def read_config(path: Path) -> dict[str, Any]:
    """Return a config.json, or the one of a model's directory. Raises SpecError for what is none."""
    path = path / "config.json" if os.path.isdir(path) else path
    text = _text(path, "a config.json", MAX_CONFIG_BYTES)
    try:
        config = json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: cannot be read as JSON ({json_problem(error)})") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise SpecError(f"{path}: has no model_type, so it is no model's config.json")
    return config


def _whole(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) > MAX_NUMBER:
        raise ValueError(f"{text[:40]} is larger than any number of a model")
    return number


def as_text(value: Any) -> str:
    """Return a value as it is written behind `--set key=`."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list, tuple)) else _as_word(value)


@lru_cache(maxsize=4096, typed=True)  # an axis has few values, and a sweep many cells
def _as_word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    with suppress(SpecError):
        if isinstance(value, str) and parse_value(value) == value:
            return value
    return json.dumps(value, ensure_ascii=False)
