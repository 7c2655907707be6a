"""What `ftbench ablate` tries: a variant of the plain recipe for each optimization and value, and what several make
together. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.errors import SpecError
from ftbench.spec.base import nearest
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations import OPTIMIZATIONS, Optimizations, choices
from ftbench.spec.reading import as_text

PLAIN = "plain"
OPTIMIZER = "train.optimizer"
OPTIMIZERS = ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit")  # other ways to compute adamw_torch
ROUNDED = ("adamw_torchao_fp32", "adamw_torchao_bf16", "adamw_torchao_8bit")  # the same, for weights in 16 bits

Changes = Mapping[str, Any]  # dotted key → value, of `optimizations.` and `train.optimizer`


@dataclass(frozen=True, slots=True)
class Variant:
    """`changes` to the plain recipe, called `name`, about the optimization `key`, compared with the variant `over`."""

    name: str
    key: str
    changes: Changes
    over: str = PLAIN


def variants(optimizer: str, only: Sequence[str] = (), full: bool = False) -> list[Variant]:
    """Return every variant of a plain recipe with this optimizer, after those that it is compared with; `full` says
    that it trains every weight. `only` keeps those of the optimizations or variants named there, and what they are
    compared with. Raise SpecError for a name that is neither."""
    every = [
        _variant(key, value)
        for key, kept in OPTIMIZATIONS.items()
        for value in choices(key)
        if value not in kept.not_ablated
    ]
    if optimizer in ("adamw_torch", *OPTIMIZERS, *ROUNDED):
        names = (*OPTIMIZERS, *ROUNDED) if full else OPTIMIZERS
        every += [Variant(name, "optimizer", {OPTIMIZER: name}) for name in names]
    every.sort(key=lambda variant: variant.over != PLAIN)
    return _only(every, only) if only else every


def _variant(key: str, value: Any) -> Variant:
    beside = OPTIMIZATIONS[key].beside.get(value, {})
    changes = {**beside, f"optimizations.{key}": value}
    return Variant(label(changes), key, changes, label(beside))


def _only(every: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    wanted: set[str] = set()
    for name in names:
        plain = name.replace("_", " ").strip()
        chosen = {each.name for each in every if plain in (each.key.replace("_", " "), each.name.replace("_", " "))}
        if not chosen:
            keys = [*dict.fromkeys(each.key for each in every)]
            close = nearest(name, [*keys, *(each.name for each in every)])
            raise SpecError(
                f"--only {name}: is no optimization{close} (allowed: {', '.join(keys)}, or a variant "
                "that --dry-run lists)"
            )
        wanted |= chosen
    wanted |= {each.over for each in every if each.name in wanted}
    return [each for each in every if each.name in wanted]


def label(changes: Changes) -> str:
    """Return `compile + fp8 tensorwise`; `plain` for none."""
    parts = []
    for key, value in changes.items():
        name = key.rpartition(".")[2].replace("_", " ")
        parts.append(str(value) if key == OPTIMIZER else name if value is True else f"{name} {as_text(value)}")
    return " + ".join(parts) or PLAIN


def plain_spec(spec: Experiment) -> Experiment:
    """Return the spec with every optimization off and torch's AdamW; an optimizer that learns otherwise stays."""
    optimizer = "adamw_torch" if spec.train.optimizer in (*OPTIMIZERS, *ROUNDED) else spec.train.optimizer
    train = spec.train.model_copy(update={"optimizer": optimizer})
    return spec.model_copy(update={"optimizations": Optimizations(), "train": train})


def with_changes(spec: Experiment, changes: Changes) -> Experiment:
    """Return a spec with the changes; not validated: `refusals` says what cannot work."""
    parts = {name: getattr(spec, name).model_copy(update=values) for name, values in by_section(changes).items()}
    return spec.model_copy(update=parts)


def by_section(changes: Changes) -> dict[str, dict[str, Any]]:
    """Return the changes by section of the spec."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def merged(current: Changes, variant: Variant) -> dict[str, Any]:
    """Return the changes of both; where the current ones have what the variant needs in another form (packed
    rows instead of padding-free ones), that is kept."""
    added = dict(variant.changes)
    if current.get("optimizations.packing") and variant.key == "attention":
        added.pop("optimizations.padding_free", None)
    return {**current, **added}


def settings(changes: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Return the changes as `--set` takes them."""
    return tuple(f"{key}={as_text(value)}" for key, value in changes)
