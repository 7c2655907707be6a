"""How a recommendation changes with longer or shorter samples."""

from collections.abc import Sequence
from dataclasses import replace

from ftbench.estimate.memory.largest_batch import MemoryCache
from ftbench.estimate.recommend.candidates import Way
from ftbench.estimate.recommend.ranking import Goal, Option, Recommendation, recommend
from ftbench.spec.datasets import Dataset

_FEW_GPUS = 3  # with more GPUs only the best one is estimated with other lengths


def with_lengths(answer: Recommendation) -> Recommendation:
    """Return the answer with what is best if the samples are half or twice as long."""
    goal, memory_cache = answer.goal, MemoryCache()
    if not answer.options or not _has_lengths(goal):
        return answer
    few = goal if len(goal.gpus) <= _FEW_GPUS else replace(goal, gpus=(answer.options[0].gpu,))
    first = [(factor, next(iter(_at_length(few, factor, answer.promising, memory_cache)), None))
             for factor in (0.5, 2.0)]  # fmt: skip
    return replace(answer, lengths=tuple(first))


def _has_lengths(goal: Goal) -> bool:
    """Return whether the lengths of the samples are known and decide the time, unlike those of images."""
    spec = goal.spec
    return not (spec.dataset.has_images or goal.history.lengths(spec).upper_bound)


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
