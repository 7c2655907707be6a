"""Read the settings in effect from the live objects, for applied.json.

Optimizations and methods are imported lazily, because environments of other frameworks lack some libraries.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import torch

from ftbench.core.flops import MatmulShape, VisionMatmulShape
from ftbench.core.units import GIB, percent
from ftbench.families import vision as families
from ftbench.spec.experiment import DAMAGED, RECORDED, Experiment
from ftbench.worker import parallel
from ftbench.worker.device import device as own_device
from ftbench.worker.model.parts import base_model, decoder_layers, part_of, plain_tensors
from ftbench.worker.model.vision import reads_images

SCHEMA = 1
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}  # values of train.precision, by accelerate's names
# The first pattern that matches a parameter's name gives the kind of the parameter.
_KINDS = (
    ("head", r"\blm_head\b"), ("embedding", "embed"), ("experts", r"\bexperts\b"),
    ("router", r"\brouter\b|\.mlp\.gate\."), ("attention", r"\b[qk]_norm\b"), ("norm", r"norm\b"),
    ("attention", r"\b(self_attn|attn|attention|linear_attn)\b"), ("mlp", r"\b(mlp|feed_forward)\b"),
)  # fmt: skip
KINDS = ("embedding", "attention", "mlp", "experts", "router", "norm", "head", "other")


def of_model(model: Any) -> dict[str, Any]:
    """Return the sections of applied.json that depend only on the model."""
    kinds = parameters_by_kind(model)
    return {
        "schema": SCHEMA,
        "device": device_of(model),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "model": {
            "class": type(base_model(model)).__name__,
            "attention": model.config.get_text_config()._attn_implementation,
            "layers": len(decoder_layers(model)),
            "weights_gb_by_dtype": _bytes_by_dtype(model),
            "modules": dict(Counter(type(m).__name__ for m in model.modules() if not list(m.children())).most_common()),
        },
        "parameters": {
            "total": sum(kind["total"] for kind in kinds.values()),
            "trainable": sum(kind["trainable"] for kind in kinds.values()),
            "by_kind": kinds,
        },
        "trained_dtype": ", ".join(sorted({_dtype(p.dtype) for p in model.parameters() if p.requires_grad})),
        "matmul_shape": asdict(matmul_shape(model)),
        **({"vision_shape": asdict(seen)} if (seen := vision_shape(model)) else {}),
    }


def of_trainer(trainer: Any, spec: Experiment) -> dict[str, Any]:
    """Return the trainer's settings in effect.

    Some values exist only after the first step: optimizer state, gradient checkpointing and compiled graphs.
    """
    from ftbench.worker import optimizations
    from ftbench.worker.methods import unsloth

    precision = autocast(trainer)
    return {
        "product_precision": _product_precision(spec, precision, trainer.model),
        "autocast": precision,
        "loss": _loss(trainer, spec),
        "loss_normalisation": loss_normalisation(trainer),
        "optimizer": optimizer_facts(innermost(trainer.optimizer)),
        **optimizations.applied(trainer.model, spec),
        **parallel.applied(trainer, spec),
        **trainer.facts(),
        **({"unsloth": unsloth.applied(trainer)} if spec.method.name == "unsloth" else {}),
    }


def autocast(trainer: Any) -> str:
    """Return the autocast precision: `bf16`, `fp16` or `no`. DeepSpeed casts the weights instead."""
    engine = getattr(trainer, "deepspeed", None)
    if engine is None:
        return str(trainer.accelerator.mixed_precision)
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "no"


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """Return the class of an optimizer, and the dtypes of its state. The state is empty before the first step."""
    state: Counter[str] = Counter()
    for values in (optimizer.state if optimizer is not None else {}).values():
        for name, value in values.items():
            tensors = plain_tensors(value)[:1]  # the codes of a quantized state, without the scales
            state.update(f"{name}: {_dtype(tensor.dtype)}" for tensor in tensors if tensor.numel() > 1)
    return {
        "class": None if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        "fused": None if optimizer is None else bool(optimizer.defaults.get("fused")),
        "state": dict(state),
    }


def loss_normalisation(trainer: Any) -> str:
    """Return a description of the divisor of the loss in a transformers.Trainer."""
    return "label tokens of the step" if trainer.model_accepts_loss_kwargs else "label tokens of a micro-batch"


def _loss(trainer: Any, spec: Experiment) -> str:
    """Return the name of the loss implementation: ftbench's chunked loss, Liger's loss, or trl's loss type."""
    if spec.optimizations.chunked_loss:
        return "fused over chunks (ftbench)"
    if spec.optimizations.liger:
        return "fused (liger)"
    return " + ".join(trainer.args.loss_type) if spec.objective.pairs else str(trainer.args.loss_type)


def warnings(model: Any, spec: Experiment, applied: dict[str, Any]) -> list[str]:
    """Return warnings about `measure.control`, interrupted steps, and layers without adapters or quantization."""
    from ftbench.worker.methods import lora

    messages = []
    kinds = applied["parameters"]["by_kind"]
    if spec.measure.control != "off":
        messages.append(
            f"{DAMAGED}: measure.control={spec.measure.control} breaks the training on purpose; reports ignore this run"
        )
    if spec.measure.weights_of:
        messages.append(f"{RECORDED}: its steps were interrupted")
    if spec.method.adapters:
        if missing := lora.unmatched_targets(model, spec):
            messages.append(f"no layer is named {', '.join(missing)}: these targets have no effect")
        frozen = [k for k in ("attention", "mlp", "experts") if kinds[k]["total"] and not kinds[k]["trainable"]]
        for kind in frozen:
            share = kinds[kind]["total"] / applied["parameters"]["total"]
            hint = "; method.experts=on adds adapters to them" if kind == "experts" else ""
            messages.append(f"{kind} ({percent(share, 0)} of the parameters) get no adapter{hint}")
    if spec.method.quantised and not spec.method.mxfp4 and kinds["experts"]["total"]:
        messages.append("the experts are fused matrices, which bitsandbytes does not quantise: they keep their dtype")
    return messages


def parameters_by_kind(model: Any) -> dict[str, dict[str, int]]:
    """Return the number of `total` and `trainable` parameters for each module kind. A quantized weight counts with its
    number of elements before quantization."""
    kinds = {kind: {"total": 0, "trainable": 0} for kind in KINDS}
    for name, parameter in model.named_parameters():
        kind = kinds.setdefault(module_kind(name), {"total": 0, "trainable": 0})
        kind["total"] += numel(name, parameter)
        kind["trainable"] += numel(name, parameter) if parameter.requires_grad else 0
    return kinds


def module_kind(name: str) -> str:
    """Return the module kind of a parameter name: one of KINDS, `vision` or `projector`. An adapter has the kind of the
    layer that it adapts."""
    if (part := part_of(name)) != "language":
        return part
    adapted = re.sub(r"\.lora_\w+", "", name)
    return next((kind for kind, pattern in _KINDS if re.search(pattern, adapted)), "other")


def numel(name: str, parameter: Any) -> int:
    """Return the number of elements of a parameter before quantization. MXFP4 packs two elements into one byte."""
    if (shape := getattr(parameter, "_original_shape", None)) is not None:  # unsloth's experts in MXFP4
        return int(shape.numel())
    if parameter.dtype == torch.uint8 and name.endswith(("_blocks", "_scales")):
        return 2 * int(parameter.numel()) if name.endswith("_blocks") else 0
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel() if state is not None else parameter.numel())


def matmul_shape(model: Any) -> MatmulShape:
    """Return the number of weights that are multiplied with each token. Count only the experts that a token uses."""
    config, base = model.config.get_text_config(), base_model(model)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    visited = (getattr(config, "num_experts_per_tok", None) or config.top_k_experts) / experts if experts else 1.0
    output = base.get_output_embeddings()  # can share its weight with the input embeddings
    outputs = [name for name, parameter in model.named_parameters() if parameter is output.weight]
    layers, head, adapters = [0, 0], [0, 0], 0  # [all weights, trained weights]
    for name, kind, count, trained in _matrices(model):
        if kind in ("vision", "projector"):
            continue
        count = round(count * (visited if kind == "experts" else 1))
        if "lora_" in name:
            adapters += count
        elif kind != "embedding" or name in outputs:
            part = head if kind in ("head", "embedding") else layers
            part[0] += count
            part[1] += count if trained else 0
    return MatmulShape(layers[0], layers[1], head[0], head[1], adapters, *_attention(config))


def vision_shape(model: Any) -> VisionMatmulShape | None:
    """Return the number of weights that are multiplied with each image patch. Return None for a text model."""
    if not reads_images(model.config):
        return None
    shape = families.describe(model.config.model_type, model.config.to_dict())
    counts: dict[str, Any] = {field.name: 0 for field in fields(VisionMatmulShape)}
    for name, kind, count, trained in _matrices(model):
        is_table = "pos" in name.rsplit(".", 2)[-2]  # position embeddings
        if is_table or kind not in ("vision", "projector"):
            continue
        part = "encoder" if kind == "vision" else "projector"
        share = count / shape.merge**2 if kind == "projector" else count
        counts[f"{part}_adapters" if "lora_" in name else part] += share
        counts[f"{part}_trained"] += share if trained and "lora_" not in name else 0
    return VisionMatmulShape(**counts | {"width": shape.hidden, "windows": shape.windows})


def _matrices(model: Any) -> Iterator[tuple[str, str, int, bool]]:
    """For each weight matrix, yield its name, module kind and number of elements, and whether it is trained."""
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        if (parameter.ndim >= 2 or state is not None) and not name.endswith("bias"):
            yield name, module_kind(name), numel(name, parameter), parameter.requires_grad


def _attention(config: Any) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Return the attention width (`heads * head_dim`) and the sliding window of each layer, in two tuples.

    The width is 0 for linear attention. For latent attention, the width is the mean of query width and value width.
    """
    layers = config.num_hidden_layers
    configs = getattr(config, "per_layer_config", None) or [config] * layers  # layers of Gemma 4 differ
    window = getattr(config, "sliding_window", None)
    slides = bool(window) and getattr(config, "use_sliding_window", True) is not False
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if slides else "full_attention"] * layers
    widths = tuple(0 if kind == "linear_attention" else _width(each) for kind, each in zip(kinds, configs, strict=True))
    return widths, tuple(window if slides and kind == "sliding_attention" else None for kind in kinds)


def _width(config: Any) -> int:
    """Return the attention width of a layer. Return 0 for a model without attention heads, such as Mamba 2."""
    heads = getattr(config, "num_attention_heads", 0)
    if value := getattr(config, "v_head_dim", None):
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + value) // 2)
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)))


def device_of(model: Any) -> str:
    device = next(model.parameters()).device if parallel.rank() is None else own_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _bytes_by_dtype(model: Any) -> dict[str, float]:
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        sizes[_dtype(parameter.dtype)] += parameter.numel() * parameter.element_size()
    return {name: size / GIB for name, size in sizes.most_common()}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _product_precision(spec: Experiment, autocast: str, model: Any) -> str:
    """Return the precision of the large matrix products: `fp8`, `bf16`, `fp16` or `fp32`."""
    from ftbench.worker.optimizations import fp8

    if fp8.layers(model):
        return "fp8"
    if autocast in ("bf16", "fp16"):
        return str(autocast)
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[spec.model.dtype]
