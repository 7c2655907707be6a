"""Estimate the training time and the power of a spec on a GPU.

With earlier runs of the same step, the estimate uses their time. Otherwise, formulas and the GPU's highest rates give
the time."""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ftbench.core import units
from ftbench.core.hardware import Gpu, capability_of
from ftbench.errors import SpecError
from ftbench.estimate.memory.estimate import Band, estimate_memory
from ftbench.estimate.memory.share import kept_as, share
from ftbench.estimate.memory.weights import optimizer_step
from ftbench.estimate.time.communication import (
    BUBBLE,
    COMMUNICATION,
    OFFLOADED,
    exposed_seconds,
    offloaded_seconds,
    traffic,
)
from ftbench.estimate.time.history import RunHistory, TimedRun, step_key
from ftbench.estimate.time.rates import OVERLAP, Ceilings, Step, ideal, limits_of, step
from ftbench.estimate.workload.batches import batches_of, concatenates, per_step
from ftbench.estimate.workload.model import TrainableShape, check_modelled, is_rough
from ftbench.estimate.workload.plan import plan_of
from ftbench.estimate.workload.sharding import rank_batch, sharding_of
from ftbench.facts import read_facts
from ftbench.spec.experiment import Experiment, resolve

MEASURED, FORMULA, SHEET = "measured", "formula", "data sheet"  # FORMULA: formulas that were fitted to runs on this GPU
# Factors between the expected time and the ends of its 90 % range. For a GPU with runs, the factor is `spread` in
# facts/durations.yaml. MEASURED_SPREAD comes from repeats on one machine. For other GPUs, `spread` is multiplied by
# SHEET_SPREAD, which comes from the rows of other cards in docs/evidence/published.md.
MEASURED_SPREAD, SHEET_SPREAD = 1.05, 1.2
LEAST_HOST_RUNS = 3  # launch-bound runs that show how fast the host is
ALIKE = 0.8  # least share of these runs that agree, if all of them ran on one host
ROUGH_SPREAD = 2.0  # additional factor for specs that are known only roughly, and for several machines
JOINED_SPREAD = 1.25  # additional factor for padding-free batches of unsloth (eight scripts, see published.md)
# Additional factor for more than two GPUs, which were not measured. On two H200, 13 predictions with ddp, fsdp and pp
# were wrong by at most 9 % (docs/evidence/several-gpus.md).
SEVERAL_SPREAD = 1.15
IMAGES_SPREAD = 4.0  # the same four images took 0.06 and 0.25 s on two machines
ZERO_SPREAD = 1.25  # additional factor for DeepSpeed: two runs of ZeRO-3 were used to write its formulas
EXPERTS_SPREAD = 1.2  # additional factor for a mixture of experts, if this step was not measured
# Bytes per second at which the allocator frees its pool and allocates it again. This happens if the memory is too full
# for the optimizer's temporary tensors. With 16.4 GB, a step took 38 ms longer (results/h200/qwen3-8b-frontier, method
# full, batch 6 compared with 4, two flushes per step).
_REMAPPED = 4.3e11
FLUSHES = "flushes"  # the name of the term
# Seconds for imports, and bytes per second at which weights are read from disk.
_IMPORT_S, _LOAD_BYTES_S = 10.0, 1.5e9
# Additional seconds of the first step: the medians of results/h200 for eager and compiled layers, and for unsloth
# seconds per layer. unsloth took 11.5 s with 36 layers there, and 18 and 27 s with 64 layers on an H100. unsloth
# compiles the layers of gpt-oss: in five runs on an H100, all slow steps took 39 to 114 s longer (median 59 s).
_FIRST_S, _FIRST_COMPILED_S, _FIRST_UNSLOTH_S, _FIRST_OSS_S = 1.0, 12.0, 0.32, 60.0
# The first value is the share of the board power that a waiting GPU draws. The second is what computing adds. In
# results/h200, launch-bound runs drew 0.33 to 0.42 of the board power, and runs with a busy GPU 0.93 to 0.99.
_WAITING, _WORKING = 0.2, 0.77
_WATTS_SPREAD, _WATTS_MEASURED = 1.3, 1.05


@dataclass(frozen=True, slots=True)
class DurationEstimate:
    """The estimated time of an optimizer step over all `gpus`.

    A step has `samples` samples and `tokens` real tokens. `padding` is the share of padding in all tokens. `start_s` is
    the time to import, load and compile, and `first_s` its part in the first step, both in seconds. `watts`
    is the power of one GPU. `parts` are the seconds of each kind of work. `exposed_s` are the seconds per step in which
    a GPU waits for other GPUs. `bound` is the bottleneck: `GPU`, `host` (Python) or `images` (image processing).
    `host_runs` is the number of earlier runs that give the speed of the host.
    `basis` is MEASURED, FORMULA or SHEET, and `confidence` explains the basis."""

    step_s: Band
    samples: float
    tokens: float
    padding: float
    start_s: Band
    first_s: float
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
    host_runs: int = 0

    def seconds_for(self, samples: float) -> Band:
        """Return the wall time of a run in seconds. The errors of its start and of its steps are independent."""
        steps, step, start = samples / self.samples, self.step_s, self.start_s
        seconds = start.expected + steps * step.expected
        less = math.hypot(start.expected - start.low, steps * (step.expected - step.low))
        more = math.hypot(start.high - start.expected, steps * (step.high - step.expected))
        return Band(seconds - less, seconds, seconds + more)

    def training_s(self, samples: float) -> Band:
        """Return the time of the training loop for this number of samples in seconds, without imports and loading."""
        steps, step = math.ceil(samples / self.samples), self.step_s
        return Band(*(self.first_s + steps * each for each in (step.low, step.expected, step.high)))

    def samples_in(self, seconds: float) -> Band:
        """Return the number of samples that a run trains in this time. The time includes the start of the run."""
        step, start, rate = self.step_s, self.start_s, self.samples / self.step_s.expected
        left = max(0.0, seconds - start.expected)
        less = math.hypot(start.high - start.expected, left * (1 - step.expected / step.high))
        more = math.hypot(start.expected - start.low, left * (step.expected / step.low - 1))
        most = max(0.0, seconds - start.low) * step.expected / step.low
        return Band(max(0.0, left - less) * rate, left * rate, min(left + more, most) * rate)

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second on all GPUs."""
        return self.tokens / self.step_s.expected

    @property
    def mean_tokens(self) -> float:
        """The mean length of a sample in tokens."""
        return self.tokens / self.samples

    @property
    def samples_per_hour(self) -> float:
        return 3600 * self.samples / self.step_s.expected

    def joules_for(self, samples: float) -> Band:
        """Return the energy in joules that all GPUs need for this number of samples, without the start of the run."""
        steps, step, watts = self.gpus * samples / self.samples, self.step_s, self.watts
        return Band(
            steps * step.low * watts.low, steps * step.expected * watts.expected, steps * step.high * watts.high
        )


def estimate_duration(spec: Experiment, gpu: Gpu, history: RunHistory | None = None) -> DurationEstimate:
    """Return the estimated time of a spec on a GPU.

    Args:
        spec: The experiment; `launch` gives the number of GPUs.
        gpu: A GPU of the table.
        history: The earlier runs and probes to use.

    Raises:
        SpecError: The shape of the model, or the GPU's speed in this precision, is unknown."""
    history = history or RunHistory()
    spec = resolve(spec, capability_of(gpu))
    check_modelled(spec)
    lengths, sharding = history.lengths(spec), sharding_of(spec.launch)
    batches = [rank_batch(batch, sharding) for batch in batches_of(spec, lengths)]
    shape, work = history.work(spec, batches)
    limits, (slowdown, host_runs, host) = _limits(spec, gpu, history), host_slowdown(history, gpu)
    error, known = float(read_facts("durations.yaml")["spread"][host]), dict(history.coefficients)
    needed = ideal(work, replace(limits, operations=limits.operations / slowdown))
    modelled, fast, slow = (step(needed, known | {"host": known["host"] * cpu, "images": known["images"] * images})
        for cpu, images in ((1.0, 1.0), (1 / error, 1 / IMAGES_SPREAD), (error, IMAGES_SPREAD)))  # fmt: skip
    ranks = sharding.holders  # each has other positions
    samples, positions, real = (ranks * per_step(spec, batches, name) for name in ("samples", "positions", "real"))
    sent = traffic(spec, shape, batches)
    exposed = exposed_seconds(sent, sharding, limits, modelled.seconds, history.coefficients["elementwise.eager"])
    same = history.same_step(spec, gpu)
    unlike = shape.model.has_experts and not same  # runs of other steps are not representative
    seconds, basis, confidence = _judged(gpu, same, real, modelled.seconds, limits, unlike)
    offloaded, flushes = offloaded_seconds(sent, limits), 0.0 if same else _flushes(spec, gpu, shape)
    bubble = 0.0 if basis == MEASURED else seconds * sharding.bubble / (1 - sharding.bubble)
    waits = {COMMUNICATION: exposed, OFFLOADED: offloaded, FLUSHES: flushes, BUBBLE: bubble}
    host_runs = host_runs if modelled.host_bound else 0
    if basis != MEASURED:
        seconds += sum(waits.values())
        confidence += _remarks(sharding.gpus, spec.launch.nodes, flushes, host_runs, host)
    key = (gpu.name, *step_key(spec))
    if left_out := [units.some(count, why) for (step, why), count in history.invalid.items() if step == key]:
        confidence += f"; without {' and '.join(left_out)}"
    hosts = seconds / (seconds - modelled.seconds + fast.seconds), 1 + (slow.seconds - modelled.seconds) / seconds
    below, above = _spread(spec, basis, unlike, *hosts)
    watts, source = _watts(gpu, same, modelled, offloaded)
    own = modelled.host_bound and modelled.seconds > exposed + offloaded  # the step does not mainly wait for other GPUs
    bound = ("images" if modelled.by_images else "host") if own else "GPU"
    return DurationEstimate(
        Band(seconds / below, seconds, seconds * above), samples, real, 1 - real / positions,
        *_start(spec, shape, same), watts, source, bound, basis, confidence,
        lengths.source, lengths.upper_bound,
        dict(modelled.parts) | {name: value for name, value in waits.items() if value},
        sharding.gpus, exposed, host_runs,
    )  # fmt: skip


def _remarks(gpus: int, nodes: int, flushes: float, host_runs: int, kind: str) -> str:
    """Return more parts of the explanation of an estimate that was not measured."""
    host = f"; the speed of the CPU from {units.some(host_runs, 'launch-bound run')}" if host_runs else ""
    host += ", whose speeds differ" if host_runs and kind == "host" else ""
    between = f", assuming that links between {nodes} machines are as fast as within one" if nodes > 1 else ""
    links = f"; communication of {gpus} GPUs from their links{between}" if gpus > 1 else ""
    return host + links + ("; its memory is full, so the allocator flushes its cache" if flushes else "")


def _limits(spec: Experiment, gpu: Gpu, history: RunHistory) -> Ceilings:
    return limits_of(gpu, spec.train.precision, spec.optimizations.fp8 != "off", history.path)


def host_slowdown(history: RunHistory, gpu: Gpu) -> tuple[float, int, str]:
    """Return the slowdown of the host, the number of runs from which it was computed, and a key of `spread`.

    The slowdown is the median of `time of the host / estimated time` over the launch-bound runs on this kind of GPU, if
    the GPU takes the estimated time. With fewer than LEAST_HOST_RUNS runs, the result is (1.0, 0, "host"). `spread` in
    facts/durations.yaml has the ranges. The narrow range of "known host" applies if most of the runs are inside it."""
    if gpu.name not in history.hosts:
        ratios = []
        for run in history.runs:
            if not run.launch_bound or run.gpu != gpu.name or run.spec.launch.gpus > 1 or is_rough(run.spec):
                continue
            with suppress(SpecError):  # the shape of the model is not known
                _, work = history.work(run.spec, batches_of(run.spec, history.lengths(run.spec)))
                modelled = step(ideal(work, _limits(run.spec, gpu, history)), history.coefficients)
                if modelled.host_bound and run.step_s > modelled.device:
                    real, estimated = run.step_s**OVERLAP, modelled.seconds**OVERLAP
                    on_device = modelled.device**OVERLAP
                    ratios.append(((real - on_device) / (estimated - on_device)) ** (1 / OVERLAP))
        history.hosts[gpu.name] = (1.0, 0, "host")
        if len(ratios) >= LEAST_HOST_RUNS:
            slowdown, factor = statistics.median(ratios), float(read_facts("durations.yaml")["spread"]["known host"])
            alike = sum(1 / factor <= ratio / slowdown <= factor for ratio in ratios) >= ALIKE * len(ratios)
            history.hosts[gpu.name] = (slowdown, len(ratios), "known host" if alike else "host")
    return history.hosts[gpu.name]


def _spread(spec: Experiment, basis: str, unlike: bool, *hosts: float) -> list[float]:
    """Return two factors: the range of the time is from `expected / first` to `expected * second`. `hosts` are the
    factors if the host is much faster or slower than expected, independent of the errors of the GPU's time."""
    if basis == MEASURED:
        return [MEASURED_SPREAD] * 2
    sharding, least = sharding_of(spec.launch), float(read_facts("durations.yaml")["spread"]["GPU"])
    spread = (SHEET_SPREAD if basis == SHEET else 1.0) * (EXPERTS_SPREAD if unlike else 1.0)
    spread *= ROUGH_SPREAD if is_rough(spec) or spec.launch.nodes > 1 else 1.0
    spread *= SEVERAL_SPREAD if sharding.gpus > 2 else 1.0
    spread *= JOINED_SPREAD if concatenates(spec) and spec.train.batch_size > 1 else 1.0
    spread *= ZERO_SPREAD if sharding.states.startswith("zero") else 1.0
    return [spread * math.exp(math.hypot(math.log(least), math.log(each))) for each in hosts]


def _flushes(spec: Experiment, gpu: Gpu, shape: TrainableShape) -> float:
    """Return the seconds per step in which torch's allocator frees its cache, because the GPU's memory is full.

    The allocator frees cached blocks of activations to get memory for the optimizer's temporary tensors."""
    if spec.method.name != "full":
        return 0.0
    part = share(sharding_of(spec.launch))
    kept = kept_as(plan_of(spec, shape.model), part)
    temporary = optimizer_step(kept.optimizer, shape.trained * part.optimizer, kept.weight)
    full = temporary and (memory := estimate_memory(spec, gpu)).device.expected > memory.usable
    return temporary / _REMAPPED if full else 0.0


def _judged(
    gpu: Gpu, same: Sequence[TimedRun], tokens: float, modelled: float, limits: Ceilings, unlike: bool
) -> tuple[float, str, str]:
    """Return the seconds of a step, the basis of the estimate, and an explanation of the basis."""
    if same:
        seconds = statistics.median(run.step_s / run.tokens for run in same) * tokens
        return seconds, MEASURED, f"measured (same step, same GPU, {units.some(len(same), 'run')})"
    learned = read_facts("durations.yaml")["gpus"]
    if unlike:
        return modelled, SHEET, f"{limits.source} only: no run measured this step of a mixture of experts"
    if gpu.name in learned:
        return modelled, FORMULA, f"formulas fitted to ftbench's runs on this GPU, and {limits.source}"
    return modelled, SHEET, f"{limits.source}, and formulas fitted to runs on {', '.join(learned)}"


def _start(spec: Experiment, shape: TrainableShape, same: Sequence[TimedRun]) -> tuple[Band, float]:
    """Return the seconds to import, load and compile, and the seconds of this time in the first step."""
    first = _FIRST_COMPILED_S if spec.optimizations.compile else _FIRST_S
    if spec.method.name == "unsloth":
        first = _FIRST_OSS_S if shape.model.family == "gpt_oss" else _FIRST_UNSLOTH_S * len(shape.model.layers)
    seconds, basis = _IMPORT_S + 2 * shape.model.total / _LOAD_BYTES_S + first, "start"
    if measured := [run.start_s for run in same if run.start_s is not None]:
        seconds, basis = statistics.median(measured), "measured start"
    spread = float(read_facts("durations.yaml")["spread"][basis])
    return Band(seconds / spread, seconds, seconds * spread), min(first, seconds)


def _watts(gpu: Gpu, same: Sequence[TimedRun], step: Step, offloaded: float) -> tuple[Band, str]:
    """Return the mean power of one GPU during steady steps in watts, and the source of the value.

    `offloaded` are the seconds per step in which the GPU waits for offloaded tensors (`offloaded_seconds`)."""
    share = _WAITING + _WORKING * min(1.0, step.device / (step.seconds + offloaded))
    expected, spread = gpu.watts * share, _WATTS_SPREAD
    basis = f"{units.percent(share, 0)} of the board's {gpu.watts:.0f} W"
    if measured := [run.watts for run in same if run.watts]:
        expected, spread, basis = min(statistics.median(measured), gpu.watts), _WATTS_MEASURED, "measured"
    return Band(expected / spread, expected, min(expected * spread, gpu.watts)), basis
