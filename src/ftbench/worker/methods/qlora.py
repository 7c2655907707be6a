"""QLoRA: adapters on frozen 4-bit weights from bitsandbytes, or in the MXFP4 format of gpt-oss (model/mxfp4.py)."""

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import GPT_OSS
from ftbench.worker.device import device
from ftbench.worker.methods import lora, mismatches
from ftbench.worker.model import loading, mxfp4, random_weights
from ftbench.worker.model.parts import VISION_MODULES
from ftbench.worker.model.vision import reads_images


def load(spec: Experiment, source: str) -> Any:
    method: Any = spec.method
    if method.mxfp4:
        return _load_mxfp4(spec, source)
    config = loading.load_config(spec.model, source)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=method.quant_type,
        bnb_4bit_use_double_quant=method.double_quant,
        bnb_4bit_compute_dtype=getattr(torch, method.compute_dtype),
        llm_int8_skip_modules=[VISION_MODULES, "lm_head"] if reads_images(config) else None,
    )
    model = loading.load_model(spec, source, quantised)
    for layer in model.modules():
        if isinstance(layer, Linear4bit):  # in eval mode on a CPU, it would repack its weight and lose gradients
            layer.support_avx512bf16_for_cpu = False
    return model


def _load_mxfp4(spec: Experiment, source: str) -> Any:
    """Load gpt-oss with the published MXFP4 experts. Raise SpecError for other models."""
    config = loading.load_config(spec.model, source)
    kind = getattr(config, "quantization_config", None) or {}
    if config.model_type != GPT_OSS or str(kind.get("quant_method")) != "mxfp4":
        raise SpecError(
            f"method.quant_type mxfp4 needs the published format of gpt-oss, and {spec.model.path or spec.model.id} is "
            "different: use nf4 for 16-bit weights"
        )
    del config.quantization_config  # the MXFP4 layers of transformers cannot be trained
    with mxfp4.as_experts():
        if spec.model.weights == "pretrained":
            return loading.read(spec, source, config=config)
        arguments = {"dtype": getattr(torch, spec.model.dtype), **loading.attention_of(spec)}
        with device():
            model = loading.reach(spec.model, lambda: AutoModelForCausalLM.from_config(config, **arguments))
    random_weights.fill(model, spec.model.seed, random_weights.deviation(config))
    return model.eval()


def adapt(model: Any, spec: Experiment) -> Any:
    """Return the quantized model with adapters.

    peft's `prepare_model_for_kbit_training` casts all weights that are not quantized to float32. This would double the
    memory of fused experts. Models with fused experts, or with `upcast` off, are frozen without a cast.
    """
    method: Any = spec.method
    if method.mxfp4:
        model.requires_grad_(False)
        with mxfp4.declared(model):
            return lora.adapt(model, spec)
    experts = any("experts" in name and parameter.ndim == 3 for name, parameter in model.named_parameters())
    if experts or not method.upcast:
        model.requires_grad_(False)
    else:
        checkpointing = bool(spec.optimizations.gradient_checkpointing)
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    return lora.adapt(model, spec)


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return messages about adapters or 4-bit layers that differ from the spec."""
    method: Any = spec.method
    problems = lora.verify(model, spec)
    if method.mxfp4:
        return problems + mxfp4.problems(model)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    if not layers:
        return [*problems, "method qlora: the model lacks 4-bit layers"]
    embedding = model.get_input_embeddings().weight.dtype
    if not method.upcast and embedding != getattr(torch, spec.model.dtype):
        problems.append(f"method qlora: upcast is off and the embedding is {embedding}")
    for name, layer in layers:
        if (state := layer.weight.quant_state) is None:
            return [*problems, f"method qlora: {name} was not quantised"]
        live = {"quant_type": state.quant_type, "double_quant": bool(state.nested),
                "compute_dtype": str(layer.compute_dtype).removeprefix("torch.")}  # fmt: skip
        problems += mismatches(
            {f"method.{key}": (getattr(method, key), value) for key, value in live.items()}, f"{name}: "
        )
        if problems:
            break
    return problems
