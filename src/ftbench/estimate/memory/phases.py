"""Compute the bytes of the tensors in each phase of a training step. The largest phase is the memory peak."""

from dataclasses import dataclass

from ftbench.core import pipeline
from ftbench.estimate.memory import ends, layer, share, transient, weights
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.estimate.workload.sharding import SINGLE, Sharding
from ftbench.families.shape import ModelShape

Parts = dict[str, float]
GATHERED = "gathered layers"  # full weights of sharded layers, which exist only while they are used


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """The inputs of the memory formulas for one GPU. With several GPUs, `model` and `batch` are the parts on this GPU.

    `accumulates` means that gradients stay during the next forward pass (gradient accumulation). `workspace` is the
    memory in bytes that libraries hold in torch's allocator. `varies` means that batch shapes vary. Then the allocator
    keeps blocks of many sizes. `records` is described in `Largest`."""

    model: ModelShape
    plan: TrainingPlan
    batch: BatchShape
    accumulates: bool = False
    sharding: Sharding = SINGLE
    workspace: float = 0.0
    varies: bool = False
    records: tuple[int, ...] = ()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients already exist when the backward pass starts."""
        several = self.accumulates or self.sharding.micro > 1
        return several or self.plan.graphed or share.share(self.sharding).holds_gradients


def resident(case: MemoryCase) -> Parts:
    """Return the bytes of tensors that exist in all phases of a step, by name."""
    part = share.share(case.sharding)
    model, plan = case.model, share.kept_as(case.plan, part)
    count, width = weights.trained(model, plan)
    trained = count * width
    buffered = plan.unsloth and not plan.packed_experts
    kept = max(transient.dequantised(each, plan) for each, _ in model.kinds) if buffered else 0
    kept += transient.checkpoint_buffers(model.hidden, plan, case.batch)
    return {
        "weights": weights.weights(model, plan) * part.weights,
        GATHERED: share.gathered(model, plan, part).forward,
        "reference model": weights.weights(model, plan) if plan.reference == "second model" else 0.0,
        "adapters": weights.adapters(model, plan) * part.weights,
        "optimizer state": share.optimizer_state(model, plan, part),
        "gradients": trained * part.gradients if case.keeps_gradients else 0.0,
        # the sum of several passes is copied into DDP's buckets in the last one (Reducer::mark_variable_ready_dense)
        "workspace": case.workspace + kept + trained * (part.buckets and (case.accumulates or case.sharding.micro > 1)),
        "pixels": ends.pixels(model.vision, case.batch) if model.vision else 0.0,
        "messages": _messages(case),
    }


def _messages(case: MemoryCase) -> float:
    """Return the bytes of the receive buffers of a pipeline stage (torch, PipelineStage).

    The buffers hold hidden states from the previous stage and gradients from the next stage, for all micro-batches."""
    sharding, model = case.sharding, case.model
    if sharding.pipeline == 1:
        return 0.0
    ends = (2 * pipeline.parts(sharding.schedule)) - (model.words != 0) - (model.vocab != 0)
    return float(ends * sharding.micro * case.plan.stream * model.hidden * case.batch.tokens)


@dataclass(frozen=True, slots=True)
class _Activations:
    """Bytes of the activations of all layers. The "peak layer" needs the most memory in its backward pass.

    Args:
        kept: Saved activations of all layers.
        marks: Checkpoints, which are the inputs of checkpointed layers.
        there: Saved activations during the backward pass of the peak layer. The last layer is usually the peak layer.
        again: Recomputed activations of the peak layer.
        peak: Temporary tensors of the peak layer in its backward pass.
        forward_peak: Temporary tensors of a layer in the forward pass.
        first: Saved activations during the backward pass of the first layer. `first_mark`, `first_again` and
            `first_peak` are the checkpoints, recomputed activations and temporary tensors at that time.
        away: Activations that are in host memory while the loss is computed."""

    kept: float
    marks: float
    there: float
    again: float
    peak: float
    forward_peak: float
    first: float
    first_mark: float
    first_again: float
    first_peak: float
    away: float


def _activations(case: MemoryCase, plan: TrainingPlan) -> _Activations:
    model, batch = case.model, case.batch
    saved = [layer.saved(each, plan, batch) for each, _ in model.kinds]
    peaks = [[transient.peak(each, plan, batch, backward=True, again=not keep) for each, _ in model.kinds]
             for keep in (False, True)]  # fmt: skip
    frozen = _frozen(model, plan)
    keeps = [False] * frozen + _keeps(plan, len(model.layers))[frozen:]
    mark, shared = transient.checkpoint(model.hidden, plan, batch), 0.0
    if plan.stream == layer.FLOAT:  # the first norm saves a float32 checkpoint as its input, without a copy
        shared = float(plan.stream * model.hidden * batch.tokens)
    marks, away = (len(keeps) - sum(keeps) - frozen) * mark, 0.0
    if plan.checkpointing == "offload":  # the forward pass has two inputs on the GPU: one is copied, and the next one
        marks = min(2, len(keeps)) * mark
    kept = sum(saved[kind] for kind, keep in zip(model.order, keeps, strict=True) if keep)
    if plan.offload:
        stays = sum(layer.saved_twice(each, plan) * count for each, count in model.kinds) * batch.tokens
        away = saved[model.order[-1]] - layer.saved_twice(model.layers[-1], plan) * batch.tokens  # during the loss
        kept, marks = stays + away, 0.0
    if not plan.trains_vision:
        kept -= layer.unsaved(model.layers[frozen], plan, batch)
    there, again, peak, kind_at = kept, 0.0, 0.0, model.order[-1]
    done = 0.0
    for kind, keep in list(zip(model.order, keeps, strict=True))[: frozen - 1 if frozen else None : -1]:
        remade = 0.0 if keep else saved[kind] - shared
        if kept - done + remade + peaks[keep][kind] > there + again + peak:
            there, again, peak, kind_at = kept - done, remade, peaks[keep][kind], kind
        done += saved[kind] if keep and not plan.offload else 0.0
    first, keep = model.order[frozen], keeps[frozen]
    forward = transient.peak(model.kinds[kind_at][0], plan, batch, backward=False)
    if not all(keeps[frozen:]):
        forward = max(forward, *(transient.unkept(each, plan, batch) for each, _ in model.kinds))
    return _Activations(kept, marks, there, again, peak, forward, saved[first] if keep else 0.0, 0.0 if keep else mark,
                        0.0 if keep else saved[first] - shared, peaks[keep][first], away)  # fmt: skip


def checkpoints_on_host(case: MemoryCase) -> float:
    """Return the bytes of checkpoints in host memory."""
    there = case.plan.checkpointing in ("offload", "unsloth")
    return float(len(case.model.layers) * case.plan.stream * case.model.hidden * case.batch.tokens) if there else 0.0


def _frozen(model: ModelShape, plan: TrainingPlan) -> int:
    """Return the number of layers before the first layer with adapters. These layers save nothing.

    With gradient checkpointing, the number is 0. Then all layers save tensors, because the output of the embedding
    requires a gradient (transformers, enable_input_require_grads)."""
    if plan.full or plan.checkpointing != "off" or plan.trains_vision:
        return 0
    adapted = (index for index, each in enumerate(model.layers) if plan.adapted(each))
    return next(adapted, 0)


def _keeps(plan: TrainingPlan, layers: int) -> list[bool]:
    """Return one bool per layer: True if the layer saves its activations (every second layer with `selective`)."""
    if plan.checkpointing == "selective":
        return [index % 2 == 1 for index in range(layers)]
    return [plan.checkpointing == "off" or plan.offload] * layers


def phases(case: MemoryCase) -> dict[str, Parts]:
    """Return the bytes of each phase by part: {phase: {part: bytes}}. All parts of a phase exist at the same time."""
    part = share.share(case.sharding)
    kept, plan = share.kept_as(case.plan, part), share.computed_as(case.plan, part)
    base, acts, model, batch = resident(case), _activations(case, plan), case.model, case.batch
    cast = autocast_weights(model, plan) if part.keeper == "torch" else 0.0
    stream = 2 * plan.stream * model.hidden * batch.tokens if acts.kept else 0
    count, width = weights.trained(model, kept)
    grads = count * width * part.gradients
    top = ends.head_gradient(model, plan, batch) / (2 if plan.loss == "chunked" else 3)
    held = {"activations": acts.there, "checkpoints": acts.marks, "cast weights": cast}
    tail = ends.tail(model, plan, batch)
    final = max(ends.transient_peak(model, plan, batch), ends.final_norm_peak(model, plan, batch))
    first = {"activations": acts.first, "checkpoints": acts.first_mark, "cast weights": cast}
    grown = {} if case.keeps_gradients else {"gradients": grads * _grown(model, plan)}
    twice = ends.tied_gradients(model, plan) * part.gradients
    if plan.full and part.gathered and part.keeper == "deepspeed":  # the embedding's gradient before it is sharded
        twice += plan.compute * model.parameters["embedding"]
    made = top if part.holds_gradients or not case.keeps_gradients else 0.0
    away = {"checkpoints": 0.0} if plan.checkpointing == "offload" else {}  # between the two passes
    gradients = {"gradients": base["gradients"] + made}
    gradients |= {"checkpoints": acts.marks + acts.first_mark} if away else {}  # three inputs (kernels/host_offload.py)
    left, step = share.update(model, kept, part)
    shown, encoded, read, remade = _of_images(case)
    whole = share.gathered(model, kept, part)
    tensor = case.sharding.tensor > 1  # tensor parallelism reads full matrices before it splits them
    back, end = base | {GATHERED: whole.backward}, base | {GATHERED: whole.end}
    head = {"head": weights.fetched_head(model, kept)}
    held, first = held | {"images": encoded}, first | {"images": encoded}
    named = {
        "load": {
            "weights": weights.loading(model, kept) * (1.0 if tensor else part.weights),
            "reference model": base["reference model"],
        },
        "forward, images": base | {"images": encoded, "one layer": read},
        "forward": base | held | head | {"images": encoded + shown, "one layer": acts.forward_peak + stream},
        "loss": base | held | away | head | {
            GATHERED: whole.loss, "activations": acts.kept - acts.away, "hidden states": tail, "logits": final,
        },
        "backward, last layer": back | held | gradients | {"one layer": acts.again + acts.peak},
        "backward, first layer": end | first | grown | {"one layer": acts.first_again + acts.first_peak},
        "backward, images": back | grown | {"images": encoded, "one layer": remade},
        "backward, embedding": end | {"gradients": grads, "cast weights": cast, "tied gradients": twice},
        "optimizer step": base | {GATHERED: 0.0, "gradients": left, "one step": step},
    }  # fmt: skip
    waiting = (acts.kept + acts.marks + tail * (model.vocab != 0)) * case.sharding.waiting
    for phase in ("forward", "loss", "backward, last layer"):
        named[phase] = named[phase] | {"other micro-batches": waiting}
    return _stepped_in_backward(case, named, held | away | {"hidden states": tail}) if plan.in_backward else named


def _stepped_in_backward(case: MemoryCase, named: dict[str, Parts], held: Parts) -> dict[str, Parts]:
    """Return the phases with `optimizer_in_backward`, which updates each parameter when its gradient is complete.

    Only one matrix at a time has a gradient. If head and embedding share a weight, the gradient of this weight stays
    until the end of the backward pass. `offload` keeps optimizer states in host memory. The GPU then holds the states
    of four matrices at a time (kernels/host_states.py)."""
    model, plan = case.model, case.plan
    matrix, words = (max((each.inputs * each.outputs for layer, _ in model.kinds for each in layer.linears), default=0),
                     model.vocab * model.hidden) if plan.full else (0, 0)  # fmt: skip
    name, count, width, _ = weights.kept_by(model, plan)
    away = {"optimizer state": 0.0} if plan.in_backward == "offload" else {}

    def stepped(parameters: float, gradients: float, embedding: float = 0) -> Parts:
        moved = weights.optimizer_state(name, min(parameters, count), width, embedding) if away else 0.0
        return {"gradients": gradients * plan.weight, "states being copied": moved}

    waiting = words if model.tied else 0
    base = resident(case)
    named["backward, head"] = base | held | stepped(0 if model.tied else words, words)
    for phase in ("backward, last layer", "backward, first layer", "backward, images"):
        named[phase] = named[phase] | stepped(4 * matrix, waiting + matrix)
    named["backward, embedding"] = named["backward, embedding"] | stepped(words, words, words)
    named["optimizer step"] = base | {"one step": 0.0}
    return {phase: parts | away for phase, parts in named.items()}


def _of_images(case: MemoryCase) -> tuple[float, float, float, float]:
    """Return the bytes of four groups of image tensors.

    1: tensors that exist until the forward pass ends. 2: tensors that are saved for the backward pass. 3: temporary
    tensors of the encoder's forward pass. 4: tensors that a checkpointed layer recomputes in the backward pass."""
    vision, batch, plan = case.model.vision, case.batch, case.plan
    if vision is None or not batch.images.patches:
        return 0.0, 0.0, 0.0, 0.0
    saved = ends.encoder_saved(vision, plan, batch)
    if plan.checkpointing != "off":  # add the embeddings before image features are inserted
        saved += plan.stream * case.model.hidden * batch.tokens
    remade = ends.encoder_remade(vision, plan, batch)
    return ends.images_shown(case.model, plan, batch), saved, ends.encoder_moment(vision, plan, batch), remade


def _grown(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the share of all gradients that exist when the backward pass of the first layer starts.

    At this time, the gradients of the embedding and of most matrices in the first layer do not exist yet."""
    if not plan.full:
        return 1.0
    first = sum(model.layers[0].parameters.values())
    return 1 - (first * 2 / 3 + (0 if model.tied else model.parameters["embedding"])) / model.total


def autocast_weights(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of autocast's copies of trained float32 weights, without the head (see `transient_peak`)."""
    copied = plan.autocast and plan.full and plan.weight > plan.compute
    others = sum(model.parameters[part] for part in ("embedding", "norm", "head"))
    return float(copied * (model.total - others) * plan.compute)


def peak(phases: dict[str, Parts]) -> tuple[str, float]:
    """Return the name of the phase that needs the most memory, and its bytes."""
    return max(((name, sum(parts.values())) for name, parts in phases.items()), key=lambda pair: pair[1])
