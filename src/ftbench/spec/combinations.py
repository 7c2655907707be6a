"""What cannot work: on any machine, or on this one; each as a sentence with a way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftbench.core.architectures import architectures
from ftbench.core.hardware import supports_fp8

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def impossible(spec: Experiment) -> list[str]:
    """The combinations that cannot work on any machine, each as a sentence with a way out."""
    found = []
    fp8 = spec.optimizations.fp8 != "off"
    if fp8 and spec.method.quantised:
        found.append(
            f"optimizations.fp8 needs 16-bit base weights and method {spec.method.name} stores 4-bit ones: use lora"
        )
    if fp8 and spec.method.name == "full":
        found.append("optimizations.fp8 converts frozen base layers and method full has none: use lora")
    if fp8 and spec.train.precision not in ("auto", "bf16"):
        found.append(f"optimizations.fp8 goes with train.precision bf16, not {spec.train.precision}")
    if spec.train.precision == "fp16" and spec.method.name == "full" and spec.model.dtype in ("float16", "bfloat16"):
        found.append(
            "full fine-tuning with train.precision fp16 scales gradients, which 16-bit weights do not allow: "
            "set model.dtype to float32"
        )
    if spec.train.precision == "fp16" and spec.method.quantised:
        found.append(
            "train.precision fp16 scales gradients, and trl keeps the adapters of a quantised model in bfloat16, "
            "which cannot be scaled: set train.precision to bf16 or fp32"
        )
    found += _beside_unsloth(spec) + _of_optimizations(spec) + _of_fused_lora(spec) + _of_gpt_oss(spec)
    if any(target.rsplit(".", 1)[-1] == "lm_head" for target in getattr(spec.method, "targets", ())):
        found.append("method.targets: lm_head cannot have an adapter under trl's chunked loss: leave it out")
    if getattr(spec.method, "experts", False) and getattr(spec.method, "dropout", 0):
        found.append("method.experts goes with method.dropout 0: peft has no dropout for fused expert matrices")
    if spec.measure.eval == "epoch" and not spec.dataset.eval_samples:
        found.append("measure.eval: epoch needs dataset.eval_samples")
    found += _of_profile(spec) + _not_built_yet(spec)
    return found


def _not_built_yet(spec: Experiment) -> list[str]:
    """Name what a spec may say of its launch and no launcher can do so far."""
    launch, refusals = spec.launch, []
    if launch.framework != "trl":
        refusals.append(f"launch.framework: {launch.framework} cannot be launched yet: use trl")
    if launch.python:
        refusals.append("launch.python: a run uses the interpreter that ftbench itself runs in: leave it out")
    if launch.gpus > 1:
        refusals.append(
            f"launch.gpus: a run on {launch.gpus} GPUs cannot be launched yet: set it to 1 (`ftbench sweep --gpus 0,1` "
            "trains several runs at once, `ftbench estimate --gpus` computes what sharding would take)"
        )
    if launch.strategy != "none":
        refusals.append(f"launch.strategy: {launch.strategy} cannot be launched yet: set it to none, on one GPU")
    if launch.offload != "none":
        refusals.append(
            f"launch.offload: {launch.offload} cannot be launched yet: set it to none; "
            "optimizations.gradient_checkpointing offload moves activations to the host"
        )
    return refusals


def _beside_unsloth(spec: Experiment) -> list[str]:
    """unsloth brings its own of what these switch on."""
    if spec.method.name != "unsloth":
        return []
    on = spec.optimizations
    own = {
        "gradient_checkpointing": (on.gradient_checkpointing, "set method.use_gradient_checkpointing instead"),
        "attention": (on.attention != "auto", "it chooses the attention itself: leave it auto"),
        "compile": (on.compile, "it compiles what it rewrites itself: leave it off"),
        "fp8": (on.fp8 != "off", "its fused functions multiply in 16 bits: leave it off, or use method lora"),
        "activation_offload": (on.activation_offload, "method.use_gradient_checkpointing: unsloth does that"),
        "padding_free": (on.padding_free, "it does not read the boundaries that ftbench gives: leave it off"),
        "packing": (on.packing, "it does not read the boundaries that ftbench gives: leave it off"),
        "chunked_loss": (on.chunked_loss, "it has a fused loss of its own: leave it off"),
        "liger": (on.liger, "it has kernels of its own: leave it off"),
        "fused_lora": (on.fused_lora, "it fuses adapters itself: leave it off"),
    }
    return [f"optimizations.{name} with method unsloth: {why}" for name, (is_on, why) in own.items() if is_on]


GPT_OSS = "gpt_oss"
GRANULE = 8  # columns of a factor of an expert's adapter: grouped products take rows of 16 bytes


def _of_gpt_oss(spec: Experiment) -> list[str]:
    """What no library can do with fused experts that are published in MXFP4 (docs/gpt-oss.md)."""
    method: Any = spec.method
    family = architectures().get(spec.model.id, {}).get("model_type")
    published = family == GPT_OSS and spec.model.weights == "pretrained"
    found = []
    if family == GPT_OSS and spec.optimizations.attention in ("sdpa", "varlen"):
        found.append(
            f"optimizations.attention {spec.optimizations.attention} does not compute the attention sinks of gpt-oss: "
            "leave it auto"
        )
    if spec.method.name == "qlora" and not method.mxfp4 and published:
        found.append(
            f"method qlora with quant_type {method.quant_type}: the weights of {spec.model.id} are published in mxfp4 "
            "and cannot be quantised again: set method.quant_type to mxfp4, or use lora, which loads them in 16 bits"
        )
    if not method.mxfp4:
        return found
    if family not in (None, GPT_OSS):
        found.append(f"method.quant_type mxfp4 is the format of gpt-oss, and {spec.model.id} is {family}: use nf4")
    if not method.double_quant or method.compute_dtype not in ("auto", spec.model.dtype):
        found.append(
            "method.double_quant and method.compute_dtype are for nf4 and fp4: leave them out with quant_type mxfp4"
        )
    if spec.model.dtype == "float16":
        found.append("method.quant_type mxfp4 computes in bfloat16: leave model.dtype auto")
    if spec.optimizations.compile:
        found.append(
            "optimizations.compile with quant_type mxfp4: a layer whose experts are written out for each product is no "
            "single graph: leave it off"
        )
    if method.experts and method.rank % GRANULE:
        found.append(
            f"method.experts with quant_type mxfp4 takes ranks that are multiples of {GRANULE}, not {method.rank}"
        )
    return found


def _of_fused_lora(spec: Experiment) -> list[str]:
    """What its products leave out, so that it would train something else."""
    method, name = spec.method, "optimizations.fused_lora"
    if not spec.optimizations.fused_lora or method.name == "unsloth":
        return []
    if method.name == "full":
        return [f"{name} multiplies adapters and method full has none: use lora or qlora"]
    found = []
    if method.dropout:
        found.append(
            f"{name} reads an input once for all adapters, and dropout gives each its own: set method.dropout to 0"
        )
    if method.bias != "none":
        found.append(f"{name} leaves biases frozen: set method.bias to none")
    if method.experts:
        found.append(f"{name} knows linear layers, not fused expert matrices: set it or method.experts to off")
    if spec.train.precision == "fp16":
        found.append(f"{name} goes with train.precision bf16 or fp32")
    return found


def _of_optimizations(spec: Experiment) -> list[str]:
    """Optimizations that exclude or need each other."""
    on, found = spec.optimizations, []
    flat = on.packing or on.padding_free
    if on.packing and on.padding_free:
        found.append("optimizations.packing lays samples end to end already: set padding_free to off")
    if on.attention == "varlen" and not flat:
        found.append(
            "optimizations.attention varlen is for rows without padding: set packing or padding_free, or attention sdpa"
        )
    if on.attention == "varlen" and spec.train.precision == "fp32":
        found.append("optimizations.attention varlen computes in 16 bits: set train.precision to bf16")
    if on.attention == "cudnn" and spec.train.precision == "fp32":
        found.append(
            "optimizations.attention cudnn computes in 16 bits: set train.precision to bf16, or attention sdpa"
        )
    if on.fixed_shape and on.padding_free:
        found.append("optimizations.fixed_shape pads and padding_free does not: choose one, or packing")
    if on.length_grouping and (on.packing or on.fixed_shape):
        found.append("optimizations.length_grouping saves padding that packing and fixed_shape leave no room for")
    if on.length_grouping and spec.dataset.longest_first:
        found.append("optimizations.length_grouping and dataset.longest_first both order the samples: choose one")
    if on.packing and spec.dataset.longest_first:
        found.append("optimizations.packing fills every row: dataset.longest_first says nothing there")
    if on.activation_offload and on.gradient_checkpointing:
        found.append("optimizations.activation_offload and gradient_checkpointing save the same memory: choose one")
    return found


def _of_profile(spec: Experiment) -> list[str]:
    if spec.measure.profile == "off":
        return []
    found, needed = [], spec.measure.steps_to_profile
    if spec.launch.mock != "off":
        found.append(
            "measure.profile: launch.mock trains nothing, so there is nothing to profile: set one of them to off"
        )
    if spec.train.max_steps is not None and spec.train.max_steps < needed:
        found.append(
            f"measure.profile {spec.measure.profile} needs {needed} steps to profile {spec.measure.profile_steps} of "
            f"them and train.max_steps is {spec.train.max_steps}: raise it, or leave it out"
        )
    if spec.measure.eval == "epoch":
        found.append("measure.eval: epoch has no place in a run that is profiled: set it to off or end")
    return found


def refused_here(spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
    """What cannot work on a machine whose GPU has this compute capability; None is a machine without a GPU."""
    found = []
    if spec.method.needs_gpu and capability is None:
        found.append(
            f"method {spec.method.name} runs none of its own kernels without a GPU, and this machine has none: use "
            "lora or qlora"
        )
    if spec.optimizations.fp8 != "off" and (capability is None or not supports_fp8(capability)):
        have = "this machine has no GPU" if capability is None else f"this GPU has {capability[0]}.{capability[1]}"
        found.append(f"optimizations.fp8 needs a GPU of compute capability 8.9 or higher and {have}: set it to off")
    if spec.optimizations.gradient_checkpointing == "offload" and capability is None:
        found.append("optimizations.gradient_checkpointing offload needs a GPU whose memory it saves: set it to on")
    here = [name for name in ("activation_offload", "liger") if getattr(spec.optimizations, name) and not capability]
    found += [f"optimizations.{name} needs a GPU: set it to off" for name in here]
    if spec.optimizations.attention.startswith(("flash", "flex", "varlen", "cudnn")) and capability is None:
        found.append(f"optimizations.attention {spec.optimizations.attention} needs a GPU: set it to sdpa")
    if spec.train.optimizer.startswith("paged") and capability is None:
        found.append(f"train.optimizer {spec.train.optimizer} needs a GPU to page from: set it to adamw_torch")
    if spec.measure.profile == "nsys" and capability is None:
        found.append("measure.profile nsys is for a GPU, and this machine has none: set it to on")
    if spec.method.mxfp4 and capability is not None and (capability < (8, 0) or spec.model.dtype == "float32"):
        found.append(
            "method.quant_type mxfp4 multiplies in bfloat16 in groups, which needs a GPU of compute capability 8.0 or "
            "higher and model.dtype auto: use nf4"
        )
    if spec.train.precision == "fp16" and capability is None:
        found.append(
            "train.precision fp16 needs a GPU (a CPU trains in fp32 without saying so): set it to bf16 or fp32"
        )
    return found
