"""Keys by which runs are compared (axes): short names, values, columns, and differences that a key implies."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from ftbench.report.data.facts import CARD, LIMIT, as_fact, flat
from ftbench.spec.load import shipped_recipes
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import compute

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
# The plain values of compared keys: the baseline of a comparison, by default.
UNOPTIMIZED = {
    OPTIMIZATIONS: PLAIN[1:],
    RECIPE: PLAIN,
    GPUS: ("1",),
    STRATEGY: ("none",),
    FRAMEWORK: (TRL,),
    SETTINGS: ("plain",),
    SHORT["objective"]: ("sft",),
}


def value_at(axis: str, facts: Mapping[str, str]) -> str | None:
    """Return the value of a run for a compared key (axis).

    For `optimizations`, list all optimizations that are on. For `recipe`, return the shipped recipe that matches the
    run, plus additional optimizations (`fastest + triton kernels`). If no shipped recipe matches, list the
    optimizations and the optimizer. The method `unsloth` counts as a recipe.
    """
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
    """Return the shipped recipe that a run uses, with additional optimizations: `fastest + triton kernels`. Choose the
    recipe with the fewest additions; `plain` allows no additions. Return None if no recipe fits."""
    fitting, on = {}, _on(facts)
    for name, keys in _outcomes():
        extra = {key: text for key, text in on.items() if keys.get(key, "off") == "off" and name not in PLAIN}
        without = {**facts, **dict.fromkeys(extra.keys() & keys, "off")}
        if keys.items() <= without.items():  # a recipe for images has the keys of another recipe and more
            fitting[len(extra), -len(keys)] = " + ".join([name, *map(_word, extra, extra.values())])
    return fitting[min(fitting)] if fitting else None


def _unsloth(facts: Mapping[str, str]) -> list[str]:
    """Describe an unsloth run by the bits of its weights, its checkpointing, and its other options."""
    bits = "4-bit" if facts.get("method.load_in_4bit") == "on" else "16-bit"
    kept = facts.get("method.use_gradient_checkpointing", "unsloth")
    others = ("padded", "cuda_graphs", "compile_maximum")
    words = [name.replace("_", " ") for name in others if facts.get(f"method.{name}", "off") != "off"]
    words += ["not compiled"] if facts.get("method.block_compile") == "off" else []
    return [f"unsloth {bits}", *([] if kept == "unsloth" else [f"checkpointing {kept}"]), *words]


def name_prefix(facts: Mapping[str, str]) -> str:
    """Return a prefix for names: `axolotl `, or `axolotl's best ` with best settings. Empty without a framework."""
    name = facts.get(FRAMEWORK, "")
    return name and name + ("'s best " if facts.get(SETTINGS) == "best" else " ")


def variant_of(facts: Mapping[str, str]) -> str:
    """Return the recipe or method, such as `lora` (objective sft, one GPU) or `lora by dpo on 2 GPUs (fsdp)`."""
    gpus, objective = facts.get(GPUS, "1"), facts.get("objective.name", "sft")
    by = "" if objective == "sft" else f" by {objective}"
    return recipe_name(facts) + by + ("" if gpus == "1" else f" on {gpus} GPUs ({facts.get(STRATEGY)})")


def recipe_name(facts: Mapping[str, str]) -> str:
    """Return the shipped recipe, or the method with its optimizations, such as `plain qlora` or `lora with packing`."""
    recipe, method = _recipe(facts), facts.get("method.name", "unknown method")
    if method == "unsloth" or recipe.partition(" + ")[0] in shipped_recipes().keys() - PLAIN:
        return recipe
    if (on := value_at(OPTIMIZATIONS, facts)) != NO_OPTIMIZATION:
        return f"{method} with {on}"
    if recipe == PLAIN[0] and method in METHODS and facts.get(SETTINGS) != "best":
        return recipe if method == "lora" else f"{recipe} {method}"
    return method


@cache
def _outcomes() -> tuple[tuple[str, dict[str, str]], ...]:
    """Return (name, settings) of each shipped recipe. A recipe with `auto` is listed once for each possible choice."""
    outcomes = []
    for name, settings in shipped_recipes().items():
        choices = [settings["optimizations"], *compute.kernel_choices(settings["optimizations"])]
        for choice in choices:
            keys = {key: as_fact(key, value) for key, value in flat(settings | {"optimizations": choice})}
            outcomes.append((name, keys))
    return tuple(outcomes)


def on_axis(axis: str, key: str) -> bool:
    """Return whether `key` is the compared key `axis` or a part of it. Optimizations are parts of `recipe`."""
    if axis == RECIPE and any(key in keys for _, keys in _outcomes()):
        return True
    return key == axis or (axis in (OPTIMIZATIONS, RECIPE) and key.startswith("optimizations."))


_RAN_BY = ("method.", "objective.", "model.", "optimizations", "recipe", "train.precision", "train.optimizer")
_BY_FRAMEWORK = ("applied.loss", "applied.patched_by")  # these differ between frameworks for the same work
# Libraries that a framework pins. A different torch counts as a difference.
LIBRARIES = ("transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy", "torchao")
_LIBRARIES = {f"versions.{name}" for name in LIBRARIES}


_OF_STRATEGY = ("launch.tp", "launch.pp", "launch.micro_batches", "launch.schedule", "launch.split")


def implied(axis: str, baseline: Mapping[str, str], candidate: Mapping[str, str], key: str) -> bool:
    """Return whether a difference in `key` follows from different values of the compared key (axis).

    Examples: options that only one method has, the revision of another model, and the power limit of another GPU (if
    both limits are at their maximum).
    """
    if on_axis(axis, key) or (key.startswith("applied.") and axis.startswith(_RAN_BY)):
        return True
    if axis in (FRAMEWORK, SETTINGS) and key in _BY_FRAMEWORK:
        return True
    if key in _LIBRARIES and baseline.get(FRAMEWORK, TRL) != candidate.get(FRAMEWORK, TRL):
        return True
    for name in ("method", "objective"):
        if axis in (f"{name}.name", RECIPE) and key.startswith(f"{name}."):
            return key not in baseline or key not in candidate
    if axis in (GPUS, STRATEGY) and key in (GPUS, STRATEGY):  # one GPU uses no strategy
        return "1" in (baseline.get(GPUS), candidate.get(GPUS))
    if axis in (GPUS, STRATEGY) and key in _OF_STRATEGY:
        return baseline.get(STRATEGY) != candidate.get(STRATEGY)
    if key == CARD:
        return axis in ("gpu", GPUS, STRATEGY)
    if axis == "gpu" and key == LIMIT:
        return _highest(baseline.get(key)) and _highest(candidate.get(key))
    return axis == "model.id" and key in ("model.revision", "model.path")


def _highest(limit: str | None) -> bool:
    watts, _, highest = (limit or "").partition(" of ")
    return bool(highest) and watts == highest


def in_order(values: Iterable[str]) -> list[str]:
    """Return the distinct values sorted: plain values first, numbers by size, methods in the order of METHODS."""
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

PREFIX = "spec."  # prefix of record fields that hold a spec key
MOST_AXES = 10  # axis columns in a table for people
_SHOWN = ("model.id", "model.weights", "dataset.name", "method.name", "train.batch_size",
          "train.gradient_accumulation_steps")  # fmt: skip


def varying_keys(specs: Sequence[Mapping[str, str]], labels: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the spec keys that vary between runs and need a column in the table.

    `labels` are {section of the spec (`model`, `dataset`): label of each run}. A key that the label determines does not
    need a column."""
    seen: dict[str, dict[str, None]] = {}
    for spec in specs:
        for key, text in spec.items():
            seen.setdefault(key, {})[text] = None
    varying = [key for key, texts in seen.items() if len(texts) > 1 and key not in _SHOWN]
    shown = [
        key for key in varying
        if not key.startswith("optimizations.") and not _labelled(key, specs, labels.get(key.partition(".")[0]))
    ]  # fmt: skip
    return by_importance(shown)


# The most important keys in order, and the least important ones.
_FIRST = ("launch.gpus", "launch.strategy", "method.load_in_4bit", "method.rank", "method.targets",
          "method.alpha", "dataset.max_length", "dataset.mean_length", "train.optimizer",
          "train.learning_rate")  # fmt: skip
_LAST = ("measure.", "model.revision", "model.path", "dataset.path", "launch.mock")


def by_importance(keys: Iterable[str]) -> list[str]:
    """Sort keys by importance. Keys with a large effect on training come first, seeds and measurement last."""

    def rank(key: str) -> int:
        last = key.endswith("seed") or key.startswith(_LAST)
        return _FIRST.index(key) if key in _FIRST else len(_FIRST) + last

    return sorted(keys, key=rank)


def _labelled(key: str, specs: Sequence[Mapping[str, str]], labels: Sequence[str] | None) -> bool:
    if labels is None:
        return False
    pairs = {(label, spec.get(key, "")) for label, spec in zip(labels, specs, strict=True)}
    return len(pairs) == len(set(labels))


def headings(keys: Iterable[str]) -> list[str]:
    """Return the shortest unique suffix of each key: `seed`, or `train.seed` if `dataset.seed` is present too."""
    keys = [key.removeprefix(PREFIX).removesuffix(".name") for key in keys]
    counts = Counter(end for key in keys for end in _ends(key))
    return [next((end for end in _ends(key) if counts[end] == 1), key).replace("_", " ") for key in keys]


def _ends(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
