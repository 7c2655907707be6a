"""Fitted constants of the memory estimate."""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from ftbench.facts import read_facts


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of `facts/estimator.yaml`.

    `allocated_factor` multiplies the sum of the terms. `context_gib` is the memory of the driver and the CUDA context.
    The others describe the unused part of the allocator's pool: a share of the logits' blocks, GiB for
    compiled graphs, a share of the activations if batches vary in shape, and a share of the optimizer's temporary
    tensors if its step takes as much as the backward pass. 90 % of the fitted runs are within `allocated_range` (a
    share of their tensors) and within `pool_range` (a share of the widest difference that the pool may have). `runs`
    were used for the fit. Runs of `strategies` on several GPUs agree with the estimate."""

    allocated_factor: float
    context_gib: float
    logits_share: float
    compiled_gib: float
    varying_share: float
    optimizer_share: float
    allocated_range: float
    pool_range: float
    runs: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()


FITTED = tuple(field.name for field in fields(Constants) if field.name not in ("runs", "strategies"))


@cache
def constants() -> Constants:
    """Return the shipped constants."""
    values: dict[str, Any] = read_facts("estimator.yaml")
    lists: dict[str, Any] = {name: tuple(values.get(name, ())) for name in ("runs", "strategies")}
    return Constants(**lists | {name: float(values[name]) for name in FITTED})
