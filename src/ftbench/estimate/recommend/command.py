"""`ftbench recommend`: the command line → a goal; every mistake a sentence."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ftbench.core.hardware import Gpu, limited_gpu
from ftbench.core.units import parse_seconds
from ftbench.errors import SpecError
from ftbench.estimate.command import listed
from ftbench.estimate.memory.capacity import probed
from ftbench.estimate.recommend.ranking import OBJECTIVES, Goal, Objective, Recommendation, recommend, with_freer
from ftbench.estimate.time.duration import epochs_samples
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.text import MOST_SAMPLES
from ftbench.estimate.workload.batches import batches_of, per_step
from ftbench.estimate.workload.sharding import counts, sharding_of
from ftbench.spec.base import known, shortened
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load
from ftbench.spec.methods import METHODS
from ftbench.spec.prices import Prices, load_prices
from ftbench.spec.reading import read_config
from ftbench.store import machine
from ftbench.store.output import output_file

MOST_BATCH, MOST_GPUS = 65_536, 64
ANY = "any"  # of --effective-batch: whatever is best


@dataclass(frozen=True, slots=True)
class RecommendRequest:
    """What was asked for on the command line, as it was typed."""

    spec: Path
    sets: Sequence[str] = ()
    gpu: str | None = None
    gpus: int | None = None
    samples: int | None = None
    deadline: str | None = None
    max_cost: float | None = None
    prices: Path | None = None
    objective: str = "speed"
    method: str | None = None
    effective_batch: str | None = None
    store: Path = Path("results")
    output: Path | None = None
    config: Path | None = None


def run(request: RecommendRequest) -> Recommendation:
    """Raise SpecError for each mistake."""
    spec = load(request.spec, request.sets)
    prices = load_prices(request.prices) if request.prices is not None else None
    gpus = tuple(probed(gpu, request.store) for gpu in _gpus(request.gpu))
    problems = [*_limits(request), *_prices(request, gpus, prices), *_output(request)]
    if problems:
        raise SpecError(*problems)
    deadline = parse_seconds(request.deadline) if request.deadline is not None else None
    store = RunHistory.read(request.store)
    spec = store.with_sample_count(spec)
    answer = recommend(Goal(
        spec, gpus, _samples(request, spec, store), deadline, request.max_cost, prices, _counts(request, spec),
        cast(Objective, request.objective), _methods(request), _effective(request, spec, store), store,
        None if request.config is None else read_config(request.config),
    ))  # fmt: skip
    return answer if request.effective_batch else with_freer(answer)


def _gpus(text: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs named, all of the table, or this machine's. Raise SpecError for one that is not in the table."""
    if text is None:
        described = machine.gpu()
        gpu = limited_gpu(described)
        if gpu is None:
            raise SpecError("this machine has no GPU of the table: name some with --gpu (`ftbench list gpus`), or all")
        return (gpu,)
    return tuple(listed(text))


def _counts(request: RecommendRequest, spec: Experiment) -> tuple[int, ...]:
    """Return how many GPUs may share the work: those that there are, and half as many, and so on."""
    most = spec.launch.gpus if request.gpus is None else request.gpus
    return tuple(counts(most))


def _output(request: RecommendRequest) -> list[str]:
    """Return why the output cannot be written: the spec that is asked about stays as it is."""
    if request.output is None:
        return []
    target = output_file(request.output)
    if target.exists() and target.samefile(request.spec):
        return [f"-o {request.output}: is the spec itself; write to another file"]
    return []


def _limits(request: RecommendRequest) -> list[str]:
    problems = _unknown("--goal", request.objective, OBJECTIVES, "goal")
    if request.deadline is not None and parse_seconds(request.deadline) is None:
        problems.append(f"--deadline {request.deadline}: write it as 8h, 90m or 1h30m")
    if request.gpus is not None and not 1 <= request.gpus <= MOST_GPUS:
        problems.append(f"--gpus {request.gpus}: how many GPUs there are, from 1 to {MOST_GPUS}")
    if request.samples is not None and not 1 <= request.samples <= MOST_SAMPLES:
        problems.append(f"--samples {request.samples}: how many samples to train on, from 1 to 10^15")
    if request.max_cost is not None and not (0 < request.max_cost < math.inf):
        problems.append(f"--max-cost {request.max_cost:g}: an amount of money above 0, in the currency of --prices")
    batch = request.effective_batch
    if batch not in (None, ANY) and not (batch.isdecimal() and len(batch) < 10 and 1 <= int(batch) <= MOST_BATCH):
        problems.append(f"--effective-batch {shortened(batch)}: samples a step, from 1 to {MOST_BATCH:,}, or {ANY}")
    return problems


def _prices(request: RecommendRequest, gpus: Sequence[Gpu], prices: Prices | None) -> list[str]:
    """Return whether money can be compared where it has to be."""
    why = [f"--max-cost {request.max_cost:g}"] if request.max_cost is not None else []
    why += ["--goal cost"] if request.objective == "cost" else []
    if not why:
        return []
    if prices is None:
        return [f"{' and '.join(why)}: needs --prices FILE with what an hour of the GPU costs"]
    lacking = [gpu.name for gpu in gpus if prices.of(gpu.name) is None]
    if lacking:
        return [f"{prices.path} has no price for {', '.join(lacking)}: add one, or leave them out of --gpu"]
    terms = [prices.by_gpu[gpu.name] for gpu in gpus]
    ways = [price.rent or price.owned for price in terms]
    currencies = sorted({way.currency for way in ways if way is not None})
    if len(currencies) > 1:
        return [f"{prices.path} has prices in {' and '.join(currencies)}, which are not compared: ask for GPUs of one"]
    return []


def _methods(request: RecommendRequest) -> tuple[str, ...]:
    if request.method is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in request.method.split(",") if name.strip()))
    wrong = [sentence for name in names for sentence in _unknown("--method", name, METHODS, "method")]
    if wrong or not names:
        raise SpecError(*(wrong or [f"--method {request.method!r}: name methods, for example lora,qlora"]))
    return names


def _unknown(option: str, word: str, words: Iterable[str], kind: str) -> list[str]:
    """Return a sentence with all that is allowed and the nearest, unless the word is one of them."""
    try:
        known(word, words, kind)
    except ValueError as error:
        return [f"{option}: {error}"]
    return []


def _effective(request: RecommendRequest, spec: Experiment, store: RunHistory) -> int | None:
    """Return the samples a step that are held: the spec's own unless others are asked for, None for any."""
    if request.effective_batch == ANY:
        return None
    if request.effective_batch and int(request.effective_batch) % spec.objective.group:
        raise SpecError(
            f"--effective-batch {request.effective_batch}: a step has whole groups of objective.num_generations "
            f"{spec.objective.group} completions: ask for a multiple, or {ANY}"
        )
    return int(request.effective_batch) if request.effective_batch else max(1, round(_a_step(spec, store)))


def _a_step(spec: Experiment, store: RunHistory) -> float:
    """Return the samples of a step of all GPUs that the spec asks for."""
    return sharding_of(spec.launch).data * per_step(spec, batches_of(spec, store.lengths(spec)), "samples")


def _samples(request: RecommendRequest, spec: Experiment, store: RunHistory) -> float:
    samples = request.samples or epochs_samples(spec, _a_step(spec, store))
    if samples is None:
        raise SpecError(f"--samples: say how many to train on; how many {spec.dataset.name} has is not known")
    return samples
