"""Compute the training plan of a spec. The plan contains all properties that determine memory and time."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from ftbench.errors import SpecError
from ftbench.families.shape import Layer, ModelShape
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import Full, Lora, Qlora, Trained, Unsloth, decoder_family
from ftbench.spec.optimizations.compute import DELAYED, KERNEL_FAMILIES

Loss = Literal["trl", "chunked", "liger", "unsloth", "pairs"]
Attention = Literal["sdpa", "masked", "eager", "flash", "varlen"]
Checkpointing = Literal["off", "full", "selective", "offload", "unsloth"]
Fused = Literal["off", "augmented", "separate"]

CHUNK = 2048  # label tokens per chunk of ftbench's loss (worker/optimizations/chunked_loss.py)
_MLP, _MOST_COLUMNS = {"gate_proj", "up_proj", "down_proj"}, 32  # largest rank of gate and up together
DTYPE_BYTES = {"float32": 4, "auto": 2, "bfloat16": 2, "float16": 2}


class EarlierUnsloth(Unsloth):
    """unsloth as of November 2025, which computes the experts of gpt-oss one by one."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """All properties of a training run that determine its memory and time. A "product" is a matrix multiplication.

    Args:
        mxfp4: Experts stay in MXFP4, the 4-bit format of the published gpt-oss.
        weight: Bytes per element of the loaded weights.
        upcast: Bytes per element of embedding, head and norms. peft casts them to float32 in a quantized model.
        compute: Bytes per element of the inputs of products.
        autocast: Whether autocast casts the inputs of products.
        adapter: Bytes per element of the adapters; 0 without adapters.
        targets: Names of the adapted linear layers, such as `q_proj`, and `experts` for fused experts.
        packed_experts: Experts stay in 4 bits, because of `mxfp4` or unsloth.
        looped_experts: Each expert is a separate module.
        checkpointing: `offload` and `unsloth` keep the inputs of layers in host memory.
        attention: `masked` is sdpa with a mask, for padding or several samples per row.
        chunk: Label tokens per chunk of ftbench's loss.
        lean: Compiled layers recompute everything except products.
        graphed: Forward and backward pass are one CUDA graph, and gradients stay in place.
        fused: How fused_lora computes the adapters (see the function `fused`).
        triton: ftbench's Triton kernels compute norms, rotary embedding and the gate function.
        whole_mlp: ftbench's kernels recompute silu(gate) * up instead of saving it.
        streamed: Frozen weights are in host memory (weight_offload).
        reference: The reference model of dpo: the base model without adapters, or a second model."""

    full: bool = False
    quantised: bool = False
    mxfp4: bool = False
    unsloth: bool = False
    weight: int = 2
    upcast: int = 2
    compute: int = 2
    autocast: bool = True
    adapter: int = 0
    rank: int = 0
    targets: frozenset[str] = frozenset()
    packed_experts: bool = False
    looped_experts: bool = False
    double_quant: bool = True
    optimizer: str = "adamw_torch"
    checkpointing: Checkpointing = "off"
    offload: bool = False
    attention: Attention = "sdpa"
    loss: Loss = "trl"
    chunk: int = CHUNK
    liger: bool = False
    compiled: bool = False
    lean: bool = False
    graphed: bool = False
    fp8: bool = False
    fused: Fused = "off"
    triton: bool = False
    whole_mlp: bool = False
    streamed: bool = False
    in_backward: Literal[False, True, "offload"] = False
    vision: Trained = "frozen"
    projector: Trained = "frozen"
    reference: Literal["none", "base", "second model"] = "none"

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream, which has the dtype of the embedding."""
        return self.upcast

    @property
    def product(self) -> int:
        """Bytes per element of a linear layer's output.

        bitsandbytes layers return the dtype of their input. Other linear layers return the compute dtype."""
        return self.stream if self.quantised and not self.mxfp4 else self.compute

    @property
    def in_32_bits(self) -> bool:
        """Whether FSDP keeps trained weights in float32 (worker/model/loading.py, trains_in_32_bits)."""
        return self.full and "torchao" not in self.optimizer

    @property
    def casts_nothing(self) -> bool:
        """Whether adapters read the input of a layer without a cast to another dtype."""
        return self.adapter == self.stream == self.compute

    @property
    def norms_keep_inputs(self) -> bool:
        """Whether fused norm kernels save their input without a cast. Eager norms save a float32 copy of the input."""
        return self.liger or self.unsloth or self.triton

    @property
    def joined(self) -> bool:
        """Whether one product computes all projections of an input and their adapters, as ftbench's kernels do."""
        return self.triton and (self.fused == "augmented" or (self.fused == "separate" and self.fp8))

    @property
    def trains_vision(self) -> bool:
        """Whether the image encoder or the projector is trained."""
        return (self.vision, self.projector) != ("frozen", "frozen")

    @property
    def kernels(self) -> Literal["eager", "liger", "compiled", "unsloth"]:
        """The kind of kernels that compute the elementwise operations."""
        return "unsloth" if self.unsloth else "compiled" if self.compiled else "liger" if self.liger else "eager"

    def adapted(self, layer: Layer) -> int:
        """Return the number of matrices with adapters in a layer. Fused experts count as one matrix."""
        return len(layer.reached(self.targets)) + ("experts" in self.targets and layer.experts is not None)


def plan_of(spec: Experiment, model: ModelShape, padded: bool = False, whole: bool = False) -> TrainingPlan:
    """Return the training plan of a resolved spec.

    Args:
        spec: The experiment, after `resolve` has replaced `auto` settings.
        model: The shape of its model.
        padded: Whether a batch has padding, or rows with several samples.
        whole: Whether each row has one sample, and all rows have the same length."""
    method, on = spec.method, spec.optimizations
    if on.triton_kernels and (kind := decoder_family(spec.model)) not in KERNEL_FAMILIES:
        raise SpecError(f"optimizations.triton_kernels does not support {kind}: set it to off")
    weight, autocast = DTYPE_BYTES[spec.model.dtype], spec.train.precision != "fp32"
    # peft creates float32 adapters. For a bitsandbytes model in 16-bit precision, trl casts them to bfloat16.
    half = autocast and isinstance(method, Qlora) and not method.mxfp4
    return TrainingPlan(
        full=isinstance(method, Full),
        quantised=method.quantised,
        mxfp4=method.mxfp4,
        unsloth=isinstance(method, Unsloth),
        weight=weight,
        upcast=4 if is_upcast(method, model) else weight,
        compute=DTYPE_BYTES[method.compute_dtype] if isinstance(method, Qlora) else 2 if autocast or weight == 2 else 4,
        autocast=autocast,
        adapter=0 if isinstance(method, Full) else 2 if half else 4,
        rank=getattr(method, "rank", 0),
        targets=targets(method, model),
        looped_experts=isinstance(method, EarlierUnsloth) and model.has_experts,
        packed_experts=method.mxfp4 or (isinstance(method, Unsloth) and model.family == "gpt_oss"),
        double_quant=method.double_quant if isinstance(method, Qlora) else True,
        optimizer=spec.train.optimizer,
        checkpointing=_checkpointing(spec),
        offload=on.activation_offload,
        attention=_attention(spec, model, padded, whole),
        loss=_loss(spec),
        liger=on.liger,
        compiled=bool(on.compile),
        lean=on.compile == "lean",  # `on` with method full and fp8 was not measured, and can need less than estimated
        graphed=on.cuda_graph,
        fp8=on.fp8 != "off",
        chunk=CHUNK if on.chunked_loss is True else on.chunked_loss or CHUNK,
        fused=fused(spec),
        triton=on.triton_kernels,
        whole_mlp=_whole_mlp(spec, model),
        streamed=on.weight_offload,
        in_backward=on.optimizer_in_backward,
        vision=getattr(method, "vision", "full") if model.vision else "frozen",
        projector=getattr(method, "projector", "full") if model.vision else "frozen",
        reference="second model" if spec.second_model else "base" if spec.objective.in_step else "none",
    )


def _whole_mlp(spec: Experiment, model: ModelShape) -> bool:
    """Return whether one autograd function computes the MLP (AdaptersOnlyGroup.gated of fused_lora.py)."""
    on, method = spec.optimizations, spec.method
    delayed = on.triton_kernels and on.fp8 == DELAYED and fused(spec) == "separate"
    return delayed and targets(method, model) >= _MLP and 2 * getattr(method, "rank", 0) <= _MOST_COLUMNS


def is_upcast(method: Full | Lora | Qlora | Unsloth, model: ModelShape) -> bool:
    """Return whether the method casts unquantized weights to float32 (worker/methods/qlora.py, `adapt`)."""
    return isinstance(method, Qlora) and method.upcast and not model.has_experts


def fused(spec: Experiment) -> Fused:
    """Return how fused_lora computes adapters: `augmented` (extra rows and columns of weights), `separate`, or `off`.

    `augmented` needs base weights on the GPU, in the compute dtype or in 4 bits. With 4 bits, it also needs compiled
    layers, and does not work with `upcast` and `compile: lean`."""
    if not (on := spec.optimizations).fused_lora:
        return "off"
    products = "bfloat16" if spec.train.precision == "bf16" else "float32"
    separate = on.fp8 != "off" or on.weight_offload or spec.launch.sharded
    if isinstance(method := spec.method, Qlora) and not method.mxfp4:
        separate |= method.upcast or method.compute_dtype != products or on.compile in (False, "lean")
    return "separate" if separate or spec.model.dtype != products else "augmented"


def targets(method: Full | Lora | Qlora | Unsloth, model: ModelShape) -> frozenset[str]:
    """Return the names of the linear layers with adapters. `experts` stands for fused experts with adapters.

    `all-linear` selects all linear layers. In models with fused experts, peft does not find MLP layers by name
    (worker/methods/lora.py)."""
    if isinstance(method, Full):
        return frozenset()
    names = frozenset(linear.name for layer, _ in model.kinds for linear in layer.linears)
    if method.targets != "all-linear":
        names = names & {name.rsplit(".", 1)[-1] for name in method.targets}
    if not model.has_experts:
        return names
    return (names - _MLP) | ({"experts"} if method.experts else set())


def _checkpointing(spec: Experiment) -> Checkpointing:
    setting = getattr(spec.method, "use_gradient_checkpointing", spec.optimizations.gradient_checkpointing)
    words: dict[Any, Checkpointing] = {"on": "full", True: "full", False: "off"}
    return words.get(setting, cast(Checkpointing, setting))


def _attention(spec: Experiment, model: ModelShape, padded: bool, whole: bool) -> Attention:
    attention = spec.optimizations.attention
    stored = attention == "eager" or (attention == "auto" and model.has_sinks)  # transformers has no sdpa for sinks
    if stored and spec.method.name != "unsloth":  # unsloth uses FlexAttention for sinks
        return "eager"
    if attention == "varlen":
        return "sdpa" if whole and not model.has_sinks else attention  # worker/optimizations/attention.py, `_by_rows`
    if attention in ("auto", "sdpa"):
        return "masked" if padded and spec.method.name != "unsloth" else "sdpa"
    return "flash"


def _loss(spec: Experiment) -> Loss:
    if spec.objective.pairs:
        return "pairs"
    if spec.method.name == "unsloth":
        return "unsloth"
    if spec.optimizations.chunked_loss:
        return "chunked"
    return "liger" if spec.optimizations.liger else "trl"
