"""A YAML file → plain data, for text that nobody vouches for: no tags, no alias bombs, no giants, no duplicate keys."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ftbench.errors import SpecError

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 40


class _Loader(yaml.SafeLoader):
    """Safe construction that also refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value != "<<":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in `path`. Raises SpecError with file and line for anything else."""
    text = _text(path)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise SpecError(f"{path}: the file is empty; a spec needs at least `model:` (see configs/ for examples)")
        _check_size(path, node)
        data = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise SpecError(f"{path}{_where(error)}: {_reason(error)}") from None
    except RecursionError:
        raise SpecError(f"{path}: nested too deeply (more than {MAX_DEPTH} levels)") from None
    except ValueError as error:  # a timestamp that is no date, an integer that is too long
        raise SpecError(f"{path}: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise SpecError(f"{path}: a spec is a mapping of keys (`model: …`), not {_kind(data)}")
    return data


def parse_value(text: str) -> Any:
    """The value of `--set key=VALUE`, read as YAML; text that is no YAML is text."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_size(Path("--set"), node)
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def line_of(path: Path, key: Sequence[str | int]) -> int | None:
    """The line on which a key stands, from 1; None if the file does not have it."""
    try:
        node = yaml.compose(_text(path), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, SpecError, RecursionError):
        return None
    line = None
    for part in key:
        if not isinstance(node, yaml.MappingNode):
            return line
        found = [(k, v) for k, v in node.value if getattr(k, "value", None) == str(part)]
        if not found:
            return line
        line = found[0][0].start_mark.line + 1
        node = found[0][1]
    return line


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise SpecError(f"{path}: is a directory, not a spec file")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise SpecError(f"{path}: {size:,} bytes is no spec; at most {MAX_BYTES:,} are read")
        with path.open("rb") as file:  # a device or a pipe has size 0 and no end
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file{_neighbours(path)}") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) > MAX_BYTES:
        raise SpecError(f"{path}: more than {MAX_BYTES:,} bytes is no spec")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SpecError(f"{path}:{line}: byte {error.start} is not UTF-8; a spec is a UTF-8 text file") from None


def _neighbours(path: Path) -> str:
    from ftbench.spec.base import nearest

    try:
        return nearest(path.name, [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")])
    except OSError:
        return f"; the folder {path.parent} does not exist"


def _check_size(path: Path, root: yaml.Node) -> None:
    """Counts nodes as if every alias were written out, without writing any out."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise SpecError(f"{path}: nested too deeply (more than {MAX_DEPTH} levels), or an alias that holds itself")
        if id(node) not in sizes:
            children: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                children = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                children = node.value
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in children)
        return sizes[id(node)]

    if size(root, 0) > MAX_NODES:
        raise SpecError(f"{path}: more than {MAX_NODES:,} values once its aliases are written out; a spec is smaller")


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark else ""


def _reason(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    if "could not determine a constructor for the tag" in problem:
        return f"{problem.split('tag ')[-1]} is a tag; specs hold plain values only"
    return f"not valid YAML: {problem}"


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "nothing"}.get(type(value), f"a {type(value).__name__}")
