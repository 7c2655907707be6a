"""Compute the cells of a sweep from the section `sweep:` and from `--axis`."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ftbench.errors import SpecError
from ftbench.spec.base import Part, nearest, shortened, shown
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import (
    FOLDER,
    SHORT_FORMS,
    ImpossibleError,
    SpecLayer,
    expand,
    merge,
    merged,
    nested,
    read_layers,
    recipe,
    recipe_file,
    validated,
    where_set,
)
from ftbench.spec.reading import as_text, parse_value, sentence

MAX_CELLS = 100_000
RECIPE = "recipe"
_NO_AXES = ("name", "extends", "sweep")
_OPTIONS = {"method": "--method", "train.batch_size": "--batch-size"}  # axes with an own option


class SweepSection(Part):
    """The section `sweep:` of a spec file."""

    axes: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        default_factory=dict, description="key of the spec → values"
    )


@dataclass(frozen=True, slots=True)
class Axis:
    """A key of the spec that varies in a sweep. For each value in `values`, `layers` has the keys that this value
    changes in the base spec."""

    key: str
    values: tuple[Any, ...]
    layers: tuple[SpecLayer, ...]


@dataclass(frozen=True, slots=True)
class GridCell:
    """A cell of a sweep. If its values do not work together, `spec` is None and `refused` is the reason."""

    values: dict[str, Any]
    spec: Experiment | None
    refused: str | None = None

    @property
    def sets(self) -> tuple[str, ...]:
        """The `--set` arguments that turn the base spec into this cell, such as `train.batch_size=8`."""
        return tuple(f"{key}={as_text(value)}" for key, value in self.values.items())


def cells(path: Path, sets: Sequence[str], axes: Sequence[str] = ()) -> list[GridCell]:
    """Return the cells of a sweep in the order of its axes, `recipe` first; the last axis varies fastest.

    Args:
        path: The spec file. Without axes, the sweep has one cell.
        sets: The `--set` arguments.
        axes: The `--axis` arguments (`key=value,value`). They replace axes of the file with the same key.

    Raises:
        SpecError: For a mistake in the file, an axis or a value. If values do not work together, `refused` is set.
    """
    layers = read_layers(path, sets)
    base = merged(layers, path)
    values = _section(base.get("sweep"), layers).axes
    folder = _folder(layers)
    by_key = {key: _axis(key, each, _origin(layers, key), folder) for key, each in values.items()}
    by_key |= {axis.key: axis for axis in map(_of_command_line, axes)}
    by_key = dict(sorted(by_key.items(), key=lambda pair: pair[0] != RECIPE))  # other axes override the recipe
    _check_overlap(by_key.values())
    if (size := math.prod(len(axis.values) for axis in by_key.values())) > MAX_CELLS:
        raise SpecError(f"the sweep has {size:,} cells; at most {MAX_CELLS:,} are planned at once: split it")
    kept, problems = [], dict[str, None]()
    for indices in itertools.product(*(range(len(axis.values)) for axis in by_key.values())):
        chosen = list(zip(by_key.values(), indices, strict=True))
        try:
            kept.append(_cell(base, layers, chosen))
        except SpecError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise SpecError(*problems)
    return kept


def _section(values: object, layers: Sequence[SpecLayer]) -> SweepSection:
    try:
        return SweepSection.model_validate({} if values is None else values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        keys = [str(part) for part in problem["loc"] if isinstance(part, str)]
        what = sentence([problem], SweepSection)
        if problem["type"] in ("model_type", "dict_type"):
            what = "must be a section of keys: {axes: {train.batch_size: [1, 2, 4]}}"
        raise SpecError(f"{_origin(layers, *keys[:1])}: {'.'.join(['sweep', *keys])}: {what}") from None


def _origin(layers: Sequence[SpecLayer], *keys: str) -> str:
    """Return `file:line` of a key in the section `sweep:`."""
    return where_set(("sweep", "axes", *keys) if keys[:1] != ("axes",) else ("sweep", *keys), layers)


def _folder(layers: Sequence[SpecLayer]) -> Path:
    """Return the folder of the spec file that sets the axes. Paths in `sweep:` are relative to this folder."""
    sections = ((layer.data.get("sweep"), layer.file) for layer in reversed(layers))
    return next((file.parent for each, file in sections if file and isinstance(each, dict) and "axes" in each), Path())


def _axis(key: str, values: Sequence[Any], origin: str, folder: Path) -> Axis:
    parts = key.split(".")
    where = origin if origin.startswith("--") else f"{origin}: sweep.axes"
    if key == RECIPE:
        files = [recipe_file(value, folder).absolute() for value in values]
        names = tuple(file.stem if file.parent == FOLDER else str(file) for file in files)
        return Axis(key, names, tuple(SpecLayer(where, recipe(name, folder)) for name in names))
    if not all(parts) or len(parts) > 2 or parts[0] in _NO_AXES or parts[0] not in Experiment.model_fields:
        sections = [name for name in Experiment.model_fields if name not in _NO_AXES]
        raise SpecError(
            f"{origin}: {shown(key)} cannot be an axis{nearest(parts[0], sections)} (an axis is a key of the spec: "
            f"{', '.join(sections)}, or train.batch_size; `ftbench list keys` shows all; or recipe)"
        )
    layers = tuple(SpecLayer(where, expand(nested(parts, value), folder)) for value in values)
    written = tuple(  # with absolute paths; short forms such as `method: lora` stay
        value if key in SHORT_FORMS and isinstance(value, str) else reduce(getitem, parts, layer.data)
        for value, layer in zip(values, layers, strict=True)
    )
    return Axis(key, written, layers)


def _of_command_line(text: str) -> Axis:
    key, equals, written = text.partition("=")
    values = parse_value(f"[{written}]") if equals and written.strip() else None
    if not isinstance(values, list) or not values or None in values:
        raise SpecError(f"--axis {shortened(text)}: write it as key=value,value, for example train.batch_size=1,2,4")
    return _axis(key := key.strip(), values, _OPTIONS.get(key, f"--axis {shortened(key)}"), Path())


def _check_overlap(axes: Iterable[Axis]) -> None:
    """Raise SpecError if two axes set the same key, such as `method` and `method.name`. The axis `recipe` may set the
    same keys as other axes."""
    setters: dict[str, str] = {}
    for axis in (each for each in axes if each.key != RECIPE):
        parts = ((section, keys) for layer in axis.layers for section, keys in layer.data.items())
        for key in {f"{section}.{name}" for section, keys in parts if isinstance(keys, dict) for name in keys}:
            if (other := setters.setdefault(key, axis.key)) != axis.key:
                raise SpecError(
                    f"{axis.layers[0].origin}: {axis.key} and {other} are axes that both set {key}: remove {axis.key}, "
                    f"or remove {other}"
                )


def _cell(base: dict[str, Any], layers: Sequence[SpecLayer], chosen: Sequence[tuple[Axis, int]]) -> GridCell:
    """Return one cell of the grid. `chosen` has (axis, index of the cell's value on this axis) for each axis."""
    point = {axis.key: axis.values[index] for axis, index in chosen}
    added = [axis.layers[index] for axis, index in chosen]
    base = reduce(merge, (layer.data for layer in added), base)
    try:
        spec = validated(base, [*layers, *added])
    except ImpossibleError as error:
        return GridCell(point, None, "; ".join(problem.partition(": ")[2] for problem in error.problems))
    return GridCell(point, spec)
