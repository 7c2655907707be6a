"""A spec → what it trains and how, as far as memory and time depend on it."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from ftbench.errors import SpecError
from ftbench.families.shape import Layer, ModelShape
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import Full, Lora, Qlora, Trained, Unsloth
from ftbench.spec.optimizations.fp8 import DELAYED, in_8_bits
from ftbench.spec.optimizations.triton_kernels import FAMILIES as KERNEL_FAMILIES

Loss = Literal["trl", "chunked", "liger", "unsloth", "pairs", "completions"]
Attention = Literal["sdpa", "masked", "eager", "flash", "varlen"]
Checkpointing = Literal["off", "full", "selective", "offload", "unsloth"]
Fused = Literal["off", "augmented", "beside"]

CHUNK = 2048  # label tokens (worker/optimizations/chunked_loss.py)
_MLP, _MOST_COLUMNS = {"gate_proj", "up_proj", "down_proj"}, 32  # what a whole MLP has, and of gate and up together
DTYPE_BYTES = {"float32": 4, "auto": 2, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How a model is trained, as far as its memory depends on it. Bytes are those of one element.

    weight: of the 16- or 32-bit weights as loaded; upcast: of embedding, head and norms once peft has prepared a
    quantised model (float32); compute: of what products are made in; autocast: whether products cast their inputs.
    adapter: of the adapters, 0 without. targets: the last parts of the names of the linear layers that have adapters,
    and `experts` where the fused experts have. mxfp4: the experts stay in 4 bits as gpt-oss is published.
    checkpointing: `offload` and `unsloth` keep layer inputs in host memory. chunk: label tokens of a chunk of our loss.
    graphed: forward and backward pass are replayed, and gradients stay where they were recorded. fused: how fused_lora
    multiplies adapters. lean: compiled layers make again what needs no product. triton: our own kernels are between the
    products. whole_mlp: they keep no product of the gate. streamed: frozen weights wait on the host.
    attention: `masked` is sdpa with a mask, made where rows hold padding or several samples. reference: what a step of
    dpo, or of grpo, compares with."""

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
    fp8_head: bool = False
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
        """Bytes of an element of the residual stream, which has the type of the embedding."""
        return self.upcast

    @property
    def product(self) -> int:
        """Bytes of an element that a linear layer puts out: bitsandbytes gives back the type it was given, others
        the type they compute in."""
        return self.stream if self.quantised and not self.mxfp4 else self.compute

    @property
    def casts_nothing(self) -> bool:
        """Whether adapters read the very tensor that the layer reads."""
        return self.adapter == self.stream == self.compute

    @property
    def norms_keep_inputs(self) -> bool:
        """Whether norms are kernels that save their input as it is, of which eager ones save a float32 copy."""
        return self.liger or self.unsloth or self.triton

    @property
    def joined(self) -> bool:
        """Whether the projections of an input, adapters and all, are one product whose output our kernels read."""
        return self.triton and (self.fused == "augmented" or (self.fused == "beside" and self.fp8))

    @property
    def kernels(self) -> Literal["eager", "liger", "compiled", "unsloth"]:
        """Whose kernels do the elementwise work."""
        return "unsloth" if self.unsloth else "compiled" if self.compiled else "liger" if self.liger else "eager"

    def adapted(self, layer: Layer) -> int:
        """Return how many matrices of a layer have adapters."""
        return len(layer.reached(self.targets)) + ("experts" in self.targets and layer.experts is not None)


def plan_of(spec: Experiment, model: ModelShape, padded: bool = False, whole: bool = False) -> TrainingPlan:
    """Return the plan of a resolved spec. `padded` says that some batch holds padding, or rows of several samples,
    `whole` that rows are of one length, each one sample."""
    method, on = spec.method, spec.optimizations
    if on.triton_kernels and model.family not in KERNEL_FAMILIES:
        raise SpecError(f"optimizations.triton_kernels knows no layers of {model.family}: set it to off")
    if spec.objective.prompts and model.vision:
        raise SpecError(f"objective {spec.objective.name} is given text alone, and {spec.model.id} reads images: take "
                        "another model")  # fmt: skip
    weight, autocast = DTYPE_BYTES[spec.model.dtype], spec.train.precision != "fp32"
    compute = 2 if autocast or weight == 2 else 4
    return TrainingPlan(
        full=isinstance(method, Full),
        quantised=method.quantised,
        mxfp4=method.mxfp4,
        unsloth=isinstance(method, Unsloth),
        weight=weight,
        upcast=4 if is_upcast(method, model) else weight,
        compute=DTYPE_BYTES[method.compute_dtype] if isinstance(method, Qlora) else compute,
        autocast=autocast,
        adapter=_adapter(method),
        rank=getattr(method, "rank", 0),
        targets=targets(method, model),
        double_quant=method.double_quant if isinstance(method, Qlora) else True,
        optimizer=spec.train.optimizer,
        checkpointing=_checkpointing(spec),
        offload=on.activation_offload,
        attention=_attention(spec, model, padded, whole),
        loss=_loss(spec),
        liger=on.liger,
        compiled=bool(on.compile),
        lean=on.compile == "lean",
        graphed=on.cuda_graph,
        fp8=in_8_bits(on.fp8),
        fp8_head=on.fp8_head,
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
    """Return whether an MLP is one function (worker/optimizations/fused_lora.py, BesideGroup.gated)."""
    on, method = spec.optimizations, spec.method
    delayed = on.triton_kernels and on.fp8 == DELAYED and fused(spec) == "beside"
    return delayed and targets(method, model) >= _MLP and 2 * getattr(method, "rank", 0) <= _MOST_COLUMNS


def _adapter(method: Full | Lora | Qlora | Unsloth) -> int:
    """Return an adapter parameter's bytes: peft keeps float32, trl makes those of a bitsandbytes model bfloat16."""
    return 0 if isinstance(method, Full) else 2 if isinstance(method, Qlora) and not method.mxfp4 else 4


def is_upcast(method: Full | Lora | Qlora | Unsloth, model: ModelShape) -> bool:
    """Return whether what is not quantised is cast to float32 (worker/methods/qlora.py, `adapt`)."""
    return isinstance(method, Qlora) and method.upcast and not model.has_experts


def fused(spec: Experiment) -> Fused:
    """Return how fused_lora multiplies: within a base product that is a plain one of its type and stays on the GPU."""
    if not (on := spec.optimizations).fused_lora:
        return "off"
    other = on.fp8 != "off" or on.weight_offload or (spec.method.quantised and not spec.method.mxfp4)
    products = "bfloat16" if spec.train.precision == "bf16" else "float32"
    return "beside" if other or spec.model.dtype != products else "augmented"


def targets(method: Full | Lora | Qlora | Unsloth, model: ModelShape) -> frozenset[str]:
    """Return what gets adapters: the model's linear layers of the names asked for (all-linear: any), and fused experts
    where `method.experts` says so: beside those no layer of an MLP has a name for peft (worker/methods/lora.py)."""
    if isinstance(method, Full):
        return frozenset()
    names = model.linear_names
    if method.targets != "all-linear":
        names = names & {name.rsplit(".", 1)[-1] for name in method.targets}
    if model.has_experts:
        names = names - {"gate_proj", "up_proj", "down_proj"}
    return names | {"experts"} if method.experts and model.has_experts else names


def _checkpointing(spec: Experiment) -> Checkpointing:
    setting = getattr(spec.method, "use_gradient_checkpointing", spec.optimizations.gradient_checkpointing)
    words: dict[Any, Checkpointing] = {"on": "full", True: "full", False: "off"}
    return words.get(setting, cast(Checkpointing, setting))


def is_eager(spec: Experiment, model: ModelShape) -> bool:
    """Return whether attention writes a weight for each pair of positions: transformers has no sdpa for sinks."""
    attention = spec.optimizations.attention
    return attention == "eager" or (attention == "auto" and model.has_sinks)


def _attention(spec: Experiment, model: ModelShape, padded: bool, whole: bool) -> Attention:
    attention = spec.optimizations.attention
    if is_eager(spec, model):
        return "eager"
    if attention == "varlen":
        return "sdpa" if whole and not model.has_sinks else attention  # worker/optimizations/attention.py, `_by_rows`
    if attention in ("auto", "sdpa", "cudnn"):
        return "masked" if padded and spec.method.name != "unsloth" else "sdpa"
    return "flash"


def _loss(spec: Experiment) -> Loss:
    if spec.objective.pairs or spec.objective.prompts:
        return "pairs" if spec.objective.pairs else "completions"
    if spec.method.name == "unsloth":
        return "unsloth"
    if spec.optimizations.chunked_loss:
        return "chunked"
    return "liger" if spec.optimizations.liger else "trl"
