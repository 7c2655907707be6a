"""Adapters through unsloth: its model classes, its fused autograd functions, its gradient checkpointing.

unsloth patches transformers, peft and trl as it is imported, so it comes before them (`worker/__main__.py`) and only in
a process whose method it is.
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

PACKED = "Mxfp4ExpertParam"  # how unsloth holds the experts of gpt-oss, published in MXFP4


def load(spec: Experiment, source: str) -> Any:
    """Load the model as unsloth loads it, in 4, 8 or 16 bits. Raises SpecError for what does not go with images."""
    method: Any = spec.method
    config = loading.load_config(spec.model, source)
    if reads_images(config) and (sentences := [*method.refusals_of_images(spec)]):
        raise SpecError(sentences[0])
    loader = _loader(config)
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
            use_exact_model_name=True,  # what is measured is what was asked for, not a 4-bit copy of it on the hub
            **_memory_savers(method),
            **loading.hub_arguments(spec.model),
        ),
    )
    return model


def _loader(config: Any) -> Any:
    """Return unsloth's functions for models of such a configuration: of text, or of text and images."""
    import unsloth

    return unsloth.FastVisionModel if reads_images(config) else unsloth.FastLanguageModel


def _memory_savers(method: Any) -> dict[str, Any]:
    """Return what is asked for of what only later versions of unsloth take."""
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
    """Return the model with adapters and unsloth's fused functions. Raises SpecError where no layer has a name asked
    for."""
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


def answering(model: Any, spec: Experiment, undo: ExitStack) -> None:
    """Make a model ready to answer in unsloth's own way; `undo` makes it ready to train again."""
    loader = _loader(model.config)
    loader.for_inference(model)
    undo.callback(loader.for_training, model, use_gradient_checkpointing=_checkpointing(spec.method))


def verify(model: Any, spec: Experiment) -> list[str]:
    """Check the adapters of LoRA, 4-bit weights if asked for, and unsloth's own functions in the layers."""
    method: Any = spec.method
    sentences = lora.verify(model, spec)
    kinds = {type(module).__name__ for module in model.modules()}
    in_4_bits = "Linear4bit" in kinds or any(type(p).__name__ == PACKED for p in model.parameters())
    if method.load_in_4bit and not in_4_bits:
        sentences.append("method unsloth: load_in_4bit is on and no layer holds 4-bit weights")
    if not method.load_in_4bit and in_4_bits:
        sentences.append("method unsloth: load_in_4bit is off and layers hold 4-bit weights")
    if method.load_in_fp8 and not any(map(_in_fp8, model.parameters())):
        sentences.append("method unsloth: load_in_fp8 is on and no layer holds 8-bit weights")
    sentences += _memory_not_saved(model, method)
    facts = applied(model)
    if not facts["fused_attention"] and not facts["fused_mlp"] and not facts["compiled_modules"]:
        sentences.append("method unsloth: no layer uses unsloth's functions")
    return sentences


def _memory_not_saved(model: Any, method: Any) -> list[str]:
    sentences = []
    if method.offload_layers and not any(hasattr(module, "_unsloth_block_swap") for module in model.modules()):
        sentences.append("method unsloth: offload_layers is on and no layer waits in host memory")
    if method.offload_embedding and model.get_input_embeddings().weight.device.type != "cpu":
        sentences.append("method unsloth: offload_embedding is on and the embedding is on the GPU")
    if method.tiled_mlp and not all("tiled" in _function(layer, "mlp", "forward") for layer in decoder_layers(model)):
        sentences.append("method unsloth: tiled_mlp is on and an MLP computes its sequence as a whole")
    return sentences


def _in_fp8(parameter: Any) -> bool:
    return parameter.dtype == torch.float8_e4m3fn or type(parameter).__name__ == "Float8Tensor"  # plain, or torchao's


def unread_boundaries(spec: Experiment, optimization: str) -> list[str]:
    """Return what of an optimization that lays samples end to end is not there: unsloth tells them apart in its own
    way, and keeps what it was told in a step."""
    read = getattr(sys.modules.get("unsloth.utils.packing"), "_PACKED_INFO_CACHE", None)
    if not getattr(spec.optimizations, optimization) or spec.method.name != "unsloth" or read:
        return []
    return [f"optimizations.{optimization} is on and unsloth's attention was not told where samples begin"]


def applied(model: Any) -> dict[str, Any]:
    """Return for applied.json how many layers run unsloth's fused functions or its rewritten modules, and what
    computes attention. On Blackwell the published wheels of xformers may have no kernel, and it falls back to SDPA."""
    import unsloth

    dispatch = sys.modules.get("unsloth.utils.attention_dispatch")  # unsloth itself has loaded it where there is a GPU
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
