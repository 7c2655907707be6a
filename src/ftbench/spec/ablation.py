"""List the variants of the plain recipe that `ftbench ablate` trains and compares."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.errors import SpecError
from ftbench.spec.base import nearest
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import with_changes as with_changes
from ftbench.spec.optimizations import OPTIMIZATIONS, Optimizations, choices
from ftbench.spec.reading import as_text

PLAIN = "plain"
OPTIMIZER = "train.optimizer"
OPTIMIZERS = ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit")  # `ablate` tries them instead of adamw_torch
ROUNDED = ("adamw_torchao_fp32", "adamw_torchao_bf16", "adamw_torchao_8bit")  # also tried for 16-bit weights

Changes = Mapping[str, Any]  # values by dotted key; the keys are `optimizations.*` and `train.optimizer`


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of the plain recipe, with its name in tables. `key` is the tested optimization, or `optimizer`."""

    name: str
    key: str
    changes: Changes


def variants(optimizer: str, only: Sequence[str] = (), full: bool = False) -> list[Variant]:
    """Return the variants of a plain recipe: one for each value of each optimization, and one for each optimizer.

    If `only` is not empty, return the optimizations or variants that it names. `full` means that the method trains all
    weights. Raise SpecError for an unknown name in `only`."""
    every = [
        Variant(label(changes), key, changes)
        for key, optimization in OPTIMIZATIONS.items()
        for value in choices(key)
        if value not in optimization.not_ablated
        for changes in [{**optimization.ablate_with.get(value, {}), f"optimizations.{key}": value}]
    ]
    if optimizer in ("adamw_torch", *OPTIMIZERS, *ROUNDED):
        names = (*OPTIMIZERS, *ROUNDED) if full else OPTIMIZERS
        every += [Variant(name, "optimizer", {OPTIMIZER: name}) for name in names]
    return _only(every, only) if only else every


def _only(every: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    wanted: set[str] = set()
    for name in names:
        plain = name.replace("_", " ").strip()
        chosen = {each.name for each in every if plain in (each.key.replace("_", " "), each.name.replace("_", " "))}
        if not chosen:
            keys = [*dict.fromkeys(each.key for each in every)]
            close = nearest(name, [*keys, *(each.name for each in every)])
            raise SpecError(
                f"--only {name}: unknown optimization{close} (allowed: {', '.join(keys)}, or a variant that --dry-run "
                "lists)"
            )
        wanted |= chosen
    return [each for each in every if each.name in wanted]


def label(changes: Changes) -> str:
    """Return a name for changes to the plain recipe, such as `compile + fp8 tensorwise`. Without changes: `plain`."""
    parts = []
    for key, value in changes.items():
        name = key.rpartition(".")[2].replace("_", " ")
        parts.append(str(value) if key == OPTIMIZER else name if value is True else f"{name} {as_text(value)}")
    return " + ".join(parts) or PLAIN


def plain_spec(spec: Experiment) -> Experiment:
    """Return the spec with every optimization off. Replace each AdamW variant by `adamw_torch`. Keep `sgd`."""
    optimizer = "adamw_torch" if spec.train.optimizer in (*OPTIMIZERS, *ROUNDED) else spec.train.optimizer
    train = spec.train.model_copy(update={"optimizer": optimizer})
    return spec.model_copy(update={"optimizations": Optimizations(), "train": train})


def settings(changes: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Return the changes as arguments of `--set`, such as `train.optimizer=sgd`."""
    return tuple(f"{key}={as_text(value)}" for key, value in changes)
