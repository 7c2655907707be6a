"""Adapters with unsloth: its model classes, fused autograd functions and gradient checkpointing.

unsloth patches transformers, peft and trl when it is imported. `worker/__main__.py` imports it before them, and only in
runs with this method.
"""

import sys
from contextlib import ExitStack
from typing import Any

import torch

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.methods import lora
from ftbench.worker.model import loading
from ftbench.worker.model.parts import decoder_layers
from ftbench.worker.model.vision import reads_images

PACKED = "Mxfp4ExpertParam"  # unsloth's class for MXFP4 experts of gpt-oss


def load(spec: Experiment, source: str) -> Any:
    """Load the model with unsloth in 4, 8 or 16 bits."""
    method: Any = spec.method
    loader = _loader(loading.load_config(spec.model, source))
    model, _ = loading.reach(
        spec.model,
        lambda: loader.from_pretrained(
            model_name=source,
            max_seq_length=spec.dataset.max_length,
            dtype=getattr(torch, spec.model.dtype),
            load_in_4bit=method.load_in_4bit,
            load_in_fp8=method.load_in_fp8,
            use_gradient_checkpointing=_checkpointing(method),
            random_state=method.random_state,
            fix_tokenizer=False,
            use_exact_model_name=True,  # not the 4-bit copy of the model on the hub
            **_memory_savers(method),
            **loading.hub_arguments(spec.model),
        ),
    )
    return model


def _loader(config: Any) -> Any:
    """Return unsloth's class for text or vision models."""
    import unsloth

    return unsloth.FastVisionModel if reads_images(config) else unsloth.FastLanguageModel


def _memory_savers(method: Any) -> dict[str, Any]:
    """Return the requested arguments that only later versions of unsloth support."""
    names = {
        "offload_layers": "offload_layers",
        "offload_embedding": "offload_embedding",
        "tiled_mlp": "unsloth_tiled_mlp",
    }
    return {argument: getattr(method, name) for name, argument in names.items() if getattr(method, name)}


def _checkpointing(method: Any) -> bool | str:
    setting = str(method.use_gradient_checkpointing)
    return setting if setting == "unsloth" else setting == "on"


def adapt(model: Any, spec: Experiment) -> Any:
    """Return the model with adapters and unsloth's fused functions. Raise SpecError for targets without a layer."""
    method: Any = spec.method
    experts = {"target_parameters": lora.expert_parameters(model)} if method.experts else {}
    try:
        return _loader(model.config).get_peft_model(
            model,
            r=method.rank,
            lora_alpha=method.alpha,
            lora_dropout=method.dropout,
            bias=method.bias,
            target_modules=lora.linear_targets(model, spec),
            use_gradient_checkpointing=_checkpointing(method),
            random_state=method.random_state,
            max_seq_length=spec.dataset.max_length,
            **experts,
        )
    except ValueError as error:
        raise SpecError(f"method unsloth: {str(error).strip().splitlines()[0]}") from None


def prepare_generation(model: Any, spec: Experiment, undo: ExitStack) -> None:
    """Prepare the model for generation with unsloth's method. `undo` prepares it for training again."""
    loader = _loader(model.config)
    loader.for_inference(model)
    undo.callback(loader.for_training, model, use_gradient_checkpointing=_checkpointing(spec.method))


def verify(model: Any, spec: Experiment) -> list[str]:
    """Check the adapters, the quantisation, and unsloth's functions in the layers."""
    method: Any = spec.method
    problems = lora.verify(model, spec)
    kinds = {type(module).__name__ for module in model.modules()}
    in_4_bits = "Linear4bit" in kinds or any(type(p).__name__ == PACKED for p in model.parameters())
    if method.load_in_4bit and not in_4_bits:
        problems.append("method unsloth: load_in_4bit is on and the model lacks 4-bit layers")
    if not method.load_in_4bit and in_4_bits:
        problems.append("method unsloth: load_in_4bit is off and layers have 4-bit weights")
    if method.load_in_fp8 and not any(map(_in_fp8, model.parameters())):
        problems.append("method unsloth: load_in_fp8 is on and the model lacks 8-bit layers")
    problems += _memory_not_saved(model, method)
    facts = applied(model)
    if not facts["fused_attention"] and not facts["fused_mlp"] and not facts["compiled_modules"]:
        problems.append("method unsloth: no layer uses unsloth's functions")
    return problems


def _memory_not_saved(model: Any, method: Any) -> list[str]:
    problems = []
    if method.offload_layers and not any(hasattr(module, "_unsloth_block_swap") for module in model.modules()):
        problems.append("method unsloth: offload_layers is on and all layers are on the GPU")
    if method.offload_embedding and model.get_input_embeddings().weight.device.type != "cpu":
        problems.append("method unsloth: offload_embedding is on and the embedding is on the GPU")
    if method.tiled_mlp and not all("tiled" in _function(layer, "mlp", "forward") for layer in decoder_layers(model)):
        problems.append("method unsloth: tiled_mlp is on and an MLP is not tiled")
    return problems


def _in_fp8(parameter: Any) -> bool:
    return parameter.dtype == torch.float8_e4m3fn or type(parameter).__name__ == "Float8Tensor"  # torch's or torchao's


def unread_boundaries(spec: Experiment, optimization: str) -> list[str]:
    """Return a problem if unsloth's attention did not get the boundaries of concatenated samples in a step."""
    read = getattr(sys.modules.get("unsloth.utils.packing"), "_PACKED_INFO_CACHE", None)
    if not getattr(spec.optimizations, optimization) or spec.method.name != "unsloth" or read:
        return []
    return [f"optimizations.{optimization} is on and unsloth's attention did not get the sample boundaries"]


def applied(model: Any) -> dict[str, Any]:
    """Return the numbers of layers with unsloth's functions and modules, and its attention, for applied.json.

    On Blackwell published wheels of xformers may lack kernels, and unsloth falls back to SDPA.
    """
    import unsloth

    dispatch = sys.modules.get("unsloth.utils.attention_dispatch")  # loaded by unsloth if there is a GPU
    layers = decoder_layers(model)
    return {
        "version": unsloth.__version__,
        "fused_attention": sum(_function(layer, "self_attn", "apply_qkv") == "apply_lora_qkv" for layer in layers),
        "fused_mlp": sum("lora" in _function(layer, "mlp", "forward") for layer in layers),
        "compiled_modules": sum("unsloth_compiled" in type(module).__module__ for module in model.modules()),
        "attention": dispatch.select_attention_backend() if dispatch else None,
        "xformers": dispatch.HAS_XFORMERS if dispatch else None,
    }


def _function(layer: Any, part: str, name: str) -> str:
    function = getattr(getattr(layer, part, None), name, None)
    return str(getattr(getattr(function, "__func__", function), "__name__", ""))
