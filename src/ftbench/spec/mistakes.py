"""What pydantic finds wrong, as sentences for people: the value, what it must be, and the nearest key there is."""

import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ftbench.spec.base import nearest, shown
from ftbench.spec.reading import location

_READ: dict[tuple[Any, ...], tuple[str, ...]] = {("launch",): ("fsdp",)}  # keys that become others as they are read
_TYPES = {"int": "a whole number, without a unit", "float": "a number, without a unit", "string": "a text"}


def sentence(problem: Any, root: type[BaseModel], beside: Sequence[str] = ()) -> str:
    """Return what is wrong at the place of a pydantic problem, without naming its key. `root` is the model that was
    validated, `beside` are keys that may stand beside its own."""
    kind, value, where = problem["type"], problem["input"], problem["loc"]
    if kind == "extra_forbidden":
        allowed = [*(beside if len(where) == 1 else ()), *keys_at(root, where[:-1]), *_READ.get(where[:-1], ())]
        meant = _in_a_section(str(where[0]), root) if len(where) == 1 else ""
        return f"no such key{meant or nearest(str(where[-1]), allowed)} (allowed: {', '.join(allowed)})"
    if kind == "missing":
        return "is missing"
    if kind in ("model_type", "model_attributes_type"):
        what = "is empty" if value is None else f"{shown(value)} is no section"
        return f"{what}: give it keys (allowed: {', '.join(keys_at(root, where))})"
    if kind in ("literal_error", "union_tag_invalid"):
        expected = str(problem["ctx"].get("expected", problem["ctx"].get("expected_tags")))
        allowed = [word.strip(" '\"") for word in expected.replace(" or ", ", ").split(",")]
        value = value.get("name", value) if isinstance(value, dict) else value
        return f"{shown(value)} is not allowed{nearest(str(value), allowed)} (allowed: {', '.join(allowed)})"
    if kind == "value_error":
        text = str(problem["ctx"]["error"])
        return text if isinstance(value, dict) or text.startswith(shown(value)) else f"{shown(value)} {text}"
    for type_, must in _TYPES.items():
        if kind in (f"{type_}_parsing", f"{type_}_type", f"{type_}_from_float"):
            return f"{shown(value)} must be {must}"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{shown(value)}: {message.replace('input should be', 'must be')}"


def in_file(error: ValidationError, path: Path, root: type[BaseModel], *above: str) -> Iterator[str]:
    """Yield `file:line: key: what` for each mistake in a file, or in its section at the keys `above`."""
    for problem in error.errors(include_url=False):
        key = [*above, *map(str, problem["loc"])]
        yield f"{location(path, key)}: {'.'.join(key)}: {sentence(problem, root)}"


def _in_a_section(key: str, root: type[BaseModel]) -> str:
    """Return `; did you mean train.batch_size?` for a key that a section has, written without it."""
    sections = ((name, model) for name, field in root.model_fields.items() for model in _models(field.annotation))
    return next((f"; did you mean {name}.{key}?" for name, model in sections if key in model.model_fields), "")


def keys_at(root: type[BaseModel], where: Sequence[int | str]) -> list[str]:
    """Return the keys of the section at pydantic's location, which names a member of a union by its tag."""
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
