"""Name a training variant by its recipe, and write the variant as a command or as a spec file."""

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ftbench.core.hardware import Gpu
from ftbench.core.units import optimizations_on
from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import SHORT_FORMS, load, shipped_recipes
from ftbench.spec.model_argument import options_of
from ftbench.spec.optimizations import Optimizations
from ftbench.spec.reading import as_text

_COMMENTS = {
    "model": "weights: random needs no download",
    "recipe": "explained by `ftbench list recipes`",
    "method": "full, lora, qlora or unsloth",
    "dataset": "samples are truncated at {max_length} tokens (max_length)",
    "train": "{unit} per step: batch_size x gradient_accumulation_steps",
    "optimizations": "explained by `ftbench list optimizations`",
}


def spec_file(spec: Experiment) -> str:
    """Return a spec as YAML with comments, without its name. A short section is on one line."""
    lines, values, unit = list[str](), spec_values(spec), "rows" if spec.optimizations.packing else "samples"
    del values["name"]  # the default is the name of the file
    for key, value in values.items():
        (only,) = value.values() if isinstance(value, dict) and len(value) == 1 else (None,)
        short = (
            only if key in SHORT_FORMS and isinstance(only, str) and next(iter(value)) == SHORT_FORMS[key] else value
        )
        flow = None if isinstance(short, dict) else False
        text = yaml.safe_dump({key: short}, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=110)
        comment = "  # " + _COMMENTS.get(key, "").format(max_length=spec.dataset.max_length, unit=unit)
        one_line = key in _COMMENTS and text.count("\n") == 1 and len(text) + len(comment) <= 120
        lines.append(text.rstrip() + comment * one_line)
    return "\n".join(lines) + "\n"


def spec_values(spec: Experiment) -> dict[str, Any]:
    """Return the values of a spec that differ from the defaults. If a shipped recipe has the same optimizations, the
    key `recipe` replaces these optimizations."""
    values: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    values["method"] = {"name": spec.method.name, **values.get("method", {})}
    if spec.objective.name != "sft":
        values["objective"] = {"name": spec.objective.name, **values.get("objective", {})}
    if name := same_recipe(spec):
        keys, train = shipped_recipes()[name], spec.train.model_dump(mode="json")
        own = values.get("train", {}) | {key: train[key] for key in keys["train"]}
        values["train"] = {key: value for key, value in own.items() if keys["train"].get(key) != value}
        values["optimizations"] = {}
        values["method"] |= {key: spec.method.model_dump(mode="json")[key] for key in keys.get("method", {})}
        values["recipe"] = name
    order = ("name", "model", "recipe", "method", "dataset", "train")
    return {key: values[key] for key in dict.fromkeys((*order, *values)) if values.get(key, {}) != {}}


@cache
def _shipped() -> dict[str, Optimizations]:
    """Return the optimizations of each shipped recipe by recipe name."""
    return {name: Optimizations.model_validate(keys["optimizations"]) for name, keys in shipped_recipes().items()}


def same_recipe(spec: Experiment) -> str | None:
    """Return the name of the shipped recipe with the same optimizations as a spec, or None."""
    known, fields = shipped_recipes(), type(spec.method).model_fields.keys()
    same = (name for name, on in _shipped().items() if name != "plain" and on == spec.optimizations)
    return next((name for name in same if known[name].get("method", {}).keys() <= fields), None)


def variant_words(spec: Experiment) -> str:
    """Return a spec's method and optimizations as short text: `lora: fastest`, `lora: fastest without packing`."""
    name, differing = _nearest_recipe(spec)
    near = name and len(differing) <= 2
    text = re.sub(r"( with(?:out)? )(.*)\1", r"\1\2 and ", " ".join([name, *differing]))
    on = text if near else ", ".join(_switches(spec.optimizations, spec)) or "plain"
    if spec.method.name != "unsloth":
        return f"{spec.method.name}: {on}"
    own = getattr(spec.method, "use_gradient_checkpointing", "off")
    bits = f"unsloth {'4' if spec.method.quantised else '16'}-bit" + ("" if own == "off" else ", checkpointing")
    return bits if on == "plain" else f"{bits}: {on}"


def _switches(optimizations: Optimizations, spec: Experiment, optimizer: str = "") -> list[str]:
    on = optimizations_on(optimizations.model_dump())
    on += ["fused AdamW"] if (optimizer or spec.train.optimizer) == "adamw_torch_fused" else []
    return [word.replace("gradient_checkpointing", "checkpointing").replace("_", " ") for word in on]


def _nearest_recipe(spec: Experiment) -> tuple[str, list[str]]:
    """Return the name of the shipped recipe with the most similar settings, and a list of the differences.

    If no recipe supports the method, name and list are empty. Optimizers are compared only for full fine-tuning."""
    own, similar = set(_switches(spec.optimizations, spec)), list[tuple[str, list[str]]]()
    for name, keys in shipped_recipes().items() if spec.method.name != "unsloth" else ():
        optimizer = keys["train"]["optimizer"] if spec.method.name == "full" else ""
        of_recipe = set(_switches(_shipped()[name], spec, optimizer))
        if of_recipe and keys.get("method", {}).get("name") in (spec.method.name, None):
            differing = [f"with {word}" for word in sorted(own - of_recipe)]
            differing += [
                f"{'with' if getattr(spec.method, key) else 'without'} {key.replace('_', ' ')}"
                for key, value in keys.get("method", {}).items()
                if getattr(spec.method, key) != value
            ]
            lost = [word for word in sorted(of_recipe - own) if not any(each.startswith(f"{word} ") for each in own)]
            similar.append((name, differing + [f"without {word}" for word in lost]))
    return min(similar, key=lambda pair: (len(pair[1]), pair), default=("", []))


def run_command(path: Path, sets: Sequence[str], best: Experiment, gpu: Gpu) -> str:
    """Return the shortest command that trains `best` on a GPU, with the user's spec file and `--set` values."""
    (name, _), commands = _nearest_recipe(best), list[list[str]]()
    has_recipe = any(text.startswith("recipe=") for text in sets)
    for first in ([], *([[f"recipe={name}"]] if name and not has_recipe else [])):
        given = [*first, *sets]
        with suppress(SpecError):  # a recipe may not work with the keys of the spec
            commands.append([*given, *changed_keys(load(path, given), best)])
    return command_on(gpu, path, options_of(min(commands, key=len)))


def command_on(gpu: Gpu, path: Path, options: Sequence[str] = ()) -> str:
    """Return an `ftbench run` command or, for an AMD GPU, an `ftbench estimate` command: ftbench cannot train there."""
    where = ["estimate", str(path), "--gpu", gpu.name] if gpu.compute_capability is None else ["run", str(path)]
    return shlex.join(["ftbench", *where, *options])


def changed_keys(spec: Experiment, other: Experiment) -> list[str]:
    """Return the `--set` values that change `spec` into `other`. Only keys that `recommend` may change are compared."""
    sets = []
    if other.method != spec.method:
        options = other.method.model_dump(mode="json", exclude_defaults=True)
        options.pop("name", None)
        name = other.method.name
        sets.append(f"method={json.dumps({'name': name, **options})}" if options else f"method={name}")
    for section in ("train", "optimizations", "launch", "measure"):
        old, new = (getattr(each, section).model_dump(mode="json") for each in (spec, other))
        changed = {key: value for key, value in new.items() if value != old[key]}
        sets += [f"{section}.{key}={as_text(value)}" for key, value in changed.items()]
    return sets
