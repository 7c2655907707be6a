"""`ftbench list`: what can be named in a spec."""

from __future__ import annotations

from collections.abc import Callable

from ftbench.core import units
from ftbench.core.architectures import architectures
from ftbench.core.hardware import gpus
from ftbench.errors import SpecError
from ftbench.families import describe
from ftbench.spec.base import known
from ftbench.spec.datasets import DATASETS
from ftbench.spec.load import spec_keys
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import Optimizations
from ftbench.spec.recipes import recipes


def catalogue(what: str) -> str:
    """Return aligned lines of name and meaning. Raises SpecError for an unknown list."""
    try:
        known(what, LISTS, "list")
    except ValueError as error:
        raise SpecError(f"list: {error}") from None
    rows = LISTS[what]()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _methods() -> list[tuple[str, ...]]:
    return [(name, method.__doc__ or "") for name, method in METHODS.items()]


def _optimizations() -> list[tuple[str, ...]]:
    return [(name, field.description or "") for name, field in Optimizations.model_fields.items()]


def _recipes() -> list[tuple[str, ...]]:
    return list(recipes().items())


def _models() -> list[tuple[str, ...]]:
    rows = [("any model on the hub, or a local directory (model.path)", "", "")]
    for name, config in architectures().items():
        rows.append((name, config["model_type"], units.parameters(describe(config).total)))
    return rows  # type: ignore[return-value]


def _datasets() -> list[tuple[str, ...]]:
    return [(name, source.meaning + (f" ({source.hub})" if source.hub else "")) for name, source in DATASETS.items()]


def _gpus() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("GPU", "dense bf16 TFLOP/s", "memory GB", "GB/s", "W")]
    rows += [
        (
            gpu.name,
            "" if gpu.bf16 is None else f"{gpu.bf16:g}",
            f"{gpu.memory_gb:g}",
            f"{gpu.bandwidth:g}",
            f"{gpu.watts:g}",
        )
        for gpu in gpus()
    ]
    return rows


def _keys() -> list[tuple[str, ...]]:
    return [("key", "default", "meaning"), *spec_keys()]


LISTS: dict[str, Callable[[], list[tuple[str, ...]]]] = {
    "methods": _methods,
    "optimizations": _optimizations,
    "recipes": _recipes,
    "models": _models,
    "datasets": _datasets,
    "gpus": _gpus,
    "keys": _keys,
}
