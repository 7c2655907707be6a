"""Answer `ftbench recommend`: check the options of the command, and search for the best variants."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ftbench.core.hardware import Gpu, limited_gpu
from ftbench.errors import SpecError
from ftbench.estimate.gpus import ALL, gpus_named, probed
from ftbench.estimate.memory.largest_batch import MOST_BATCH, MemoryCache
from ftbench.estimate.recommend.ranking import (
    Goal,
    Objective,
    Option,
    Recommendation,
    as_runnable,
    recommend,
    samples_per_step,
)
from ftbench.estimate.recommend.spec_file import command_on, run_command
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.batches import epochs_samples
from ftbench.estimate.workload.sharding import counts
from ftbench.spec.base import known, shortened
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load
from ftbench.spec.methods import METHODS
from ftbench.spec.model_argument import LONGEST, names_model, usual_max_length
from ftbench.spec.prices import Prices, load_prices
from ftbench.store import machine

ANY = "any"  # value of --effective-batch that allows any number of samples per step
_USUAL_BATCH = 16  # samples per step if the user gave a model and no spec


@dataclass(frozen=True, slots=True)
class RecommendRequest:
    """The options of `ftbench recommend`, before any check."""

    spec: Path
    sets: Sequence[str] = ()
    gpu: str | None = None
    gpus: int | None = None
    samples: int | None = None
    deadline_s: float | None = None
    max_cost: float | None = None
    prices: Path | None = None
    objective: Objective = "speed"
    method: str | None = None
    effective_batch: str | None = None
    store: Path = Path("results")
    output: Path | None = None


def answer(request: RecommendRequest) -> Recommendation:
    """Return the recommendation. Raise SpecError for wrong options."""
    spec = load(request.spec, request.sets)
    prices = load_prices(request.prices) if request.prices is not None else None
    gpus = tuple(probed(gpu, request.store) for gpu in _gpus(request.gpu))
    _check_prices(request, gpus, prices)
    history = RunHistory.read(request.store, spec, [gpu.name for gpu in gpus])
    spec = history.with_sample_count(spec)
    most = spec.launch.gpus if request.gpus is None else request.gpus
    samples, effective = _samples(request, spec, history), _effective(request, spec, history)
    if request.samples or request.effective_batch:  # another number of steps than the spec's
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"max_steps": None})})
    recommendation = recommend(Goal(
        spec, gpus, samples, request.deadline_s, request.max_cost, prices, tuple(counts(most)),
        request.objective, _methods(request), effective, history,
    ))  # fmt: skip
    return with_lengths(recommendation)


def command_of(request: RecommendRequest, recommendation: Recommendation) -> str:
    """Return the command that trains the best variant, with the spec file of `-o` or with `--set` values."""
    for best in recommendation.options[:1]:
        if request.output is not None:
            return command_on(best.gpu, request.output)
        return run_command(request.spec, request.sets, as_runnable(best, recommendation.goal), best.gpu)
    return ""


def _gpus(text: str | None) -> list[Gpu]:
    """Return the GPUs that `--gpu` names, or this machine's GPU. Raise SpecError if a GPU is not in the table."""
    if text is not None:
        return [gpu for gpu in gpus_named(text) if text != ALL or gpu.compute_capability]  # no training on AMD
    if (gpu := limited_gpu(machine.gpu())) is None:
        raise SpecError("this machine has no known GPU: name one with --gpu (`ftbench list gpus`), or --gpu all")
    return [gpu]


def _check_prices(request: RecommendRequest, gpus: Sequence[Gpu], prices: Prices | None) -> None:
    """Raise SpecError if the cost matters, but prices are missing or have different currencies."""
    why = [f"--max-cost {request.max_cost:g}"] if request.max_cost is not None else []
    why += ["--goal cost"] if request.objective == "cost" else []
    if not why:
        return
    if prices is None:
        raise SpecError(f"{' and '.join(why)}: needs --prices FILE with prices per hour")
    lacking = [gpu.name for gpu in gpus if prices.of(gpu.name) is None]
    if lacking:
        raise SpecError(f"{prices.path} has no price for {', '.join(lacking)}: add one, or remove the GPU from --gpu")
    currencies = sorted({terms.currency for gpu in gpus if (price := prices.by_gpu[gpu.name])
                         and (terms := price.rent or price.owned)})  # fmt: skip
    if len(currencies) > 1:
        raise SpecError(f"{prices.path} has prices in {' and '.join(currencies)}: choose GPUs priced in one currency")


def _methods(request: RecommendRequest) -> tuple[str, ...]:
    if request.method is None:
        return ()
    names = dict.fromkeys(name.strip() for name in request.method.split(","))
    try:
        return tuple(known(name, METHODS, "method") for name in names)
    except ValueError as error:
        raise SpecError(f"--method: {error}") from None


def _effective(request: RecommendRequest, spec: Experiment, history: RunHistory) -> int | None:
    """Return the samples per step from `--effective-batch`, the spec, or a default. None: any number is allowed."""
    batch = request.effective_batch
    if batch == ANY:
        return None
    if batch is None:
        given = {"batch_size", "gradient_accumulation_steps"} & spec.train.model_fields_set
        is_usual = names_model(request.spec) and not given
        return _USUAL_BATCH if is_usual else max(1, round(samples_per_step(spec, history)))
    if not (batch.isdecimal() and len(batch) < 10 and 1 <= int(batch) <= MOST_BATCH):
        raise SpecError(f"--effective-batch {shortened(batch)}: samples per step, from 1 to {MOST_BATCH:,}, or {ANY}")
    return int(batch)


def _samples(request: RecommendRequest, spec: Experiment, history: RunHistory) -> float:
    samples = request.samples or epochs_samples(spec, samples_per_step(spec, history))
    if samples is None:
        raise SpecError(f"--samples: required, because the size of {spec.dataset.name} is not known")
    return samples


def with_lengths(answer: Recommendation) -> Recommendation:
    """Return the recommendation with `lengths`: the best variants on its best GPU for half and twice the mean length.

    `lengths` stays empty if the sample lengths are unknown, if the samples have images, or if no variant fits."""
    goal, memory_cache = answer.goal, MemoryCache()
    if not answer.options or goal.spec.dataset.has_images or goal.history.lengths(goal.spec).upper_bound:
        return answer
    on_best = replace(goal, gpus=(answer.options[0].gpu,))
    best = {factor: next(iter(_at_length(on_best, factor, memory_cache)), None) for factor in (0.5, 2.0)}
    return replace(answer, lengths=tuple(best.items()))


def _at_length(goal: Goal, factor: float, memory_cache: MemoryCache) -> tuple[Option, ...]:
    """Return the ranked variants for samples with `factor` times the mean length."""
    data, lengths = goal.spec.dataset, goal.history.lengths(goal.spec)
    mean = min(max(2, round(float(factor * lengths.mean))), LONGEST)
    equal = len(set(lengths.values)) == 1
    longest = max(data.max_length, round(factor * data.max_length) if equal else 2 * mean)
    if data.mean_length and data.max_length == usual_max_length(round(data.mean_length)):
        longest = usual_max_length(mean)
    changed = Dataset.model_validate({
        "name": "synthetic", "samples": data.samples or len(lengths.values), "seed": data.seed,
        "max_length": min(longest, 2 * LONGEST), "length" if equal else "mean_length": mean,
    })  # fmt: skip
    return recommend(replace(goal, spec=goal.spec.model_copy(update={"dataset": changed})), memory_cache).options
