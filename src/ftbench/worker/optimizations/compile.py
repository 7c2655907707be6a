"""torch.compile on each decoder layer: one small graph, reused by all layers, instead of one for the whole model."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import decoder_layers


def apply(model: Any, spec: Experiment) -> None:
    for layer in decoder_layers(model):
        layer.compile(dynamic=True if spec.optimizations.compile == "dynamic" else None)


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    return {"compiled_graphs": graphs() if spec.optimizations.compile else None, "compile_cache": cache()}


def graphs() -> int:
    """Count the graphs compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def cache() -> str | None:
    """Return where the graphs compiled so far came from: `cold` (all were compiled), `warm` (all were in the
    compiler's cache on disk, from an earlier process), `partly warm`; None where nothing was compiled or the cache
    is off."""
    from torch._dynamo.utils import counters

    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    misses = counters["inductor"]["fxgraph_cache_miss"]
    if not hits:
        return "cold" if misses else None
    return "partly warm" if misses else "warm"


def verify(model: Any, spec: Experiment) -> list[str]:
    if not spec.optimizations.compile:
        return []
    plain = [layer for layer in decoder_layers(model) if layer._compiled_call_impl is None]
    if plain:
        return [f"optimizations.compile is on and {len(plain)} {type(plain[0]).__name__} were not compiled"]
    return [] if graphs() else ["optimizations.compile is on and no graph was compiled in the first step"]
