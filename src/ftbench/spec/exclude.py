"""A line of `sweep.exclude` against the values of a cell, as loosely as YAML and people write values."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.spec.load import SHORT_FORMS


def agrees(values: Mapping[str, Any], pattern: Mapping[str, Any]) -> bool:
    """Return whether a cell has all that a line names: dotted keys, each with a value or a list of them."""
    return all(_is(at(values, key.split(".")), wanted) for key, wanted in pattern.items())


def at(values: Any, parts: Sequence[str]) -> Any:
    """Return what stands in nested sections at these keys; None where there is nothing."""
    for part in parts:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, tuple)):
        return any(_is(value, each) for each in wanted) or value == wanted
    if isinstance(value, dict) and isinstance(wanted, dict):
        return all(_is(value.get(key), each) for key, each in wanted.items())
    if isinstance(value, dict):  # a section by its short form
        return any(value.get(key) == wanted for key in set(SHORT_FORMS.values()))
    if wanted is False and value == "off":  # YAML reads a bare off as false
        return True
    if isinstance(value, (int, float)) and isinstance(wanted, str):  # and 1e-4 as a text
        with suppress(ValueError):
            return value == float(wanted)
    if isinstance(value, str) and isinstance(wanted, (int, float)):
        with suppress(ValueError):
            return wanted == float(value)
    return bool(value == wanted)


def defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a spec of the same method says where it says nothing."""
    method = values.get("method")
    name = method.get("name", "lora") if isinstance(method, dict) else "lora"
    return Experiment.model_validate({"name": "x", "model": {"id": "x"}, "method": {"name": name}}).model_dump(
        mode="json"
    )
