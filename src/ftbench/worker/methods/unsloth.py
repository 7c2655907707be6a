"""Train adapters with unsloth's model classes, fused autograd functions and gradient checkpointing.

unsloth patches transformers, peft and trl when it is imported. `worker/__main__.py` imports unsloth before these
libraries, and only for this method.
"""

import sys
from typing import Any

import torch

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.methods import lora, mismatches
from ftbench.worker.model import loading
from ftbench.worker.model.parts import decoder_layers
from ftbench.worker.model.vision import reads_images

# Data set attribute with the length of the longest row. unsloth pads batches if this length exceeds its limit.
LONGEST = "_unsloth_truncated_to"
PACKED = "Mxfp4ExpertParam"  # unsloth's class for MXFP4 experts of gpt-oss


def load(spec: Experiment, source: str) -> Any:
    """Load the model with unsloth, with weights in 4 or 16 bits."""
    method: Any = spec.method
    loader = _loader(loading.load_config(spec.model, source))
    model, _ = loading.reach(
        spec.model,
        lambda: loader.from_pretrained(
            model_name=source,
            max_seq_length=spec.dataset.max_length,
            dtype=getattr(torch, spec.model.dtype),
            load_in_4bit=method.load_in_4bit,
            use_gradient_checkpointing=_checkpointing(method),
            random_state=method.random_state,
            fix_tokenizer=False,
            use_exact_model_name=True,  # do not load a 4-bit copy from the hub
            **loading.hub_arguments(spec.model),
        ),
    )
    return model


def _loader(config: Any) -> Any:
    """Return unsloth's model class for text models or for vision models."""
    import unsloth

    return unsloth.FastVisionModel if reads_images(config) else unsloth.FastLanguageModel


def _checkpointing(method: Any) -> bool | str:
    setting = str(method.use_gradient_checkpointing)
    return setting if setting == "unsloth" else setting == "on"


def adapt(model: Any, spec: Experiment) -> Any:
    """Return the model with adapters and unsloth's fused functions. Raise SpecError if a target does not exist.

    By default, unsloth adapts experts if gate_proj, up_proj or down_proj is a target. `method.experts` decides here."""
    method: Any = spec.method
    targets = lora.linear_targets(model, spec)
    experts: dict[str, Any] = {}
    if not method.experts:
        experts = {"target_parameters": []}  # None means that unsloth decides
        linear = {name.split(".")[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        if not isinstance(targets, str):  # unsloth reports targets that do not exist
            targets = [target for target in targets if target.split(".")[-1] in linear] or targets
    elif not _packed(model):
        experts = {"target_parameters": lora.expert_parameters(model)}
    try:
        return _loader(model.config).get_peft_model(
            model,
            r=method.rank,
            lora_alpha=method.alpha,
            lora_dropout=method.dropout,
            target_modules=targets,
            use_gradient_checkpointing=_checkpointing(method),
            random_state=method.random_state,
            max_seq_length=spec.dataset.max_length,
            **experts,
        )
    except ValueError as error:
        raise SpecError(f"method.targets: {' '.join(str(error).split())}") from None


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return messages if adapters, quantization or unsloth's functions were not applied."""
    method: Any = spec.method
    problems = lora.verify(model, spec)
    kinds = {type(module).__name__ for module in model.modules()}
    in_4_bits = "Linear4bit" in kinds or _packed(model)
    problems += mismatches({"method.load_in_4bit": (method.load_in_4bit, in_4_bits)})
    if not method.experts and any(".experts." in name and "lora_" in name for name, _ in model.named_parameters()):
        problems.append("method.experts is off, but the experts have adapters")
    if not any(_functions(model).values()):
        problems.append("method unsloth: no layer uses unsloth's functions")
    return problems


def _packed(model: Any) -> bool:
    return any(type(parameter).__name__ == PACKED for parameter in model.parameters())


def batches_itself(spec: Experiment, pixels: Any) -> bool:
    """Return whether unsloth builds the batches. ftbench's collator is used only for images and for `fixed_shape`,
    because a collator turns off unsloth's padding-free batches and packing."""
    return spec.method.name == "unsloth" and pixels is None and not spec.optimizations.fixed_shape


def batching(spec: Experiment) -> dict[str, Any]:
    """Return trl's arguments for batches. unsloth decides about `padding_free` if this argument is missing."""
    method: Any = spec.method
    on = spec.optimizations
    chosen = {"padding_free": bool(on.padding_free)} if on.padding_free or method.padded else {}
    return chosen | {"packing": bool(on.packing)}


def batches_of(trainer: Any) -> str:
    """Return how the live collator makes batches: `packed`, `padding-free` or `padded`."""
    if not getattr(trainer.data_collator, "padding_free", False):
        return "padded"
    return "packed" if trainer.args.packing else "padding-free"


def verify_choices(trainer: Any, spec: Experiment) -> list[str]:
    """Return messages if unsloth's batches and compilation differ from the spec. Call this after the first step."""
    method: Any = spec.method
    on, facts = spec.optimizations, applied(trainer)
    requested = {"packed": ("optimizations.packing", on.packing),
                 "padding-free": ("optimizations.padding_free", on.padding_free),
                 "padded": ("method.padded", method.padded)}  # fmt: skip
    batches, compiled = facts["batches"], facts["compiled_layers"]
    problems = [f"{key} is on and unsloth's batches are {batches}"
                for name, (key, value) in requested.items() if value and batches != name]  # fmt: skip
    if batches != "padded" and not getattr(sys.modules.get("unsloth.utils.packing"), "_PACKED_INFO_CACHE", None):
        problems.append(f"batches are {batches} and unsloth's attention did not get the sample boundaries")
    if compiled and not method.block_compile:
        problems.append(f"method.block_compile is off and unsloth compiled {compiled} layers")
    if method.cuda_graphs and not facts["cuda_graph_shapes"]:
        problems.append(
            f"method.cuda_graphs is on and unsloth recorded no graph: {compiled} layers are compiled, and batches are "
            f"{batches}. Set method.padded to on, because padding-free batches are not compiled"
        )
    return problems + mismatches({"method.compile_maximum": (method.compile_maximum, facts["compile_maximum"])})


def applied(trainer: Any) -> dict[str, Any]:
    """Return unsloth's choices for applied.json: attention, batches, compiled layers and uses of fused functions.

    On Blackwell GPUs, published wheels of xformers may lack kernels. unsloth then uses SDPA.
    """
    import unsloth

    model, modules = trainer.model, sys.modules
    dispatch = modules.get("unsloth.utils.attention_dispatch")  # unsloth imports this only on a GPU
    return {
        "version": unsloth.__version__,
        **_functions(model),
        "attention": dispatch.select_attention_backend() if dispatch else None,
        "batches": batches_of(trainer),
        "compiled_layers": sum(bool(vars(each).get("_unsloth_block_checked")) for each in decoder_layers(model)),
        "cuda_graph_shapes": _graph_shapes(decoder_layers(model)[0]),
        "compile_maximum": bool(getattr(modules.get("unsloth.models._utils"), "UNSLOTH_COMPILE_MAXIMUM", False)),
    }


def _graph_shapes(layer: Any) -> int:
    """Return the number of batch shapes with CUDA graphs of this layer's class. unsloth stores the shapes in closure
    variables of the class's `forward`."""
    forward = type(layer).forward
    for _ in range(2):  # the variables are in the function that `forward` calls
        names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
        variables = dict(zip(names, getattr(forward, "__closure__", None) or (), strict=False))
        if "graph_shapes" in variables:
            on, shapes, off = (variables[name].cell_contents for name in ("graphs", "graph_shapes", "graphs_off"))
            return len(shapes) if on and not off[0] else 0
        if "run" not in variables:
            break
        forward = variables["run"].cell_contents
    return 0


def _functions(model: Any) -> dict[str, int]:
    """Return the number of layers and modules that use unsloth's functions, by kind of function."""
    layers = decoder_layers(model)
    marked = [getattr(type(layer).forward, "_unsloth_block_compiled", False) for layer in layers]
    return {
        "fused_attention": sum(_function(layer, "self_attn", "apply_qkv") == "apply_lora_qkv" for layer in layers),
        "fused_mlp": sum("lora" in _function(layer, "mlp", "forward") for layer in layers),
        "compiled_modules": sum("unsloth_compiled" in type(module).__module__ for module in model.modules()),
        "layers_to_compile": sum(map(bool, marked)),
    }


def _function(layer: Any, part: str, name: str) -> str:
    function = getattr(getattr(layer, part, None), name, None)
    return str(getattr(getattr(function, "__func__", function), "__name__", ""))
