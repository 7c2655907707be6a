"""Declare the optimizations for attention, 8-bit products, fused and compiled code, and ftbench's Triton kernels."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ftbench.spec.base import OWN_KERNELS, OWN_LOSS, Capability, Experiment, Int, Optimization, Switch, Word
from ftbench.spec.methods import GPT_OSS, decoder_family, family

_FLASH = ("flash_attention_2", "flash_attention_3", "flex_attention")


def _attention(spec: Experiment) -> Iterator[str]:
    on, kernel, precision = spec.optimizations, spec.optimizations.attention, spec.train.precision
    name = f"optimizations.attention {kernel}"
    if family(spec.model) == GPT_OSS and kernel == "sdpa":
        yield f"{name} does not support the attention sinks of gpt-oss: use auto, or varlen with packing"
    if kernel == "varlen" and not (on.packing or on.padding_free):
        yield f"{name} needs rows without padding: set packing or padding_free to on, or use attention sdpa"
    if kernel == "varlen" and precision == "fp32":
        yield f"{name} computes in 16 bits: set train.precision to bf16"
    if (objective := spec.objective.name) != "sft" and kernel not in ("auto", "eager", "sdpa"):
        yield f"{name} with objective {objective}: only eager and sdpa are tested: use one of them"


def _attention_on_machine(spec: Experiment, capability: Capability) -> Iterator[str]:
    kernel = spec.optimizations.attention
    if kernel in (*_FLASH, "varlen") and capability is None:
        yield f"optimizations.attention {kernel} needs a GPU: set it to sdpa"
    elif capability is not None and kernel in ("flash_attention_2", "varlen") and capability < (8, 0):
        yield f"optimizations.attention {kernel} needs compute capability 8.0: set it to sdpa"
    elif capability is not None and kernel == "flash_attention_3" and capability != (9, 0):
        yield "optimizations.attention flash_attention_3 is for Hopper GPUs (9.0): set it to sdpa or flash_attention_2"


DELAYED = "tensorwise-delayed"
RECIPES = ("tensorwise", "tensorwise-fast", DELAYED)


def _fp8(spec: Experiment) -> Iterator[str]:
    if spec.method.quantised:
        yield f"optimizations.fp8 needs 16-bit base weights and method {spec.method.name} stores 4-bit ones: use lora"
    if spec.method.name == "full" and spec.optimizations.fp8 == DELAYED:
        yield f"optimizations.fp8 {DELAYED} supports only frozen layers, and method full has none: use tensorwise-fast"
    if spec.method.name == "full" and spec.model.dtype == "float32":
        yield "optimizations.fp8 with method full trains 16-bit weights: set model.dtype to bfloat16"
    if spec.train.precision not in ("auto", "bf16"):
        yield f"optimizations.fp8 needs train.precision bf16, not {spec.train.precision}"
    if spec.launch.sharded:
        strategy = spec.launch.strategy
        yield f"optimizations.fp8 needs unsharded matrices, and {strategy} shards them: set it to off, or use ddp"


def _fp8_on_machine(spec: Experiment, capability: Capability) -> Iterator[str]:
    if capability is None or capability < (8, 9):  # CUDA programming guide
        have = "this machine has no GPU" if capability is None else f"this GPU has {capability[0]}.{capability[1]}"
        yield f"optimizations.fp8 needs a GPU of compute capability 8.9 or higher and {have}: set it to off"


def _cuda_graph(spec: Experiment) -> Iterator[str]:
    name, on, train = "optimizations.cuda_graph", spec.optimizations, spec.train
    if not (on.packing and on.fixed_shape):
        yield f"{name} replays one batch shape in every step: set packing and fixed_shape to on"
    if not on.chunked_loss:
        yield f"{name}: the losses of trl and Liger synchronize with the device: set chunked_loss to on"
    if train.gradient_accumulation_steps > 1:
        yield f"{name} overwrites gradients in each pass: set train.gradient_accumulation_steps to 1"
    if train.precision == "fp16":
        yield f"{name}: train.precision fp16 scales gradients on the host: set it to bf16"
    if spec.launch.gpus > 1 and spec.launch.strategy != "ddp":
        yield f"{name} supports only ddp on several GPUs: set launch.strategy to ddp, or {name} to off"
    if spec.dataset.has_images:
        yield f"{name}: images change the batch shape: set it to off"


def _fused_lora(spec: Experiment) -> Iterator[str]:
    method: Any = spec.method
    name, strategy = "optimizations.fused_lora", spec.launch.strategy
    if not method.adapters:
        yield f"{name} needs adapters and method {method.name} has none: use lora or qlora"
    if not method.adapters or method.name == "unsloth":
        return
    if method.dropout:
        yield f"{name} needs the same input for all adapters, but dropout varies it: set method.dropout to 0"
    if spec.launch.sharded and strategy != "fsdp":
        yield f"{name} needs complete weight matrices, and {strategy} splits them: set it to off, or use ddp or fsdp"
    if spec.objective.name == "dpo" and spec.objective.in_step:
        yield (
            f"{name} overwrites its adapter buffers in the forward pass of the reference model: set "
            "objective.precompute_ref_log_probs to on"
        )
    if spec.train.precision == "fp16":
        yield f"{name} supports train.precision bf16 or fp32: set one of them"


KERNEL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # families whose layers the kernels implement
GRAPH_FAMILIES = (*KERNEL_FAMILIES, "gpt_oss")  # families for which `cuda_graph: auto` turns on
MEASURED = (9, 0)  # kernels and graphs were measured to be faster on GPUs of this compute capability


def kernels_left_out(spec: Experiment, capability: Capability) -> str | None:
    """Return why `triton_kernels: auto` becomes off. Return None if auto becomes on, or if the setting is not auto."""
    if spec.optimizations.triton_kernels != "auto":
        return None
    why = [reason.partition(": ")[0] for reason in _triton_kernels(spec)]
    if capability != MEASURED:
        why.append(f"the kernels were measured only on compute capability {'.'.join(map(str, MEASURED))}")
    if spec.launch.strategy == "fsdp":
        why.append("they were not tested with launch.strategy fsdp on a GPU")
    if spec.optimizations.liger or spec.method.name == "unsloth":
        why.append("liger and unsloth have their own kernels")
    if (kind := decoder_family(spec.model)) not in KERNEL_FAMILIES:
        why.append(f"they do not support the layers of {kind or spec.model.id}")
    return "; ".join(why) or None


def graph_left_out(spec: Experiment, capability: Capability) -> str | None:
    """Return why `cuda_graph: auto` becomes off. Return None if auto becomes on. A profile needs separate launches."""
    why = [reason.removeprefix("optimizations.cuda_graph: ").partition(": ")[0] for reason in _cuda_graph(spec)]
    names = ("gradient_checkpointing", "activation_offload", "optimizer_in_backward")
    why += [f"optimizations.{name} is on" for name in names if getattr(spec.optimizations, name)]
    judged = (spec.method.name, spec.optimizations.attention) == ("lora", "varlen")
    if not judged or spec.optimizations.fp8 not in ("off", DELAYED):
        why.append(f"it was judged only with method lora, attention varlen and fp8 off or {DELAYED}")
    if capability != MEASURED:
        why.append(f"it was measured only on compute capability {'.'.join(map(str, MEASURED))}")
    if (kind := family(spec.model)) not in GRAPH_FAMILIES:
        why.append(f"it was not tested with the layers of {kind or spec.model.id}")
    if getattr(spec.method, "experts", False):
        why.append("with adapters of experts, it needs more memory")
    if spec.measure.profile == "on":
        why.append("a profile shows separate launches")
    return "; ".join(why) or None


def kernel_choices(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a copy of the optimizations for each value that `triton_kernels: auto` and `cuda_graph: auto` can become,
    on before off. With the kernels off, fp8 does not use delayed scaling."""
    if values.get("cuda_graph") == "auto":
        return [choice for graph in (True, False) for choice in kernel_choices({**values, "cuda_graph": graph})]
    if values.get("triton_kernels") != "auto":
        return [dict(values)]
    fp8 = "tensorwise" if values["fp8"] == DELAYED else values["fp8"]
    return [{**values, "triton_kernels": True}, {**values, "triton_kernels": False, "fp8": fp8}]


def _triton_kernels(spec: Experiment) -> Iterator[str]:
    name = "optimizations.triton_kernels"
    if not spec.method.adapters:
        yield f"{name} needs frozen norms, and method {spec.method.name} trains them: use lora or qlora"
    if spec.launch.strategy not in ("none", "ddp", "fsdp"):
        yield f"{name} was not tested with launch.strategy {spec.launch.strategy}: set it to off, or use ddp or fsdp"


OPTIMIZATIONS = {
    "attention": Optimization(
        type=Literal["auto", "eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"],
        default="auto",
        description="attention implementation; auto: the library's choice for the model; varlen: torch's kernel "
        "for rows without padding",
        not_with_dpo=None,
        not_with_unsloth="unsloth chooses the attention itself: set it to auto",
        incompatibilities=_attention,
        machine_incompatibilities=_attention_on_machine,
        ablate_with={"varlen": {"optimizations.padding_free": True}},
        not_ablated=("sdpa", "eager"),  # `auto` already selects sdpa; eager stores all attention scores
    ),
    "fp8": Optimization(
        type=Annotated[Literal["off", *RECIPES], Word],
        default="off",
        description="compute the products of frozen layers (with method full: of the trained layers of the "
        "decoder) in 8-bit floats: faster if compiled; tensorwise-fast also accumulates the backward pass in fewer "
        "bits; tensorwise-delayed is tensorwise-fast with scales from the previous step",
        not_with_unsloth="unsloth's fused functions multiply in 16 bits: set it to off, or use method lora",
        incompatibilities=_fp8,
        machine_incompatibilities=_fp8_on_machine,
        after=("liger",),  # Liger finds layers by their class
        ablate_with={name: {"optimizations.compile": True} for name in RECIPES},
        not_ablated=(DELAYED,),
    ),
    "chunked_loss": Optimization(
        type=Switch | Annotated[Int, Field(ge=16, le=1 << 20)],
        description="compute the loss and its gradient in chunks of label tokens, without trl's metrics and "
        "synchronizations; a number sets the tokens per chunk (on: 2048), and smaller chunks need less memory",
        not_with_dpo="it computes only the sft loss: set it to off",
        not_with_unsloth=OWN_LOSS,
    ),
    "liger": Optimization(
        description="Liger's Triton kernels: norms, rotary embedding, SwiGLU, fused loss",
        not_with_dpo="it computes only the sft loss: set it to off",
        not_with_unsloth=OWN_KERNELS,
        needs_gpu=True,
        after=("chunked_loss",),
    ),
    "compile": Optimization(
        type=Switch | Literal["dynamic", "lean"],
        description="compile each decoder layer and the vision encoder: faster steps, but a slow start and a new "
        "compilation for each new shape; dynamic: compile once for all lengths; lean: recompute norms and MLP "
        "activations to save memory",
        not_with_dpo=None,
        not_with_unsloth="unsloth compiles its own code: set it to off",
        after=("liger", "triton_kernels"),  # these change the layers, and compile must see the changed layers
        not_ablated=("lean",),  # lean saves memory but is not faster
    ),
    "fused_lora": Optimization(
        description="compute the products of adapters and base weights together, for all layers with the same input: "
        "activations are read less often",
        not_with_dpo=None,
        not_with_unsloth="unsloth fuses adapters itself: set it to off",
        incompatibilities=_fused_lora,
        after=("fp8",),  # the type of the base layer decides how its adapters are multiplied
        ablate_with={True: {"optimizations.compile": True}},
    ),
    "cuda_graph": Optimization(
        type=Switch | Literal["auto"],
        description="record the forward and backward pass as one CUDA graph and replay it in every step: faster for "
        "small models, small batches and slow hosts, which wait for Python and kernel launches; auto: on if the GPU "
        "and the other settings support it",
        not_with_unsloth="unsloth's functions synchronize with the device: set it to off",
        excludes={
            "optimizations.gradient_checkpointing": "optimizations.cuda_graph: gradient_checkpointing reads the state "
            "of the random number generator from the device, which a graph cannot: set one to off",
            "optimizations.activation_offload": "optimizations.cuda_graph: activation_offload needs the host in each "
            "step: set one to off",
        },
        incompatibilities=_cuda_graph,
        needs_gpu=True,
        after=("compile", "fused_lora"),
        not_ablated=(True,),  # it needs several other optimizations, as in `recipe: fastest-small`
    ),
    "triton_kernels": Optimization(
        type=Switch | Literal["auto"],
        description="ftbench's Triton kernels for norms, rotary embedding and the MLP's gate; auto: on if the kernels "
        "support the model and were faster in measurements on this kind of GPU",
        not_with_unsloth=OWN_KERNELS,
        excludes={"optimizations.liger": "optimizations.triton_kernels and liger replace the same code: choose one"},
        incompatibilities=_triton_kernels,
        needs_gpu=True,
        after=("fused_lora", "liger"),  # it writes into the buffers of fused_lora
        ablate_with={True: {"optimizations.compile": True, "optimizations.fused_lora": True}},
    ),
}
