"""Compute the work of a step by kind, in FLOPs, bytes and operations. `rates.py` converts the work to seconds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftbench.core import flops
from ftbench.core.flops import vision_per_patch
from ftbench.estimate.memory.share import FLOAT, share
from ftbench.estimate.memory.weights import fetched_head, kept_by, matrices, on_host, optimizer_state
from ftbench.estimate.workload.batches import Batch
from ftbench.estimate.workload.model import TrainableShape, vision_matmul
from ftbench.estimate.workload.plan import DTYPE_BYTES, Fused, TrainingPlan, is_upcast, plan_of
from ftbench.estimate.workload.sharding import sharding_of
from ftbench.families.shape import Layer
from ftbench.families.vision import VisionShape
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations.compute import DELAYED

# Bytes per element that the forward pass reads and writes: a norm 36 (upcast, square, mean, scale, cast), residual sums
# 12, the rotary embedding 20, a transposition 4, silu 4, and silu(gate) * up 6. A layer has two norms of the hidden
# state, one of queries and one of keys.
_HIDDEN, _HEADS, _INNER = 2 * 36 + 12, 36 + 20 + 4, 10
_ADAPTER_IN, _ADAPTER_OUT = 14, 12  # the input is cast to float32 and back; the output is scaled and added
# Bytes per element for each active expert. Rows are gathered, weighted, put back in order and added. gpt-oss has
# biases, so both outputs are read and written again, and its clamped gate has seven operations instead of two.
_EXPERT_ROW, _BIASED_ROW, _CLAMPED_INNER = 14, 18, 30
_BACKWARD = 2.0  # the backward pass moves this many times the bytes of the forward pass
_ADAPTER_BACKWARD = 1.3
# fused_lora reduces the memory passes and operations of adapters to these shares (kernels/adapter_products.py).
_FUSED_PASSES: dict[Fused, float] = {"off": 1.0, "augmented": 35 / 91.5, "separate": 70 / 91.5}
_FUSED_OPS: dict[Fused, float] = {"off": 1.0, "augmented": 16 / 42, "separate": 33 / 42}
# Bytes per logit. trl's loss writes a logit in 16 bits, reads and writes it in float32, and does the same for the
# gradient. The other values count reads and writes of ftbench's loss, eager and compiled (chunked_loss.py).
_LOGIT, _OUR_LOGIT, _OUR_LOGIT_COMPILED = 20, 36, 12
# Bytes per logit with DPO. The logit is written in 16 bits, cast, and read by trl's kernel and metrics. Its gradient is
# written, copied and cast. Logits of the reference are only written, cast and read.
_PAIR_LOGIT, _REFERENCE_LOGIT = 44, 12
# Bytes per element of a cast to 8 bits. The element is read for the maximum, read again, and written. Eager mode first
# casts it to float32. With the maximum of the previous step, it is read only once. The values of torchao's casts,
# compiled and eager, were fitted to results/h100/founding-images.
_CAST, _CAST_COMPILED, _CAST_EAGER, _CAST_DELAYED = 5, 8, 42, 3
_CAST_AGAIN = 3  # bytes per element if the maximum is known: each operand of trained layers has a second layout
EAGER_EXPERTS = "elementwise.experts"
SCORE = 40  # bytes per score of eager attention, forward and backward
DEQUANTISED = 2.5  # bytes per weight: read in 4 bits, written in 16 bits
MXFP4_OUT = 17 / 32 + 2  # bytes per MXFP4 weight: read with its scale, written in 16 bits
# Operations that Python starts per layer in the forward and backward pass. Each takes some microseconds. The number for
# a 4-bit matrix comes from QLoRA and LoRA at batch 1 in results/h200/qwen3-8b-frontier (0.31 and 0.25 s).
_LAYER_OPS, _ADAPTER_OPS, _QUANTISED_OPS, _MASK_OPS, _EXPERT_OPS = 320, 26, 20, 40, 120
# Operations per 8-bit matrix without Triton kernels, and per batch with images (masks, checks, merging). The last is
# a factor for compiled layers if shapes vary, because they check the shapes of each batch. All three were fitted to
# results/h100/founding-images.
_FP8_OPS, _IMAGE_OPS, _VARYING = 15, 1500, 1.5
_ENCODER_OPS, _WINDOW_OPS = 40, 8  # in the forward pass: per encoder layer, and per attention window
_HOST_SHARE = {"eager": 1.0, "liger": 0.85, "compiled": 0.5, "unsloth": 0.45}  # share of the operations that remain
# Each value was fitted to one run (results/h200/headline). The first is the number of operations per layer of unsloth's
# checkpointing, which copies inputs to host memory and back. The second is the share of operations that remain with
# ftbench's kernels and 8-bit products.
_OFFLOADED_OPS, _EIGHT_BIT_SHARE = 450, 0.8
# A CUDA graph reduces the time to start operations to this share. The second value is the number of operations outside
# the graph (batch copy, clipping, update). Neither was measured.
_REPLAYED, _OUTSIDE = 0.05, 600
# Operations per expert if each expert is a module with 4-bit weights (unsloth_zoo, GptOssExpertsBnb4bit). The forward
# pass has 32 (gather, two dequantized products with biases, clamped gate, routing weight, index_add), and the backward
# pass twice as many.
_LOOP_OPS = 96
# unsloth's padding-free batches: the share of operations that remain, and additional operations per layer and sample.
# unsloth computes attention sample by sample, because torch 2.11 lacks varlen_attn with enable_gqa. unsloth does not
# compile these layers. Both values were fitted by hand to launch-bound runs of Qwen3-8B and 32B with 1 to 32 samples
# per step on four hosts (results/h100/founding-text, docs/evidence/published.md).
_JOINED_SHARE, _SEGMENT_OPS = 0.55, 36
_RECOMPUTED = 1 / 3  # work of a recomputed forward pass, relative to a layer's forward and backward pass

# Bytes per element of an optimizer moment. None means the dtype of the weights. For each trained parameter, AdamW reads
# and writes two moments and the weight, and reads the gradient. Clipping reads and scales the gradient.
_MOMENT_BYTES = {
    "adamw_torch": None, "adamw_torch_fused": None, "adamw_bnb_8bit": 1.0, "paged_adamw_8bit": 1.0,
    "adamw_torchao_fp32": 4.0, "adamw_torchao_bf16": 2.0, "adamw_torchao_8bit": 1.0,
}  # fmt: skip
_OPTIMIZER_TERM = {"adamw_torch": "optimizer", "adamw_bnb_8bit": "optimizer.8bit", "paged_adamw_8bit": "optimizer.8bit"}


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of an optimizer step by kind.

    The step has `passes` micro-batches. `groups` contains (weight, {kind: amount}) for each group of similar
    micro-batches: the group's share of all micro-batches, and the work of one micro-batch. `update` is the work of the
    optimizer update, once per step. Kinds have different units. `products` and `attention`: FLOPs. `offload`: bytes
    copied between GPU and host. `host`: operations that Python starts. Others: bytes that the GPU reads and writes."""

    groups: tuple[tuple[float, Mapping[str, float]], ...]
    passes: int
    update: Mapping[str, float]


def step_work(spec: Experiment, shape: TrainableShape, batches: Sequence[Batch]) -> StepWork:
    """Return the work of an optimizer step on one GPU."""
    plan = plan_of(spec, shape.model)
    groups = tuple((batch.weight, _micro_step(spec, plan, shape, batch)) for batch in batches)
    return StepWork(groups, spec.train.gradient_accumulation_steps, update(spec, shape))


def _micro_step(spec: Experiment, plan: TrainingPlan, shape: TrainableShape, batch: Batch) -> dict[str, float]:
    """Return the work of one micro-batch in its forward and backward pass."""
    again = {"off": 0.0, "selective": 0.5}.get(plan.checkpointing, 1.0)  # share of recomputed layers
    again += plan.reference != "none"  # the reference needs one more forward pass
    work = _products(spec, plan, shape, batch, again)
    if plan.attention == "eager":  # eager attention multiplies all pairs of positions
        work["products"] += _attention(shape, batch, again, True)
    else:
        name = f"attention.{'masked' if batch.masked else 'causal'}"
        work[name] = _attention(shape, batch, again, batch.masked)
    work = {name: value for name, value in work.items() if value}
    work |= _moved(spec, plan, shape, batch, again)
    if plan.offload:
        saved = 2 * (8 * shape.model.hidden * len(shape.model.layers) + 4 * shape.query_key + 4 * shape.inner)
        work["offload"] = 2 * saved * batch.positions  # the inputs of norms and linear layers
    elif plan.checkpointing == "offload":
        stream = 4 if is_upcast(spec.method, shape.model) else 2
        work["offload.checkpoints"] = 2 * stream * shape.model.hidden * len(shape.model.layers) * batch.positions
    if plan.in_backward == "offload":
        work["offload.states"] = optimizer_state(*kept_by(shape.model, plan))
    if plan.streamed:
        model = shape.model
        work["offload.weights"] = layers = sum(count * matrices(layer, plan) for layer, count in model.kinds)
        work["offload.head"] = fetched_head(model, plan)
        if plan.full:  # layers return to the host after their update; embedding and head are updated over the link
            work["offload.states"] = work.get("offload.states", 0.0) + 2 * layers
            work["offload.head"] += on_host(model, plan) - layers
    if batch.patches and shape.model.vision:
        _add_images(work, spec, plan, shape.model.vision, batch)
    started = operations(plan, shape, batch, again) * sharding_of(spec.launch).micro
    on, equal = spec.optimizations, spec.dataset.length and not spec.dataset.has_many_image_sizes
    started *= _VARYING if plan.compiled and not (on.fixed_shape or on.packing or equal) else 1.0
    work["host"] = work.get("host", 0.0) + (_REPLAYED * started + _OUTSIDE if plan.graphed else started)
    return work


def _add_images(
    work: dict[str, float], spec: Experiment, plan: TrainingPlan, vision: VisionShape, batch: Batch
) -> None:
    """Add the work of image encoder and projector, and the number of pixel values that Python processes in the step.

    With an image cache or loader processes, Python does not process pixels in the step."""
    on, windowed = spec.optimizations, sum(window is not None for window in vision.windows)
    work["images"] = 0.0 if on.image_cache or on.loader_processes else batch.patches * vision.values
    learns = plan.vision != "frozen"
    again = float(plan.checkpointing != "off")
    each = vision_per_patch(vision_matmul(vision, plan), batch.patches / max(batch.tiles, 1e-9), again * learns)
    work["products"] = work.get("products", 0.0) + batch.patches * each
    moved = vision.layers * (_HIDDEN * vision.hidden + _HEADS * 3 * vision.hidden + _INNER * vision.inner)
    passes = 1 + (_BACKWARD + again if learns else 0)
    name = f"elementwise.{plan.kernels}"
    work[name] = work.get(name, 0.0) + batch.patches * moved * passes
    pieces = sum(batch.patches / window for window in vision.windows if window) if windowed else 0.0
    encoder = passes * (_ENCODER_OPS * vision.layers + _WINDOW_OPS * pieces)
    work["host"] = _IMAGE_OPS + _HOST_SHARE[plan.kernels] * encoder


def _products(
    spec: Experiment, plan: TrainingPlan, shape: TrainableShape, batch: Batch, again: float
) -> dict[str, float]:
    """Return the FLOPs of products with 16-bit weights, with 8-bit weights, and with the weights of experts.

    The losses of ftbench and Liger compute the logits once. Other losses compute the logits again in the backward
    pass."""
    matmul, n = shape.matmul, batch.positions
    layers = flops.linear_per_token(matmul) + again * flops.linear_recompute_per_token(matmul)
    pairs, once = plan.loss == "pairs", spec.optimizations.liger or spec.optimizations.chunked_loss
    passes = plan.reference != "none" if pairs else not once
    head = (n if pairs else batch.labels) * (flops.head_per_token(matmul) + passes * 2 * matmul.head)
    experts = n * (4 + 2 * again + 2 * plan.full) * shape.expert_matmul
    fp8 = n * (4 + 2 * again + 2 * plan.full) * (matmul.base - shape.expert_matmul) if plan.fp8 else 0.0
    return {"products": n * layers + head - fp8 - experts, "products.fp8": fp8, "products.experts": experts}


def _moved(spec: Experiment, plan: TrainingPlan, shape: TrainableShape, batch: Batch, again: float) -> dict[str, float]:
    """Return the bytes that the GPU reads and writes, for each kind of work."""
    n, compiled = batch.positions, plan.compiled
    kind = "triton" if plan.triton else plan.kernels
    moved: dict[str, float] = defaultdict(float)
    base, adapters = _elementwise(shape, again)
    adapters *= _FUSED_PASSES[plan.fused]
    moved[f"elementwise.{kind}"] += base * n
    moved[EAGER_EXPERTS if kind == "eager" else f"elementwise.{kind}"] += (
        n * shape.model.summed(expert_bytes) * (1 + _BACKWARD + again)
    )
    moved["elementwise.eager" if kind == "liger" else f"elementwise.{kind}"] += adapters * n
    if is_upcast(spec.method, shape.model):  # the residual stream is float32 too
        moved["elementwise.float32"] += (base + adapters) * n
    if plan.packed_experts:
        moved["dequantise.mxfp4"] += (2 + again) * shape.model.expert_matrices * MXFP4_OUT
    elif plan.quantised:
        moved["dequantise"] += (2 + again) * shape.model.linear_parameters * DEQUANTISED
    if plan.fp8:
        each = n * (shape.linears.inputs * (1 + again) + shape.linears.outputs)
        cast = _CAST if plan.triton else _CAST_COMPILED if compiled else _CAST_EAGER
        cast = _CAST_DELAYED if spec.optimizations.fp8 == DELAYED else cast
        if plan.full:  # weights are cast in each pass, too
            each, cast = each + shape.matmul.base - shape.expert_matmul, cast + _CAST_AGAIN
        moved["casts"] += each * cast
    name, logits = _logits(spec, plan, batch)
    moved[name] += logits * shape.model.vocab
    if plan.attention == "eager":  # the forward and backward pass write, scale, mask and normalize the scores
        scores = batch.square * shape.heads
        moved["elementwise.eager"] += SCORE * scores * (1 + _RECOMPUTED * again)
    if shape.expert_matmul:  # weights of all visited experts are read
        visited = min(1.0, n * shape.expert_matmul / shape.model.parameters["experts"])
        moved["experts"] += visited * shape.model.parameters["experts"] * DTYPE_BYTES[spec.model.dtype] * (2 + again)
    return dict(moved)


def _logits(spec: Experiment, plan: TrainingPlan, batch: Batch) -> tuple[str, float]:
    """Return a kind of work for the loss, and the bytes that the loss moves per micro-batch and vocabulary entry."""
    if plan.loss == "pairs":
        return "logits.chunked", batch.positions * (_PAIR_LOGIT + (plan.reference != "none") * _REFERENCE_LOGIT)
    bytes_ = (_OUR_LOGIT_COMPILED if plan.compiled else _OUR_LOGIT) if spec.optimizations.chunked_loss else _LOGIT
    # trl's loss also computes entropy and accuracy
    return f"logits.{'trl' if plan.loss == 'trl' else 'chunked'}", batch.labels * bytes_


def _attention(shape: TrainableShape, batch: Batch, again: float, whole: bool) -> float:
    """Return the FLOPs of attention. With `whole`, count all query-key pairs. Otherwise count only causal pairs.

    A pair needs `4 * heads * head_dim` FLOPs in the forward pass, and twice as many in the backward pass."""
    if whole:
        return (3 + again) * 4 * batch.square * sum(shape.matmul.attention_width)
    return batch.positions * (3 + again) / 3 * flops.attention_per_token(shape.matmul, batch.square / batch.positions)


def _elementwise(shape: TrainableShape, again: float) -> tuple[float, float]:
    """Return the bytes per token that elementwise operations read and write in a forward and backward pass.

    The first value is for the base model, and the second value is for the adapters."""
    base = _HIDDEN * shape.model.hidden * len(shape.model.layers) + _HEADS * shape.query_key + _INNER * shape.inner
    adapters = _ADAPTER_IN * shape.adapters.inputs + _ADAPTER_OUT * shape.adapters.outputs
    return base * (1 + _BACKWARD + again), adapters * (1 + _ADAPTER_BACKWARD + again)


def expert_bytes(layer: Layer) -> int:
    """Return the bytes per token that a layer's experts read and write in the forward pass, outside matrix products."""
    if (moe := layer.experts) is None:
        return 0
    row = (_BIASED_ROW if moe.biases else _EXPERT_ROW) * layer.hidden
    return moe.active * (row + (_CLAMPED_INNER * moe.inner if moe.clamped else 0))


def operations(plan: TrainingPlan, shape: TrainableShape, batch: Batch, again: float) -> float:
    """Return the number of operations that Python starts for the forward and backward pass of a micro-batch."""
    each = _LAYER_OPS + (_MASK_OPS if batch.masked else 0)
    total = len(shape.model.layers) * each + _ADAPTER_OPS * shape.adapters.count * _FUSED_OPS[plan.fused]
    total += _QUANTISED_OPS * shape.linears.count if plan.quantised and not plan.mxfp4 else 0
    total += _FP8_OPS * shape.linears.count if plan.fp8 and not plan.triton else 0
    total += _EXPERT_OPS * shape.moe_layers
    loops = _LOOP_OPS * shape.model.summed(lambda layer: layer.experts.count if layer.experts else 0)
    share = _EIGHT_BIT_SHARE if plan.triton and plan.fp8 else _HOST_SHARE[plan.kernels]
    layers, offloaded = len(shape.model.layers), 0
    if plan.unsloth and batch.joined:
        total = _JOINED_SHARE * total + _SEGMENT_OPS * batch.joined * layers
    else:
        total *= share
        offloaded = _OFFLOADED_OPS * layers if plan.unsloth and again else 0
    total += loops if plan.looped_experts else 0
    return total * (1 + _RECOMPUTED * again) + offloaded


def update(spec: Experiment, shape: TrainableShape) -> dict[str, float]:
    """Return {kind: bytes that one GPU reads and writes per step} for gradient clipping and the optimizer update."""
    part = share(sharding_of(spec.launch))
    own = plan_of(spec, shape.model)
    masters = part.keeper != "torch" and own.autocast  # FSDP and ZeRO update float32 shards
    weight = own.weight if own.full and not masters else FLOAT  # the adapters as well
    moment = _MOMENT_BYTES.get(spec.train.optimizer, 0.0)
    state = 4 * (weight if moment is None else moment)
    clipped = 3 * weight if spec.train.max_grad_norm else 0
    name = _OPTIMIZER_TERM.get(spec.train.optimizer, "optimizer.fused")
    return {name: shape.trained * part.optimizer * (3 * weight + state + clipped)}
