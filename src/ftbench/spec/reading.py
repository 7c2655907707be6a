"""Read YAML and JSON files of users. Error messages give the file, line, value and allowed values."""

import json
import os
import re
import typing
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ftbench.errors import SpecError, file_problem
from ftbench.facts import architectures
from ftbench.spec.base import nearest, shown

MAX_BYTES = 1 << 16
MAX_CONFIG_BYTES = 1 << 20
_TAG = "tag:yaml.org,2002:"
_NUMBERS = {
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)$"),
    "float": re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$", re.I),
}


class _Loader(yaml.SafeLoader):
    """YAML loader for plain values and text keys. Duplicate keys are errors.

    Numbers follow YAML 1.2: `2e-4` is a number; `1:30`, `017` and dates are text.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) not in (*_NUMBERS, "timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in seen:
                raise _error(f"duplicate key {key.value!r}", key)
            seen.add(key.value)
            key.tag = f"{_TAG}str"  # keys such as `on` or `1` stay text
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag.removeprefix(_TAG) not in ("null", "bool", "int", "float", "str", "seq", "map", "merge"):
            raise _error(f"the tag {node.tag!r} is not supported: only plain values are", node)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):
            raise _error(f"{shown(node.value)} cannot be read as {node.tag.removeprefix(_TAG)}", node) from None


for _kind, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, list("-+.0123456789"))


def _error(text: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, text, at.start_mark)


def read_yaml(path: Path, what: str = "a spec", needs: str = "at least `model:` (see configs/)") -> dict[str, Any]:
    """Return the mapping in a YAML file. Raise SpecError with file and line if it cannot be read or is not a mapping.
    For error messages, `what` is the kind of file, and `needs` is its required content."""
    missing = f"; {what} needs {needs}"
    if what == "a spec" and path.suffix not in (".yaml", ".yml", ".json"):
        models = [model for model in architectures() if model.rpartition("/")[2].casefold() == path.name.casefold()]
        hint = f"; did you mean {models[0]}?" if models else " (owner/name, or a folder with its config.json)"
        missing = f", and not a model{hint}"
        if path.suffix in (".jsonl", ".csv", ".parquet") and path.is_file():
            raise SpecError(f"{path}: a data file, not a spec: write MODEL --dataset FILE, or set dataset.path")
    text = _text(path, MAX_BYTES, missing)
    try:
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise SpecError(f"{path}{_line(error, text)}: {_reason(error)}") from None
    except RecursionError:
        raise SpecError(f"{path}: nested too deeply") from None
    if data is None:
        raise SpecError(f"{path}: the file is empty; {what} needs {needs}")
    if not isinstance(data, dict):
        raise SpecError(f"{path}: {what} must be a mapping of keys (`key: value`), not {shown(data)}")
    return data


def parse_value(text: str) -> Any:
    """Return the value of `--set key=VALUE`, parsed as YAML. Text that is not valid YAML is returned unchanged."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def _line(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f":{text.count(chr(10), 0, error.position) + 1}"
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark else ""


def _reason(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    hint = ": indent with spaces instead of tabs" if "'\\t'" in problem else ""
    return f"not valid YAML: {getattr(error, 'context', None) or ''} {problem}{hint}".replace("  ", " ")


def location(path: Path, key: Sequence[str | int]) -> str:
    """Return `file:line` of a key. If the file does not have the key, return only the file."""
    line = line_of(path, key)
    return f"{path}:{line}" if line else str(path)


def line_of(path: Path, key: Sequence[str | int]) -> int | None:
    """Return the line number of a key or, if it is missing, of its section. If both are missing, return None."""
    try:
        node = _tree(_text(path, MAX_BYTES))
    except (yaml.YAMLError, SpecError, RecursionError):
        return None
    line = None
    for part in key:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        pair = next((pair for pair in pairs if getattr(pair[0], "value", None) == str(part)), None)
        if pair is None:
            break
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


@lru_cache(maxsize=16)  # called once for each mistake in a file
def _tree(text: str) -> yaml.Node | None:
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _text(path: Path, most: int, missing: str = "") -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(most + 1)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file{missing}") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: a folder, not a file{missing}") from None
    except OSError as error:
        raise SpecError(f"{path}: {file_problem(error)}") from None
    if len(raw) > most:
        raise SpecError(f"{path}: too large: at most {most:,} bytes are allowed")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SpecError(f"{path}:{line}: byte {error.start} is not UTF-8: save the file as UTF-8 text") from None


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a model's config.json. `path` is the file or its directory. Raise SpecError if the file is
    not valid."""
    path = path / "config.json" if os.path.isdir(path) else path
    text = _text(path, MAX_CONFIG_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise SpecError(f"{path}: has no model_type, so it is not the config.json of a model")
    return config


def as_text(value: Any) -> str:
    """Return a value as text that `--set key=VALUE` accepts, such as `on` for True."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str) and parse_value(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


# --- mistakes that pydantic reports ----------------------------------------------------------------------------------

_TYPES = {"int": "be a whole number, without a unit", "float": "be a number, without a unit", "string": "be a text",
          "tuple": "be a list"}  # fmt: skip
_WORDS = {"True": "on", "False": "off"}
_USUAL_NAMES = {"lr": "train.learning_rate", "batch": "train.batch_size", "lora_alpha": "method.alpha",
                "lora_rank": "method.rank", "r": "method.rank", "steps": "train.max_steps"}  # fmt: skip


def in_file(error: ValidationError, path: Path, root: type[BaseModel], *above: str) -> Iterator[str]:
    """Yield `file:line: key: problem` for each of pydantic's errors. `above` are the keys of the validated section."""
    for problem in error.errors(include_url=False):
        key = [*above, *map(str, problem["loc"])]
        yield f"{location(path, key)}: {'.'.join(key)}: {sentence([problem], root)}"


def sentence(problems: Sequence[Any], root: type[BaseModel], extra_keys: Sequence[str] = ()) -> str:
    """Return a message for pydantic's errors about one key. The message does not repeat the key.

    `problems` are items of `ValidationError.errors()`: one for each type that the key allows. `root` is the model that
    was validated. `extra_keys` are allowed at the top level in addition to the keys of `root`."""
    problem = problems[0]
    kind, value, where = problem["type"], problem["input"], problem["loc"]
    scalar = kind.startswith(("int_", "float_", "string_", "literal_")) or where in (("method",), ("model",))
    if scalar and extra_keys and isinstance(value, list) and value and not (isinstance(value[0], dict) or problems[1:]):
        return f"{shown(value)} is a list: a run has one value; to train several, use `sweep: {{axes: {{KEY: [...]}}}}`"
    if len(problems) > 1:
        parts = [part.removeprefix("must ").removeprefix("be ") for each in problems for part in _expected(each)]
        *others, last = dict.fromkeys(parts)
        return f"{shown(value)} must be {', '.join(others)}{' or ' * bool(others)}{last}"
    if kind == "extra_forbidden":
        key, allowed = str(where[-1]), [*(extra_keys if len(where) == 1 else ()), *keys_at(root, where[:-1])]
        sections = {name: _models(field.annotation) for name, field in root.model_fields.items() if name != where[0]}
        owner = next((name for name, models in sections.items() if any(key in m.model_fields for m in models)), None)
        usual = f"{owner}.{key}" if owner else _USUAL_NAMES.get(key)
        meant = f"; did you mean {usual}?" if usual else nearest(key, allowed)
        return f"no such key{meant} (allowed: {', '.join(allowed)})"
    if kind == "missing":
        return "is missing"
    if kind in ("model_type", "model_attributes_type"):
        what = "is empty" if value is None else f"{shown(value)} is not a section"
        named = "a name or " * (where in (("method",), ("model",), ("dataset",)))
        return f"{what}: give it {named}keys (allowed: {', '.join(keys_at(root, where))})"
    allowed = _expected(problem)
    if kind in ("literal_error", "union_tag_invalid"):
        value = value.get("name", value) if isinstance(value, dict) else value
        return f"{shown(value)} is not allowed{nearest(str(value), allowed)} (allowed: {', '.join(allowed)})"
    if kind == "value_error":
        text = str(problem["ctx"]["error"])
        return text if isinstance(value, dict) or text.startswith(shown(value)) else f"{shown(value)} {text}"
    return f"{shown(value)} must {allowed[0]}"


def _expected(problem: Any) -> list[str]:
    """Return the allowed words from a pydantic error, or one phrase that can follow "must", such as "be a list"."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in ("literal_error", "union_tag_invalid"):
        expected = str(context.get("expected", context.get("expected_tags"))).replace(" or ", ", ")
        return [_WORDS.get(word, word) for word in (each.strip(" '\"") for each in expected.split(","))]
    if kind == "value_error":
        return [str(context["error"])]
    type_, _, problem_kind = kind.partition("_")
    if kind in ("list_type", "tuple_type"):
        return ["be a list of values: [a, b]"]
    if type_ in _TYPES and problem_kind in ("parsing", "type", "from_float"):
        return [_TYPES[type_]]
    return [problem["msg"].rpartition(" should ")[2]]


def keys_at(root: type[BaseModel], where: Sequence[int | str]) -> list[str]:
    """Return the allowed keys of the section at pydantic's error location, such as ('method', 'qlora')."""
    models = [root]
    for part in where:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        tagged = [model for model in models if part == getattr(model.model_fields.get("name"), "default", None)]
        models = [model for field in fields for model in _models(field.annotation)] or tagged or models
    return [key for key in models[0].model_fields if all(key in model.model_fields for model in models)]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]
