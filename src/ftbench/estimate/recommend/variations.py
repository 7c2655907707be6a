"""How a recommendation changes with longer or shorter samples, and with another number of samples per step."""

from collections.abc import Sequence
from dataclasses import replace

from ftbench.estimate.memory.largest_batch import MemoryCache
from ftbench.estimate.recommend.candidates import Way
from ftbench.estimate.recommend.ranking import NO_ROWS, Goal, Option, Recommendation, rank, recommend
from ftbench.spec.datasets import Dataset

_FEW_GPUS = 3  # with more GPUs only the best one is estimated with other lengths
_FREER = 1.25  # how many times better a way with other samples per step must be to be named


def with_variations(answer: Recommendation, any_batch: bool) -> Recommendation:
    """Return the answer with what is best if the samples are half or twice as long. With `any_batch`, add a much better
    way that changes the samples per step, if one exists."""
    goal, memory_cache = answer.goal, MemoryCache(config=answer.goal.config)
    if not answer.options:
        return answer
    few = goal if len(goal.gpus) <= _FEW_GPUS else replace(goal, gpus=(answer.options[0].gpu,))
    first = [(factor, next(iter(_at_length(few, factor, answer.promising, memory_cache)), None))
             for factor in (0.5, 2.0) if _has_lengths(goal)]  # fmt: skip
    free: tuple[Option, ...] = ()
    if any_batch and goal.effective_batch is not None and NO_ROWS in answer.ruled_out:
        any_steps = replace(few, effective_batch=None)
        free = recommend(any_steps, [way for way, fits in answer.promising if fits], memory_cache).options
    better = free and rank(free[0], goal)[1] * _FREER < rank(answer.options[0], goal)[1]
    return replace(answer, freer=free[0] if better else None, lengths=tuple(first))


def _has_lengths(goal: Goal) -> bool:
    """Return whether the lengths of the samples are known and decide the time, unlike those of images and prompts."""
    spec = goal.spec
    return not (spec.dataset.has_images or spec.objective.prompts or goal.history.lengths(spec).upper_bound)


def _at_length(
    goal: Goal, factor: float, promising: Sequence[tuple[Way, bool]], memory_cache: MemoryCache
) -> tuple[Option, ...]:
    """Return the ranked ways for samples whose mean length is `factor` times as large."""
    data, lengths = goal.spec.dataset, goal.history.lengths(goal.spec)
    mean = max(2, round(factor * lengths.mean))
    equal = len(set(lengths.values)) == 1
    changed = Dataset.model_validate({
        "name": "synthetic", "samples": len(lengths.values), "seed": data.seed,
        "max_length": max(data.max_length, round(factor * data.max_length) if equal else 2 * mean),
        "length" if equal else "mean_length": mean,
    })  # fmt: skip
    among = [replace(way, spec=way.spec.model_copy(update={"dataset": changed}))
             for way, fits in promising if fits or factor < 1]  # fmt: skip
    other = replace(goal, spec=goal.spec.model_copy(update={"dataset": changed}))
    return recommend(other, among, memory_cache).options if among else ()
