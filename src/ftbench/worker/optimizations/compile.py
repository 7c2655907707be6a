"""Compile each layer of the decoder and of the image encoder with torch.compile. Layers of the same class share one
graph. This compiles faster than one graph of the complete model."""

from functools import lru_cache, partial
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model, decoder_layers, unwrapped, vision_layers

# Suffixes of the settings ban_recompute_*: torch.compile does not recompute such values in the backward pass.
_GUARDS = ("used_far_apart", "long_fusible_chains", "materialized_backward")


def apply(model: Any, spec: Experiment) -> None:
    """Compile the layers. Dynamic graphs support all input sizes. Use them for the encoder if image sizes differ. Use
    them for the decoder if the dataset has images and `fixed_shape` is off, because batches then have many lengths.
    Always use them for Qwen3-VL's decoder: static graphs gave gradients that were 4 % too small (torch 2.11, H200)."""
    torch._dynamo.config.specialize_float = True  # constants, because variable floats need a C++ kernel on the CPU
    for guard in _GUARDS:
        setattr(torch._functorch.config, f"ban_recompute_{guard}", spec.optimizations.compile != "lean")
    read, always = vision_layers(model), spec.optimizations.compile == "dynamic"
    any_size = always or spec.dataset.has_many_image_sizes
    deepstack = hasattr(getattr(base_model(model).base_model, "visual", None), "deepstack_visual_indexes")
    any_length = always or deepstack or (
        bool(read) and spec.dataset.may_have_images and not spec.optimizations.fixed_shape
    )  # fmt: skip
    for layer in decoder_layers(model):
        _compile(layer, spec, any_length or None)
    for layer in read:
        if hasattr(layer, "attn"):  # Qwen loops over images or windows: each number of them would need a new graph
            layer.attn.__class__ = _not_compiled(type(layer.attn))  # type: ignore[arg-type]
        _compile(layer, spec, any_size or None)
    tower: Any = getattr(base_model(model).base_model, "vision_tower", None)
    if hasattr(tower, "pre_layrnorm"):
        last = len(tower.encoder.layers)
        used = getattr(base_model(model).config, "vision_feature_layer", last)
        used = max(index % (last + 1) for index in ([used] if isinstance(used, int) else used))
        tower.forward = partial(_clip, tower, used)


def _compile(layer: Any, spec: Experiment, dynamic: bool | None) -> None:
    """Compile a layer. If the layer is sharded, compile only `forward`: hooks outside `forward` gather the weights."""
    if {"fsdp", "zero3"} & {*spec.launch.strategy.split("+")}:
        layer.forward = torch.compile(layer.forward, dynamic=dynamic)
    else:
        layer.compile(dynamic=dynamic)


@lru_cache
def _not_compiled(kind: Any) -> Any:
    """Return a subclass of `kind` with a forward pass that is not compiled. All layers share this subclass, because
    torch.compile makes separate graphs for separate functions."""
    return type(f"NotCompiled{kind.__name__}", (kind,), {"forward": torch.compiler.disable(kind.forward)})


def _clip(tower: Any, used: int, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
    """Run the first `used` layers of a CLIP encoder, and return their outputs. The model does not read later outputs:
    LLaVA reads only the second to last one. transformers' version runs all layers, and its hooks interrupt the compiled
    graphs of the layers."""
    states = [tower.pre_layrnorm(tower.embeddings(pixel_values))]
    for layer in tower.encoder.layers[:used]:
        states.append(layer(states[-1], None))
    skipped = len(tower.encoder.layers) - used
    last = None if skipped else states[-1]
    return BaseModelOutputWithPooling(last_hidden_state=last, hidden_states=(*states, *[None] * skipped))


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    return {"compiled_graphs": graphs() if spec.optimizations.compile else None, "compile_cache": cache()}


def graphs() -> int:
    """Return the number of graphs that this process has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def cache() -> str | None:
    """Return the state of the compiler's cache on disk: `cold` (all graphs were compiled), `warm` (all graphs were in
    the cache) or `partly warm`. Return None if nothing was compiled or the cache is off."""
    from torch._dynamo.utils import counters

    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    misses = counters["inductor"]["fxgraph_cache_miss"]
    if not hits:
        return "cold" if misses else None
    return "partly warm" if misses else "warm"


def verify(model: Any, spec: Experiment) -> list[str]:
    if not spec.optimizations.compile:
        return []
    layers = map(unwrapped, (*decoder_layers(model), *vision_layers(model)))
    plain = [layer for layer in layers
             if not (layer._compiled_call_impl or hasattr(layer.forward, "_torchdynamo_orig_callable"))]  # fmt: skip
    if plain:
        return [f"optimizations.compile is on and {len(plain)} {type(plain[0]).__name__} were not compiled"]
    return [] if graphs() else ["optimizations.compile is on and no graph was compiled in the first step"]
