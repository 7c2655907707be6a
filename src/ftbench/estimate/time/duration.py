"""How long a spec trains on a GPU, what it draws, and how sure that is: from runs of the same step, else scaled from
runs near it, else from the ceilings."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import Gpu, capability_of
from ftbench.estimate.memory.estimate import Band, estimate_memory
from ftbench.estimate.memory.share import kept_as, share
from ftbench.estimate.memory.weights import optimizer_step
from ftbench.estimate.time import speeds
from ftbench.estimate.time.ceilings import Ceilings, limits_of
from ftbench.estimate.time.communication import COMMUNICATION, OFFLOADED, exposed_seconds, offloaded_seconds, traffic
from ftbench.estimate.time.history import TimedRun, settings_of
from ftbench.estimate.time.neighbor_correction import Correction, correction
from ftbench.estimate.time.run_index import Store
from ftbench.estimate.workload.batches import batches_of, per_step
from ftbench.estimate.workload.division import division_of, rank_batch
from ftbench.estimate.workload.lengths import Lengths
from ftbench.estimate.workload.method import recipe_of
from ftbench.estimate.workload.model import check_modelled, is_rough
from ftbench.estimate.workload.trainable import TrainableShape
from ftbench.spec.experiment import Experiment, resolve

MEASURED, SCALED, OTHER, SHEET = "measured", "scaled", "other settings", "data sheet"
# How far the truth may lie from the expectation, as a factor. Measured: what repeats differ by on one machine. The
# others hold nine tenths of the rows of `ftbench estimate --calibrate` or more.
SPREAD = {MEASURED: 1.05, SCALED: 1.25, OTHER: 1.5, SHEET: 2.0}
HOST_SPREAD = 1.1  # on top, where Python sets the pace: processors differ more than GPUs
ROUGH_SPREAD = 2.0  # on top, for what `is_rough` and was not measured, and for links between machines
SEVERAL_SPREAD = 1.2  # on top, for several GPUs: what they wait for each other was not measured
# On top of that under DeepSpeed, whose work on the host and passes over its own partitions are not counted: a step of
# ZeRO-3 took half as long again as estimated (results/h200/several-gpus). Its weights came one at a time, beside
# nothing, so that its GPUs waited for Python in a fifth of it; no run of today's way says how much of that is left.
ZERO_SPREAD = 1.5
# Bytes a second at which a full pool is given back and asked for again for the optimizer's temporary tensors: 16.4 GB
# made its step 38 ms longer (results/h200/qwen3-8b-frontier, full at batch 6 against 4, two flushes a step).
_REMAPPED = 4.3e11
FLUSHES = "flushes"  # the name of the term
EXPERTS_SPREAD = 1.5  # on top, for a step of a mixture of experts that was not measured


@dataclass(frozen=True, slots=True)
class DurationEstimate:
    """Seconds of an optimizer step of `samples` samples and `tokens` real ones, over all `gpus`; `padding` is the share
    of computed positions that are none. `start_s` until the first steady step, `watts` of one GPU. `parts` are the
    step's terms alone on the device, seconds, `exposed_s` of them waiting for other GPUs; `generation_s` of the step
    the model makes what it learns from; `bound` is the GPU, or where
    the GPU waits for Python the host, or images that it processes. `basis` is one of MEASURED, SCALED, OTHER, SHEET
    and `confidence` says it in words."""

    step_s: Band
    samples: float
    tokens: float
    padding: float
    start_s: float
    watts: Band
    watts_source: str
    bound: str
    basis: str
    confidence: str
    lengths: str
    upper_bound: bool
    parts: dict[str, float] = field(default_factory=dict)
    gpus: int = 1
    exposed_s: float = 0.0
    generation_s: float = 0.0

    def seconds_for(self, samples: float) -> Band:
        """Return wall seconds for so many samples, the start included."""
        steps, step = samples / self.samples, self.step_s
        return Band(*(self.start_s + steps * each for each in (step.low, step.expected, step.high)))

    def samples_in(self, seconds: float) -> Band:
        """Return the samples trained within so many seconds, the start included; low comes from the slow end."""
        left, step = self.samples * max(0.0, seconds - self.start_s), self.step_s
        return Band(left / step.high, left / step.expected, left / step.low)

    @property
    def tokens_per_s(self) -> float:
        """Real ones."""
        return self.tokens / self.step_s.expected

    @property
    def mean_tokens(self) -> float:
        """The mean length of a sample."""
        return self.tokens / self.samples

    @property
    def samples_per_hour(self) -> float:
        return 3600 * self.tokens_per_s / self.mean_tokens

    def joules_for(self, samples: float) -> Band:
        """Return the joules of the GPUs, for the steps alone."""
        steps, step, watts = self.gpus * samples / self.samples, self.step_s, self.watts
        return Band(
            steps * step.low * watts.low, steps * step.expected * watts.expected, steps * step.high * watts.high
        )


def estimate_duration(
    spec: Experiment,
    gpu: Gpu,
    store: Store | None = None,
    *,
    config: dict[str, Any] | None = None,
    coefficients: dict[str, float] | None = None,
) -> DurationEstimate:
    """Return the estimate; `config` is the model's config.json where facts do not know it. Raise SpecError for a model
    whose shape is not known, and for products in a precision of which no rate is known."""
    store = store or Store()
    spec = resolve(spec, capability_of(gpu))
    check_modelled(spec)
    lengths, division = store.lengths(spec, config), division_of(spec.launch)
    batches = [rank_batch(batch, division) for batch in batches_of(spec, lengths)]
    shape, work = store.work(spec, batches, config)
    limits = limits_of(gpu, spec.train.precision, spec.optimizations.fp8 != "off", store.path)
    learned = coefficients or speeds.values(speeds.shipped())
    modelled = speeds.step(speeds.ideal(work, limits), learned)
    ranks = division.data * division.sequence  # that compute different positions
    samples, positions, real = (ranks * per_step(spec, batches, name) for name in ("samples", "positions", "real"))
    sent = traffic(spec, shape, batches)
    exposed = exposed_seconds(sent, division, limits, modelled.device, learned["elementwise.eager"])
    same = store.same(spec, gpu)
    unlike = shape.model.has_experts and not same  # of a mixture of experts runs of other steps tell little
    near = None if same or unlike else correction(spec, modelled, store.neighbours(gpu, learned))
    seconds, basis, confidence = _judged(spec, gpu, same, near, real, modelled.seconds, limits, unlike)
    offloaded = offloaded_seconds(sent, limits)
    flushes = 0.0 if same else _flushes(spec, gpu, shape, config)
    if basis != MEASURED:
        seconds += exposed + offloaded + flushes
        confidence += _links(spec)
        confidence += "; its memory is full, so the allocator flushes its cache" if flushes else ""
    if left_out := store.contended[gpu.name]:
        confidence += f"; {units.some(left_out, 'run')} beside other work on the machine left out"
    if outdated := 0 if same else store.outdated(spec, gpu):
        confidence += f"; {units.some(outdated, 'run')} of this step left out: weights came in another way than today's"
    spread = _spread(spec, basis, modelled.host_bound, unlike)
    waits = {COMMUNICATION: exposed, OFFLOADED: offloaded, FLUSHES: flushes}
    watts, source = _watts(spec, gpu, same, store.on(gpu), modelled, offloaded)
    own = modelled.host_bound and modelled.seconds > exposed + offloaded  # else the GPU waits for others the longest
    bound = ("images" if modelled.by_images else "host") if own else "GPU"
    return DurationEstimate(
        Band(seconds / spread, seconds, seconds * spread), samples, real, 1 - real / positions,
        _start(spec, shape, same), watts, source, bound, basis, confidence,
        *_lengths(spec, lengths),
        dict(modelled.parts) | {name: value for name, value in waits.items() if value},
        division.gpus, exposed, seconds * modelled.generation / modelled.seconds,
    )  # fmt: skip


def _spread(spec: Experiment, basis: str, host_bound: bool, unlike: bool) -> float:
    """Return how far the truth may lie from the expectation, as a factor."""
    if basis == MEASURED:
        return SPREAD[basis]
    spread, division = SPREAD[basis], division_of(spec.launch)
    spread *= (HOST_SPREAD if host_bound else 1.0) * (EXPERTS_SPREAD if unlike else 1.0)
    spread *= ROUGH_SPREAD if is_rough(spec) or spec.launch.nodes > 1 else 1.0
    spread *= SEVERAL_SPREAD if division.gpus > 1 else 1.0
    return spread * (ZERO_SPREAD if division.states.startswith("zero") else 1.0)


def _links(spec: Experiment) -> str:
    """Return in words what the links between GPUs are taken for."""
    gpus, nodes = spec.launch.gpus, spec.launch.nodes
    between = f", those between {nodes} machines taken for as fast as those within one" if nodes > 1 else ""
    return f"; what {gpus} GPUs wait for from their links{between}" if gpus > 1 else ""


def _lengths(spec: Experiment, lengths: Lengths) -> tuple[str, bool]:
    """Return where lengths come from, and whether they are bounds: completions may end before they are as long as they
    may get."""
    objective: Any = spec.objective
    if not objective.prompts:
        return lengths.source, lengths.upper_bound
    each = units.some(objective.max_completion_length, "token")
    if objective.fixed_length:
        return f"prompts {lengths.source}; completions of {each}", lengths.upper_bound
    return f"prompts {lengths.source}; completions taken as long as they may get, {each}", True


def _flushes(spec: Experiment, gpu: Gpu, shape: TrainableShape, config: dict[str, Any] | None) -> float:
    """Return the seconds of a step in which the allocator gives back what it holds, where a GPU has less memory than a
    process would hold: each step the optimizer's temporary tensors take the place of activations, and go again."""
    if spec.method.name != "full":
        return 0.0
    part = share(division_of(spec.launch))
    kept = kept_as(recipe_of(spec, shape.model), part)
    temporary = optimizer_step(kept.optimizer, shape.trained * part.optimizer, kept.weight)
    if not temporary:
        return 0.0
    memory = estimate_memory(spec, gpu, config=config)
    return temporary / _REMAPPED if memory.device.expected > memory.usable else 0.0


def _judged(spec: Experiment, gpu: Gpu, same: Sequence[TimedRun], near: Correction | None, tokens: float,
            modelled: float, limits: Ceilings, unlike: bool) -> tuple[float, str, str]:  # fmt: skip
    """Return the seconds, basis, and confidence in words."""
    if same:
        seconds = statistics.median(run.step_s / run.tokens for run in same) * tokens
        return seconds, MEASURED, f"measured (same step, same GPU, {units.some(len(same), 'run')})"
    if near is not None and near.alike:
        how = f"scaled from {units.some(near.alike, 'run')} of this method and these optimizations on this GPU"
        return modelled * near.factor, SCALED, how
    if near is not None:
        return (
            modelled * near.factor,
            OTHER,
            f"scaled from {units.some(near.runs, 'run')} with other settings on this GPU",
        )
    learned = speeds.document()["gpus"]
    if spec.objective.prompts:
        never = f"no run of objective {spec.objective.name} was measured on this GPU"
        return modelled, SHEET, f"{limits.source} alone: {never}"
    if unlike:
        return modelled, SHEET, f"{limits.source} alone: runs of other steps tell little of a mixture of experts"
    if gpu.name in learned:
        return modelled, OTHER, f"{limits.source} and ftbench's own runs on it; no run of yours there"
    theirs = f"how near runs on {', '.join(learned)} came to theirs"
    return modelled, SHEET, f"{limits.source}, and {theirs}; no run on this GPU is known"


# Seconds until the first steady step: imports, weights at 1.5 GB/s from a disk, the first step's kernels; compiled and
# unsloth's first steps took 8 to 12 s in results/h200.
_IMPORT_S, _LOAD_BYTES_S, _FIRST_S, _FIRST_COMPILED_S = 10.0, 1.5e9, 3.0, 12.0


def _start(spec: Experiment, shape: TrainableShape, same: Sequence[TimedRun]) -> float:
    measured = [run.start_s for run in same if run.start_s is not None]
    if measured:
        return statistics.median(measured)
    compiled = spec.method.name == "unsloth" or bool(spec.optimizations.compile)
    return _IMPORT_S + 2 * shape.model.total / _LOAD_BYTES_S + (_FIRST_COMPILED_S if compiled else _FIRST_S)


# Share of the board power that is drawn while the GPU waits, and the further share while it works without a pause:
# H200 runs of results/h200 drew 0.33 to 0.42 where Python set the pace and 0.93 to 0.99 where the GPU did.
_WAITING, _WORKING, _BUSY = 0.2, 0.77, 0.6
_WATTS_SPREAD, _WATTS_MEASURED, _WATTS_SCALED = 1.3, 1.05, 1.2


def _watts(spec: Experiment, gpu: Gpu, same: Sequence[TimedRun], runs: Sequence[TimedRun], step: speeds.Step,
           offloaded: float) -> tuple[Band, str]:  # fmt: skip
    """Return the mean watts of steady steps, at most the board's, and their source. `runs` are those on such a GPU,
    `offloaded` the seconds of a step in which it waits for its host."""
    if measured := [run.watts for run in same if run.watts]:
        return _watts_band(statistics.median(measured), _WATTS_MEASURED, gpu), "measured"
    own = settings_of(spec) if runs and not offloaded else None
    alike = [run.watts for run in runs if run.watts and run.settings == own
             and (run.watts > _BUSY * gpu.watts) != step.host_bound]  # fmt: skip
    if alike:
        return _watts_band(statistics.median(alike), _WATTS_SCALED, gpu), "from runs like it"
    share = _WAITING + _WORKING * min(1.0, step.device / (step.seconds + offloaded))
    basis = f"{units.percent(share, 0)} of the board's {gpu.watts:.0f} W"
    return _watts_band(gpu.watts * share, _WATTS_SPREAD, gpu), basis


def _watts_band(expected: float, spread: float, gpu: Gpu) -> Band:
    expected = min(expected, gpu.watts)
    return Band(expected / spread, expected, min(expected * spread, gpu.watts))


def epochs_samples(spec: Experiment, a_step: float) -> float | None:
    """Return the samples that a spec trains on, of which an optimizer step has `a_step` (in packed rows more than the
    batch size says); None where the size of its data set is not known."""
    if spec.train.max_steps is not None:
        return spec.train.max_steps * a_step
    samples = spec.dataset.samples
    return None if samples is None else samples * spec.objective.group * spec.train.epochs
