"""Optimizations: switches that change speed or memory but not the training objective."""

import typing
from collections.abc import Mapping
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from ftbench.spec.base import COARSE, OFF, ROUNDING, OlderPart, Optimization, Tolerance
from ftbench.spec.optimizations import compute, memory

OPTIMIZATIONS: dict[str, Optimization] = dict(sorted((compute.OPTIMIZATIONS | memory.OPTIMIZATIONS).items()))

# The order in which optimizations are applied: each one after those in its `after`.
ORDER = tuple(TopologicalSorter({name: each.after for name, each in OPTIMIZATIONS.items()}).static_order())

# Loss tolerance by the key that differs. Measured on an H200 (results/h200), worst of 14 steps: repeats of one spec
# 0.013 %, selective checkpointing 0.010 %, compile, chunked_loss and liger 0.014 %, padding_free with varlen 0.07 %,
# fp8 tensorwise 0.10 %, LoRA against QLoRA of an 8B model 1.9 %.
TOLERANCES: dict[str, Tolerance] = {
    **{f"optimizations.{name}": each.tolerance for name, each in OPTIMIZATIONS.items()},
    "train.optimizer": Tolerance(COARSE),
    **{
        f"method.{name}": Tolerance(COARSE)
        for name in ("name", "quant_type", "double_quant", "load_in_4bit", "load_in_fp8", "upcast")
    },
}


class _Section(OlderPart):
    removed = ("feature_cache", "fp8_head", "tile_buckets")


if TYPE_CHECKING:

    class Optimizations(OlderPart):
        """The section `optimizations:` with one field per optimization."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Optimizations = create_model(
        "Optimizations",
        __base__=_Section,
        __module__=__name__,
        __doc__="Each one is independent, and each is verified on the live objects.",
        **{
            name: (each.type, Field(each.default, description=each.description)) for name, each in OPTIMIZATIONS.items()
        },
    )


def choices(name: str) -> list[Any]:
    """Return the values of an optimization, except off, auto and numbers."""
    return [value for value in _values(OPTIMIZATIONS[name].type) if value not in OFF]


def _values(annotation: Any) -> list[Any]:
    if annotation is bool:
        return [True]
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [value for part in typing.get_args(annotation) for value in _values(part)]


def switched_on(section: Optimizations) -> dict[str, Any]:
    """Return the name and value of each optimization that is on."""
    return {name: value for name in OPTIMIZATIONS if (value := getattr(section, name)) not in OFF}


def tolerance(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> Tolerance:
    """Return how much the loss of two runs with these facts may differ: the largest tolerance of what differs.

    Runs on different GPUs or torch versions differ by rounding. fp8 on either side makes the comparison coarse, because
    8-bit rounding enlarges the smallest difference.
    """
    differing = [each for key, each in TOLERANCES.items() if baseline.get(key) != candidate.get(key)]
    shares = [each.share for each in differing]
    if not shares or any(baseline.get(key) != candidate.get(key) for key in ("gpu", "versions.torch")):
        shares.append(ROUNDING)
    if any(side.get("optimizations.fp8", "off") != "off" for side in (baseline, candidate)):
        shares.append(COARSE)
    return Tolerance(max(shares), any(each.another_order for each in differing))
