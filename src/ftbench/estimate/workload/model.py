"""Find the shape of a spec's model in the shipped facts or a local config.json, and count the trained parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from ftbench.core.flops import MatmulShape, VisionMatmulShape
from ftbench.errors import SpecError
from ftbench.estimate.workload.plan import TrainingPlan, targets
from ftbench.estimate.workload.sharding import Sharding, rank_model, sharding_of
from ftbench.facts import architecture, architectures
from ftbench.families import UnknownFamilyError, describe
from ftbench.families.shape import Layer, ModelShape
from ftbench.families.vision import VisionShape
from ftbench.spec.base import nearest
from ftbench.spec.experiment import Experiment, Model
from ftbench.spec.methods import Unsloth
from ftbench.spec.reading import read_config


def check_modelled(spec: Experiment) -> None:
    """Raise SpecError if a spec has no formula for memory and time. The message suggests settings or a short run.

    Formulas are missing for objectives with prompts (grpo), for methods that users add, for `launch.settings: best` of
    other frameworks, and for some settings of unsloth."""
    method, on, measure = spec.method, spec.optimizations, "train a few steps with --set train.max_steps=5"
    if spec.objective.prompts:
        raise SpecError(f"objective {spec.objective.name} has no formula for memory and time: {measure}")
    if spec.launch.settings == "best":
        raise SpecError(
            f"launch.settings best of {spec.launch.framework} has no formula: estimate with "
            f"--set launch.settings=plain, or {measure}"
        )
    if not method.adapters and method.name != "full":
        raise SpecError(f"method {method.name} has no formula for memory and time: {measure}")
    if not isinstance(method, Unsloth):
        return
    if shape_of(spec.model).vision:
        same = "qlora" if method.load_in_4bit else "lora"
        raise SpecError(f"unsloth with images was never measured: estimate with --set method={same}, or {measure}")
    unmeasured = {
        "method.block_compile=on": not method.block_compile,
        "method.cuda_graphs=off": method.cuda_graphs, "method.compile_maximum=off": method.compile_maximum,
        "optimizations.packing=off": on.packing and method.load_in_4bit,
    }  # fmt: skip
    if changes := [f"--set {change}" for change, given in unmeasured.items() if given]:
        raise SpecError(f"these unsloth settings were never measured: estimate with {' '.join(changes)}, or {measure}")


def is_rough(spec: Experiment) -> bool:
    """Return whether estimates of a spec have large errors: unsloth with packing, and frameworks other than trl.

    On a large model, unsloth with packing took 14 % more memory than without packing, and more than twice the time.
    Compared with trl, other frameworks took 17 % more memory with LoRA, and 19 % less with QLoRA. The runs are in
    results/h200 (headline-first/short-equal and frameworks)."""
    packed = isinstance(spec.method, Unsloth) and spec.optimizations.packing
    return packed or spec.launch.framework != "trl"


def shape_of(model: Model) -> ModelShape:
    """Return the shape of a model from `model.path` or the shipped facts.

    Raise SpecError if the model is unknown, or if its config.json is invalid."""
    if not model.path and architecture(model.id):
        return _known(model.id)
    if not model.path:
        folder = f" (write a folder as `model: {{path: {model.id}}}`)" if model.id.startswith((".", "/", "~")) else ""
        meant = "" if folder else nearest(model.id, architectures())
        raise SpecError(
            f"the shape of {model.id} is not known{folder}: set model.path to a folder with its config.json, or "
            f"use a model of `ftbench list models`{meant}"
        )
    try:
        return describe(read_config(Path(model.path)))
    except UnknownFamilyError as error:
        raise SpecError(
            f"model {model.id}: {error}; measure it with `ftbench run SPEC --set train.max_steps=5`"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        reason = f"config.json: {error} is missing" if isinstance(error, KeyError) else str(error)
        raise SpecError(f"model {model.id}: {reason}: correct it, or use the published file") from None


@cache
def _known(name: str) -> ModelShape:
    return describe(architecture(name))


@dataclass(frozen=True, slots=True)
class Linears:
    """Totals of the linear layers that one token uses: their number, and the sums of input and output widths."""

    count: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class TrainableShape:
    """The shape of a model and of the parameters that a method trains.

    `linears` counts all linear layers, and `adapters` the linear layers with adapters. `trained` is the number of
    trained parameters. `expert_matmul` is the number of expert parameters that one token uses. Three fields are sums
    over all layers: `inner` (widths of the MLP and of the active experts), `heads` (attention heads), and `query_key`
    (widths of queries and keys). `moe_layers` is the number of layers with experts."""

    model: ModelShape
    matmul: MatmulShape
    linears: Linears
    adapters: Linears
    trained: int
    expert_matmul: int
    inner: int
    heads: int
    query_key: int
    moe_layers: int


def trainable_shape(spec: Experiment) -> TrainableShape:
    """Return the shape of the model part on one GPU, with the numbers of trained parameters.

    `worker/measure/effective_config.py` counts the same numbers on the live model, and a test compares the results.
    Raise SpecError if the shape of the model is unknown."""
    method, sharding = spec.method, sharding_of(spec.launch)
    model = rank_model(shape_of(spec.model), sharding)
    return _trainable(model, targets(method, model), getattr(method, "rank", 0), sharding)


@lru_cache(maxsize=256)
def _trainable(model: ModelShape, names: frozenset[str], rank: int, sharding: Sharding) -> TrainableShape:
    """Return the trainable shape. `names` are the layers with adapters. `rank` 0 means that all weights are trained."""
    full = not rank
    reached = _summed(model, lambda layer: _adapted(layer, names))
    experts = model.summed(
        lambda layer: layer.expert_matrices * layer.experts.active // layer.experts.count if layer.experts else 0
    )
    experts //= sharding.experts
    others = model.summed(lambda layer: layer.parameters["router"] - layer.router_biases)
    base, head = model.linear_parameters + experts + others, model.vocab * model.hidden // model.head_parts
    return TrainableShape(
        model=model,
        matmul=MatmulShape(base, base if full else 0, head, head if full else 0,
                           rank * (reached.inputs + reached.outputs),
                           tuple(layer.query for layer in model.layers),
                           tuple(layer.window for layer in model.layers)),
        linears=_summed(model, _used),
        adapters=reached,
        trained=model.total if full else adapter_parameters(model, names, rank),
        expert_matmul=experts,
        inner=model.summed(lambda each: each.inner + (each.experts.active * each.experts.inner if each.experts else 0)),
        heads=model.summed(lambda layer: layer.heads),
        query_key=model.summed(lambda layer: layer.query + layer.key),
        moe_layers=model.summed(lambda layer: layer.experts is not None),
    )  # fmt: skip


@lru_cache(256)  # each estimate needs it about ten times
def adapter_parameters(model: ModelShape, names: frozenset[str], rank: int) -> int:
    """Return the number of LoRA parameters: `rank * (inputs + outputs)` for each targeted matrix (Hu et al. 2021).

    Each expert has two targeted matrices: gate and up as one matrix, and down."""
    return rank * model.summed(
        lambda layer: (
            sum(linear.inputs + linear.outputs for linear in layer.reached(names))
            + (layer.experts.count * expert_adapter(layer) if layer.experts and "experts" in names else 0)
        )
    )


def expert_adapter(layer: Layer) -> int:
    """Return an expert's LoRA parameters per rank: `inputs + outputs` of its two matrices (gate with up, and down)."""
    assert layer.experts is not None
    return (layer.hidden + 2 * layer.experts.inner) + (layer.experts.inner + layer.hidden)


def _used(layer: Layer) -> list[tuple[int, int]]:
    """Return (input size, output size) of each matrix that a token uses. Active experts count as one wide MLP."""
    inner = layer.experts.inner * layer.experts.active if layer.experts else 0
    gated = [(layer.hidden, inner), (layer.hidden, inner), (inner, layer.hidden)] if inner else []
    return [(linear.inputs, linear.outputs) for linear in layer.linears] + gated


def _adapted(layer: Layer, names: frozenset[str]) -> list[tuple[int, int]]:
    reached = [(linear.inputs, linear.outputs) for linear in layer.reached(names)]
    if layer.experts is None or "experts" not in names:
        return reached
    h, i, active = layer.hidden, layer.experts.inner, layer.experts.active
    return reached + [(h, 2 * i), (i, h)] * active


def _summed(model: ModelShape, matrices: Callable[[Layer], list[tuple[int, int]]]) -> Linears:
    """Return totals over all layers. `matrices` returns (input size, output size) of each matrix of one layer."""
    counted = [(count, matrices(layer)) for layer, count in model.kinds]
    inputs, outputs = (sum(count * sum(pair[side] for pair in pairs) for count, pairs in counted) for side in (0, 1))
    return Linears(sum(count * len(pairs) for count, pairs in counted), inputs, outputs)


def vision_adapter_parameters(vision: VisionShape, plan: TrainingPlan) -> int:
    """Return the number of adapter parameters in encoder and projector: `rank * (inputs + outputs)` per matrix."""
    encoder = vision.layers * _sides(vision.matrices) if plan.vision == "lora" else 0
    return plan.rank * (encoder + (_sides(vision.merging) if plan.projector == "lora" else 0))


def trained_vision(vision: VisionShape, plan: TrainingPlan) -> int:
    """Return the number of parameters in image encoder and projector that are trained without adapters."""
    encoder = vision.encoder if plan.vision == "full" else 0
    return encoder + (vision.projector if plan.projector == "full" else 0)


def vision_matmul(vision: VisionShape, plan: TrainingPlan) -> VisionMatmulShape:
    """Return the matrix sizes for the FLOPs of an image patch. The worker counts the same sizes on the live model."""
    share, layers = 1 / vision.merge**2, vision.layers
    encoder = vision.values * vision.hidden + layers * _weights(vision.matrices)
    projector = _weights(vision.merging) * share
    ranks = [plan.rank * _sides(matrices) for matrices in (vision.matrices, vision.merging)]
    return VisionMatmulShape(
        encoder, encoder if plan.vision == "full" else 0, layers * ranks[0] if plan.vision == "lora" else 0,
        projector, projector if plan.projector == "full" else 0,
        ranks[1] * share if plan.projector == "lora" else 0, vision.hidden, vision.windows,
    )  # fmt: skip


def _weights(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def _sides(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(inputs + outputs for inputs, outputs in matrices)
