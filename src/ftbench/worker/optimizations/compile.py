"""torch.compile on each layer, of the decoder and of what reads images: one small graph of either, reused by all its
layers, instead of one for the whole model."""

from __future__ import annotations

from typing import Any

import torch

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import decoder_layers, vision_layers


def apply(model: Any, spec: Experiment) -> None:
    """Compile the layers. Images give batches many lengths: then graphs of the decoder are for all at once, where no
    fixed shape is asked for; those of the encoder become so once sizes differ."""
    read, always = vision_layers(model), spec.optimizations.compile == "dynamic"
    any_length = always or (bool(read) and spec.dataset.may_have_images and not spec.optimizations.fixed_shape)
    for layer in decoder_layers(model):
        layer.compile(dynamic=any_length or None)
    for layer in read:
        if hasattr(layer, "attn"):  # Qwen's loops over images or windows: a graph would be for their number alone
            layer.attn.forward = torch.compiler.disable(layer.attn.forward)
        layer.compile(dynamic=always or None)


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
    layers = (*decoder_layers(model), *vision_layers(model))
    plain = [layer for layer in layers if layer._compiled_call_impl is None]
    if plain:
        return [f"optimizations.compile is on and {len(plain)} {type(plain[0]).__name__} were not compiled"]
    return [] if graphs() else ["optimizations.compile is on and no graph was compiled in the first step"]
