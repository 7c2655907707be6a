"""Load a spec file: merge `extends:`, `recipe:`, the file and `--set` in this order, and report all mistakes."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ftbench.core.stats import grouped_by
from ftbench.errors import SpecError
from ftbench.facts import read_facts
from ftbench.spec.base import nearest, shortened, shown
from ftbench.spec.experiment import Experiment, experiment_name
from ftbench.spec.methods import METHODS
from ftbench.spec.model_argument import model_keys, names_model
from ftbench.spec.objectives import OBJECTIVES, absolute_reward
from ftbench.spec.reading import location, parse_value, read_yaml, sentence

SHORT_FORMS = {"model": "id", "method": "name", "objective": "name", "dataset": "name"}
# Sections with a key `name` that selects the class of the section. The first class is the default.
KINDS: dict[str, dict[str, Any]] = {"method": {"lora": METHODS["lora"], **METHODS}, "objective": {**OBJECTIVES}}
PATHS = (("model", "path"), ("dataset", "path"))
# If a later layer names another dataset, these keys are kept, because they describe the training.
_DATASET_KEEPS = ("samples", "max_length", "seed", "eval_samples", "loss_on", "longest_first")
_MISSING = object()
RESOLVED = "spec.json"  # the file with the resolved spec, in the directory of a run
# Folder of the shipped recipes. Each recipe sets the optimizer and every optimization.
FOLDER = Path(__file__).resolve().parents[1] / "recipes"
RECIPE_SECTIONS = ("method", "train", "optimizations")


@dataclass(frozen=True, slots=True)
class SpecLayer:
    """The keys of a spec from one source: a file, a recipe, or one `--set`."""

    origin: str
    data: dict[str, Any]
    file: Path | None = None


class ImpossibleError(SpecError):
    """Raised if each value of a spec is allowed, but some values do not work together."""


def load(path: Path, sets: Sequence[str] = ()) -> Experiment:
    """Return the spec in a file. The section `sweep:` is ignored. Raise SpecError with one message
    (`file:line: key: problem`) per mistake."""
    layers = read_layers(path, sets)
    return validated(merged(layers, path), layers)


def read_layers(path: Path, sets: Sequence[str]) -> list[SpecLayer]:
    """Return the layers of a spec, lowest priority first: the files in `extends:`, the file or model, each `--set`."""
    files = [SpecLayer(str(path), model_keys(path))] if names_model(path) else _chain(path, ())
    return [*files, *(set_layer(text) for text in sets)]


def merged(layers: Iterable[SpecLayer], path: Path) -> dict[str, Any]:
    """Return the keys of all layers, merged; later layers win. The default of `name` is the name of the file."""
    result: dict[str, Any] = {}
    for layer in layers:
        result = merge(result, layer.data)
    if "name" not in result:
        try:
            result = {"name": experiment_name(path.name if names_model(path) else path.stem), **result}
        except ValueError as error:
            other = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem, flags=re.ASCII).strip("-._")[:80] or "my-run"
            raise SpecError(
                f"{path}: the default name is the name of the file, and a name {error}: rename the file, or write "
                f"`name: {other}` into it"
            ) from None
    return result


def validated(values: dict[str, Any], layers: Sequence[SpecLayer]) -> Experiment:
    """Return the spec with these keys. Raise SpecError if a value is not allowed. Raise ImpossibleError if all values
    are allowed, but do not work together."""
    try:
        spec = Experiment.model_validate({key: value for key, value in values.items() if key != "sweep"})
    except ValidationError as error:
        together = all(
            problem["type"] == "value_error" and isinstance(problem["input"], dict)
            for problem in error.errors(include_url=False)
        )
        raise (ImpossibleError if together else SpecError)(*_sentences(error, layers)) from None
    if spec.measure.control != "off":  # a broken training must not be mistaken for a normal run
        origin = where_set(("measure", "control"), layers)
        raise SpecError(
            f"{origin}: measure.control: {spec.measure.control} breaks the training, and `ftbench parity` sets it "
            "itself: leave it off"
        )
    return spec


def _chain(path: Path, seen: tuple[str, ...]) -> list[SpecLayer]:
    absolute = os.path.abspath(path)
    if absolute in seen:
        raise SpecError(f"{path}: extends: the files extend each other in a circle")
    data = _read(path)
    base = data.pop("extends", None)
    if base is not None and (not isinstance(base, str) or not base):
        raise SpecError(f"{location(path, ['extends'])}: extends: must be the path of one file, not {shown(base)}")
    with _at_key(path, "extends"):
        below = _chain(path.parent / base, (*seen, absolute)) if base else []
    if "recipe" in data:
        with _at_key(path, "recipe"):
            keys = recipe(data.pop("recipe"), path.parent, (*seen, absolute))
        below.append(SpecLayer(f"{location(path, ['recipe'])}: recipe", keys))
    return [*below, SpecLayer(str(path), expand(data, path.parent), path)]


def _read(path: Path) -> dict[str, Any]:
    """Return the keys of a spec file. If it is the spec.json of a run, leave out its keys `schema` and `set`."""
    data = dict(read_facts(str(path))) if path.parent == FOLDER else read_yaml(path)
    resolved = path.name == RESOLVED and "schema" in data and "set" in data
    return {key: value for key, value in data.items() if not resolved or key not in ("schema", "set")}


def has_axes(path: Path, sets: Sequence[str]) -> bool:
    """Return whether a spec has a section `sweep:`, in its file or in a file that it extends."""
    return "sweep" in merged(read_layers(path, sets), path)


@contextmanager
def _at_key(path: Path, key: str) -> Iterator[None]:
    """Add the file and line of a key to each SpecError raised in the `with` block."""
    try:
        yield
    except SpecError as error:
        raise SpecError(*(f"{location(path, [key])}: {problem}" for problem in error.problems)) from None


@cache
def recipes() -> dict[str, str]:
    """Return {name: description} of the shipped recipes, `plain` first. A file's first line is its description."""
    lines = {path.stem: path.read_text("utf-8").partition("\n")[0].removeprefix("# ") for path in FOLDER.glob("*.yaml")}
    return dict(sorted(lines.items(), key=lambda pair: (pair[0] != "plain", pair[0])))


def recipe_file(name: object, folder: Path) -> Path:
    """Return the path of a recipe: a shipped recipe with this name, or else a file relative to `folder`."""
    if not isinstance(name, str) or not name:
        raise SpecError(f"recipe: must be the name of a recipe or a file, not {shown(name)} ({', '.join(recipes())})")
    if name in recipes():
        return FOLDER / f"{name}.yaml"
    path = folder / name
    if not os.path.exists(path):
        raise SpecError(
            f"recipe: {shown(name)} is neither a recipe nor a file{nearest(name, recipes())} "
            f"(allowed: {', '.join(recipes())}, or a YAML file with method, train and optimizations)"
        )
    return path


def recipe(name: object, folder: Path, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the keys of a shipped recipe, or of a recipe file in `folder`. Raise SpecError if the file is missing, or
    if it has other sections than method, train and optimizations."""
    path, keys = recipe_file(name, folder), dict[str, Any]()
    for layer in _chain(path, seen):
        keys = merge(keys, layer.data)
    if others := [key for key in keys if key not in RECIPE_SECTIONS]:
        raise SpecError(f"{path}: recipe: has {', '.join(RECIPE_SECTIONS)}, not {', '.join(others)}: use `extends:`")
    return keys


@cache
def shipped_recipes() -> dict[str, dict[str, Any]]:
    """Return {name of the recipe: its keys} for the shipped recipes."""
    return {name: recipe(name, Path()) for name in recipes()}


def set_layer(text: str) -> SpecLayer:
    key, equals, value = text.partition("=")
    parts, origin = key.strip().split("."), f"--set {shortened(text)}"
    if parts[0] == "sweep":
        raise SpecError(f"{origin}: axes of a sweep are set with `ftbench sweep --axis key=value,value`")
    if not equals or not all(parts) or len(parts) > 2:
        raise SpecError(
            f"{origin}: write it as key.sub=value, for example train.batch_size=8 or dataset.columns={{prompt: ask}}"
        )
    if parts == ["extends"]:
        raise SpecError(f"{origin}: `extends` only works in a file: give that file instead, or set recipe=fastest")
    written = parse_value(value)
    if isinstance(written, str) and value.lstrip()[:1] in ("{", "["):
        raise SpecError(f"{origin}: the value is not valid YAML: check its brackets and quotes")
    keys = recipe(written, Path()) if parts == ["recipe"] else expand(nested(parts, written), Path())
    return SpecLayer(origin, keys)


def nested(parts: Sequence[str], value: Any) -> dict[str, Any]:
    """Return `{"train": {"batch_size": 8}}` for `["train", "batch_size"], 8`."""
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


def expand(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Expand short forms: `method: lora` becomes `method: {name: lora}`. Make paths absolute, relative to `folder`."""
    data = {key: {SHORT_FORMS[key]: value} if key in SHORT_FORMS and isinstance(value, str) else value
            for key, value in data.items()}  # fmt: skip
    for part, key in PATHS:
        section = data.get(part)
        if isinstance(section, dict) and isinstance(section.get(key), str):
            data[part] = section | {key: os.path.abspath(folder / os.path.expanduser(section[key]))}
    objective = data.get("objective")
    if isinstance(objective, dict) and "reward" in objective:
        data["objective"] = objective | {"reward": absolute_reward(objective["reward"], folder)}
    return data


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, section by section.

    If `over` names another method, dataset or model, drop the keys of `base` that do not apply to the new one. For
    example, a change from qlora to lora keeps `rank` and drops `double_quant`.
    """
    sections = {key: {**_kept_keys(key, base[key], value), **value} for key, value in over.items()
                if isinstance(value, dict) and isinstance(base.get(key), dict)}  # fmt: skip
    return {**base, **over, **sections}


def _kept_keys(section: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    naming = SHORT_FORMS.get(section)
    if naming is None or naming not in new or new[naming] == old.get(naming):
        return old
    if section in KINDS:
        known = KINDS[section].get(str(new[naming]))
        keep: Iterable[str] = known.model_fields if known else old
    else:
        keep = _DATASET_KEEPS if section == "dataset" else [key for key in old if key not in ("revision", "path")]
    return {key: value for key, value in old.items() if key in keep}


def _sentences(error: ValidationError, layers: Sequence[SpecLayer]) -> list[str]:
    by_key = grouped_by(error.errors(include_url=False), lambda problem: _key(problem["loc"]))
    sentences = []
    for key, problems in by_key.items():
        what = sentence(problems, Experiment, ("extends", "recipe", "sweep"))
        if len(key) == 1 and key != ("model",) and what.endswith(")") and problems[0]["type"].startswith("model_"):
            what += ", or leave it out"
        sentences.append(f"{where_set(key, layers)}: {'.'.join(key) + ': ' if key else ''}{what}")
    return sentences


def _key(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Convert pydantic's error location to a key of the spec: ('method', 'qlora', 'rank') to ('method', 'rank')."""
    parts = [str(part) for part in loc if not isinstance(part, int)]
    if len(parts) > 1 and parts[1] in KINDS.get(parts[0], ()):
        del parts[1]
    return tuple(parts[:2])


def where_set(key: tuple[str, ...], layers: Sequence[SpecLayer]) -> str:
    """Return where a key was last set: `file:line` or `--set KEY=VALUE`. If no layer sets the key, return the file."""
    for layer in reversed(layers):
        section: Any = layer.data
        for part in key:
            section = section.get(part) if isinstance(section, dict) and part in section else _MISSING
        if key and section is not _MISSING:
            return location(layer.file, key) if layer.file else layer.origin
    files = [layer.file for layer in layers if layer.file]
    return location(files[-1], key[:1]) if files else layers[0].origin


def spec_keys() -> list[tuple[str, str, str]]:
    """Return (dotted key, default, description) of every key of a spec. If some methods or
    objectives do not have the key, the description ends with the name of one that has it, such as `(qlora)`."""
    rows: dict[tuple[str, ...], tuple[str, str, str]] = {}
    for section, info in Experiment.model_fields.items():
        model = info.annotation
        kinds = KINDS.get(section, {"": model})
        plain = next(iter(kinds.values()))
        for kind, part in kinds.items():
            if not (isinstance(part, type) and issubclass(part, BaseModel)):
                rows[section,] = (section, "", info.description or "")
                continue
            for key, field in part.model_fields.items():
                default = "" if field.is_required() or field.default is None else str(field.default)
                name, only = f"{section}.{key}", kind and key not in plain.model_fields
                meaning = (field.description or "") + (f" ({kind})" if only else "")
                rows.setdefault((name, default) if only else (name,), (name, default, meaning))
    return list(rows.values())
