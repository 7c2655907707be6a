"""The axes along which runs vary: which key each is, where a run stands on one, what differs because of it, and which
columns a table needs."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from ftbench.report.data.facts import LIMIT, as_fact, flat
from ftbench.spec.load import recipe
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import triton_kernels
from ftbench.spec.recipes import FOLDER, recipes

SHORT = {
    "gpus": "launch.gpus", "strategy": "launch.strategy", "settings": "launch.settings", "gpu": "gpu",
    "model": "model.id", "method": "method.name",
    "objective": "objective.name", "batch": "train.batch_size", "batch_size": "train.batch_size",
    "framework": "launch.framework", "dataset": "dataset.name", "weights": "model.weights",
    "optimization": "optimizations", "optimizations": "optimizations", "recipe": "recipe",
}  # fmt: skip
OPTIMIZATIONS, RECIPE = "optimizations", "recipe"
GPUS, STRATEGY = "launch.gpus", "launch.strategy"
FRAMEWORK, SETTINGS, TRL = "launch.framework", "launch.settings", "trl"
NO_OPTIMIZATION = "none"
PLAIN = ("plain", NO_OPTIMIZATION)


def value_at(axis: str, facts: Mapping[str, str]) -> str | None:
    """Return where a run stands on an axis; for `optimizations` all that are on, in words; for `recipe` the shipped one
    whose keys the run has, however it came to them, and what is on beside it (`fastest + triton kernels`), else the
    words and the optimizer; unsloth is a recipe of its own."""
    if axis == RECIPE:
        return _recipe(facts)
    if axis != OPTIMIZATIONS:
        return facts.get(axis)
    return " + ".join(map(_word, _on(facts), _on(facts).values())) or NO_OPTIMIZATION


def _on(facts: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in facts.items()
            if key.startswith("optimizations.") and text not in ("off", "auto")}  # fmt: skip


def _word(key: str, text: str) -> str:
    return key.partition(".")[2].replace("_", " ") + ("" if text == "on" else f" {text}")


def _recipe(facts: Mapping[str, str]) -> str:
    words = _unsloth(facts) if facts.get("method.name") == "unsloth" else []
    if not words and (shipped := _shipped(facts)):
        return shipped
    optimizer = facts.get("train.optimizer", "adamw_torch")
    words += [value_at(OPTIMIZATIONS, facts) or "", *([optimizer] if optimizer != "adamw_torch" else [])]
    return " + ".join(part for part in words if part and part != NO_OPTIMIZATION) or NO_OPTIMIZATION


def _shipped(facts: Mapping[str, str]) -> str | None:
    """Return the recipe that needs the fewest optimizations beside it, and these; plain is as it is, or not at all."""
    fitting, on = {}, _on(facts)
    for name, keys in _outcomes():
        beside = {key: text for key, text in on.items() if keys.get(key, "off") == "off" and name not in PLAIN}
        without = {**facts, **dict.fromkeys(beside.keys() & keys, "off")}
        if keys.items() <= without.items():  # one for images says all that another does, and more
            fitting[len(beside), -len(keys)] = " + ".join([name, *map(_word, beside, beside.values())])
    return fitting[min(fitting)] if fitting else None


def shipped_recipe(name: str | None) -> bool:
    """Return whether a value of the axis `recipe` names a shipped recipe, plain ones aside."""
    base = (name or "").partition(" + ")[0]
    return base in recipe_keys() and base not in PLAIN


def _unsloth(facts: Mapping[str, str]) -> list[str]:
    """Return unsloth with the bits of its weights, whether with its own checkpointing, and what saves memory."""
    held_in = {"4-bit": "method.load_in_4bit", "8-bit": "method.load_in_fp8"}
    bits = next((name for name, key in held_in.items() if facts.get(key) == "on"), "16-bit")
    kept = facts.get("method.use_gradient_checkpointing", "unsloth")
    savers = ("offload_layers", "offload_embedding", "tiled_mlp")
    saved = [name.replace("_", " ") for name in savers if facts.get(f"method.{name}", "off") not in ("off", "0")]
    return [f"unsloth {bits}", *([] if kept == "unsloth" else [f"checkpointing {kept}"]), *saved]


@cache
def recipe_keys() -> dict[str, dict[str, str]]:
    """Return the keys of each shipped recipe, as a run's facts have them."""
    return {name: {key: as_fact(key, value) for key, value in flat(recipe(name, FOLDER))} for name in recipes()}


def framework_words(facts: Mapping[str, str]) -> str:
    """Return `axolotl `, or `axolotl's best ` at its own best, to put before what is trained; empty where no framework
    is known."""
    name = facts.get(FRAMEWORK, "")
    return name and name + ("'s best " if facts.get(SETTINGS) == "best" else " ")


@cache
def _outcomes() -> tuple[tuple[str, dict[str, str]], ...]:
    """Return each shipped recipe with the keys that it gives, and those of each end of an `auto` in it."""
    made = []
    for name in recipes():
        given = recipe(name, FOLDER)
        ends = [given["optimizations"], *triton_kernels.ends(given["optimizations"])]
        made += [
            (name, {key: as_fact(key, value) for key, value in flat(given | {"optimizations": on})}) for on in ends
        ]
    return tuple(made)


def on_axis(axis: str, key: str) -> bool:
    """Return whether a fact is part of the axis itself."""
    if axis == RECIPE and any(key in keys for keys in recipe_keys().values()):
        return True
    return key == axis or (axis in (OPTIMIZATIONS, RECIPE) and key.startswith("optimizations."))


_RAN_BY = ("method.", "objective.", "model.", "optimizations", "recipe", "train.precision", "train.optimizer")
_BY_FRAMEWORK = ("applied.loss", "applied.patched_by")  # each has a loss of its own; the rest is to be the same work
# What a framework brings along; torch is the same for all, or told.
LIBRARIES = ("transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy", "torchao")
_LIBRARIES = {f"versions.{name}" for name in LIBRARIES}


def implied(axis: str, baseline: Mapping[str, str], candidate: Mapping[str, str], key: str) -> bool:
    """Return whether a fact differs because the axis does: what really ran, where the axis says what runs; a key that
    only one method has; the model's revision; and another GPU's power limit, where both are at their highest."""
    if on_axis(axis, key) or (key.startswith("applied.") and axis.startswith(_RAN_BY)):
        return True
    if axis in (FRAMEWORK, SETTINGS) and key in _BY_FRAMEWORK:
        return True
    if key in _LIBRARIES and baseline.get(FRAMEWORK, TRL) != candidate.get(FRAMEWORK, TRL):
        return True
    for name in ("method", "objective"):
        if axis in (f"{name}.name", RECIPE) and key.startswith(f"{name}."):
            return key not in baseline or key not in candidate
    if axis in (GPUS, STRATEGY) and key in (GPUS, STRATEGY):  # one GPU has no strategy
        return "1" in (baseline.get(GPUS), candidate.get(GPUS))
    if axis in (GPUS, STRATEGY) and key == "launch.tp":  # a mesh alone has that number
        return baseline.get(STRATEGY) != candidate.get(STRATEGY)
    if axis == "gpu" and key == LIMIT:
        return _highest(baseline.get(key)) and _highest(candidate.get(key))
    return axis == "model.id" and key in ("model.revision", "model.path")


def _highest(limit: str | None) -> bool:
    watts, _, highest = (limit or "").partition(" of ")
    return bool(highest) and watts == highest


def in_order(values: Iterable[str]) -> list[str]:
    """Return values of an axis as a person would list them: numbers by size, methods and optimizations from plain to
    rich."""
    methods = list(METHODS)

    def rank(value: str) -> tuple[Any, ...]:
        try:
            return 0, float(value), value
        except ValueError:
            pass
        first = methods.index(value) if value in methods else -1 if value in PLAIN else len(methods)
        return 1, float(first), value

    return sorted(dict.fromkeys(values), key=rank)


# --- columns ---------------------------------------------------------------------------------------------------------

PREFIX = "spec."  # of the fields of a record that hold a key of the spec
MOST_AXES = 10  # columns of axes that a table for people shows
_SHOWN = ("model.id", "model.weights", "dataset.name", "method.name", "train.batch_size",
          "train.gradient_accumulation_steps")  # fmt: skip


def varying_keys(specs: Sequence[Mapping[str, str]], labels: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the keys that have more than one value among the runs that have them. The table's own columns are left
    out, and so is what the label of the model or of the data already tells: a key of that section that is the same
    wherever the label is (`labels`: section → the label of each run)."""
    seen: dict[str, dict[str, None]] = {}
    for spec in {id(spec): spec for spec in specs}.values():  # repeats share theirs
        for key, text in spec.items():
            seen.setdefault(key, {})[text] = None
    varying = [key for key, texts in seen.items() if len(texts) > 1 and key not in _SHOWN]
    shown = [
        key for key in varying
        if not key.startswith("optimizations.") and not _labelled(key, specs, labels.get(key.partition(".")[0]))
    ]  # fmt: skip
    return by_importance(shown)


# What a reader looks for first, in this order, and what says least.
_TELLING = ("launch.gpus", "launch.strategy", "method.load_in_4bit", "method.load_in_fp8", "method.rank",
            "method.targets", "method.alpha", "dataset.max_length", "dataset.mean_length", "train.optimizer",
            "train.learning_rate")  # fmt: skip
_IDLE = ("measure.", "model.revision", "model.path", "dataset.path", "launch.mock")


def by_importance(keys: Iterable[str]) -> list[str]:
    """Return keys with those first that tell most of how a run trains; seeds and what is measured last."""

    def rank(key: str) -> int:
        idle = key.endswith("seed") or key.startswith(_IDLE)
        return _TELLING.index(key) if key in _TELLING else len(_TELLING) + idle

    return sorted(keys, key=rank)


def _labelled(key: str, specs: Sequence[Mapping[str, str]], labels: Sequence[str] | None) -> bool:
    if labels is None:
        return False
    texts: dict[str, str] = {}
    return all(texts.setdefault(label, spec.get(key, "")) == spec.get(key, "")
               for label, spec in zip(labels, specs, strict=True))  # fmt: skip


def headings(keys: Iterable[str]) -> list[str]:
    """Return the shortest end of each key that no other key shares: `seed`, or `train.seed` beside `dataset.seed`."""
    keys = [key.removeprefix(PREFIX) for key in keys]
    counts: dict[str, int] = {}
    for key in keys:
        for end in _ends(key):
            counts[end] = counts.get(end, 0) + 1
    return [next((end for end in _ends(key) if counts[end] == 1), key).replace("_", " ") for key in keys]


def _ends(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
