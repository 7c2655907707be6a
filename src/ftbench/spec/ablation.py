"""What `ftbench ablate` tries: a rung for each optimization and value on the plain recipe, and what several rungs make
together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.errors import SpecError
from ftbench.spec.base import nearest
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations import Optimizations, choices
from ftbench.spec.sweep import as_text

PLAIN = "plain"
OPTIMIZER = "train.optimizer"
OPTIMIZERS = ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit")  # other ways to compute adamw_torch
# What an optimization needs beside it, or pays with only: its rung is held against those alone.
_BESIDE: dict[tuple[str, Any], dict[str, Any]] = {
    ("attention", "varlen"): {"optimizations.padding_free": True},
    ("fp8", "tensorwise"): {"optimizations.compile": True},
    ("fp8", "rowwise"): {"optimizations.compile": True},
    ("fixed_shape", True): {"optimizations.compile": True},
    ("fused_lora", True): {"optimizations.compile": True},
}
_LEFT_OUT = {("attention", "sdpa"), ("attention", "eager")}  # what auto takes already; what keeps every score

Changes = Mapping[str, Any]  # dotted key → value, of `optimizations.` and `train.optimizer`


@dataclass(frozen=True, slots=True)
class Rung:
    """`changes` to the plain recipe, called `name`, held against the rung `over`; `key` is the optimization that it is
    about."""

    name: str
    key: str
    changes: Changes
    over: str = PLAIN


def rungs(optimizer: str, only: Sequence[str] = ()) -> list[Rung]:
    """Every rung on a plain recipe with this optimizer, those that others are held against before them. `only` keeps
    those of the optimizations or rungs named there, and what they are held against. Raises SpecError for a name that
    is neither."""
    found = [
        rung
        for key in Optimizations.model_fields
        for value in choices(key)
        if (key, value) not in _LEFT_OUT
        for rung in _of(key, value)
    ]
    if optimizer in ("adamw_torch", *OPTIMIZERS):
        found += [Rung(name, "optimizer", {OPTIMIZER: name}) for name in OPTIMIZERS]
    found.sort(key=lambda rung: rung.over != PLAIN)
    return _only(found, only) if only else found


def _of(key: str, value: Any) -> list[Rung]:
    own = {f"optimizations.{key}": value}
    beside = _BESIDE.get((key, value), {})
    if not beside:
        return [Rung(words(own), key, own)]
    return [Rung(words({**beside, **own}), key, {**beside, **own}, words(beside))]


def _only(found: Sequence[Rung], names: Sequence[str]) -> list[Rung]:
    wanted: set[str] = set()
    for name in names:
        plain = name.replace("_", " ").strip()
        chosen = {rung.name for rung in found if plain in (rung.key.replace("_", " "), rung.name.replace("_", " "))}
        if not chosen:
            keys = [*dict.fromkeys(rung.key for rung in found)]
            close = nearest(name, [*keys, *(rung.name for rung in found)])
            raise SpecError(
                f"--only {name}: is no optimization{close} (allowed: {', '.join(keys)}, or a rung that --dry-run lists)"
            )
        wanted |= chosen
    wanted |= {rung.over for rung in found if rung.name in wanted}
    return [rung for rung in found if rung.name in wanted]


def words(changes: Changes) -> str:
    """`compile + fp8 tensorwise`; `plain` for none."""
    told = []
    for key, value in changes.items():
        name = key.rpartition(".")[2].replace("_", " ")
        told.append(str(value) if key == OPTIMIZER else name if value is True else f"{name} {as_text(value)}")
    return " + ".join(told) or PLAIN


def plain(spec: Experiment) -> Experiment:
    """The spec with every optimization off, and AdamW as torch computes it by default; another optimizer learns
    otherwise and stays."""
    optimizer = "adamw_torch" if spec.train.optimizer in OPTIMIZERS else spec.train.optimizer
    train = spec.train.model_copy(update={"optimizer": optimizer})
    return spec.model_copy(update={"optimizations": Optimizations(), "train": train})


def changed(spec: Experiment, changes: Changes) -> Experiment:
    """A spec with the changes; not validated: `combinations.impossible` says what cannot work."""
    parts = {name: getattr(spec, name).model_copy(update=values) for name, values in sections(changes).items()}
    return spec.model_copy(update=parts)


def sections(changes: Changes) -> dict[str, dict[str, Any]]:
    """The changes by section of the spec."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def together(current: Changes, rung: Rung) -> dict[str, Any]:
    """The changes of both; where the current ones have what the rung needs in another form (packed rows instead of
    padding-free ones), that is kept."""
    added = dict(rung.changes)
    if current.get("optimizations.packing") and rung.key == "attention":
        added.pop("optimizations.padding_free", None)
    return {**current, **added}


def settings(changes: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """The changes as `--set` takes them."""
    return tuple(f"{key}={as_text(value)}" for key, value in changes)
