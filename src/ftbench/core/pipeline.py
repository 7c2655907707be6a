"""Compute the layers of pipeline stages, the micro-batches in memory on each rank, and the waiting time of GPUs.

Sources: Narayanan et al. 2021 (1F1B and interleaved stages, sections 2.2 and 3.2); Qi et al. 2024 (ZB-V)."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise


def parts(schedule: str) -> int:
    """Return the number of pipeline stages on each GPU."""
    return 2 if schedule in ("interleaved-1f1b", "zbv") else 1


def of_rank(schedule: str, ranks: int, rank: int) -> list[int]:
    """Return the indices of the pipeline stages on a rank. With ZB-V, rank 0 has the first and the last stage."""
    if parts(schedule) == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule == "zbv" else rank + ranks]


def bubble(schedule: str, ranks: int, micro_batches: int) -> float:
    """Return the share of a step in which a GPU waits for other GPUs, if all stages take the same time."""
    waits = 0 if schedule == "zbv" else ranks - 1
    return waits / (micro_batches * parts(schedule) + waits)


def in_flight(schedule: str, ranks: int, micro_batches: int, rank: int) -> float:
    """Return the maximum number of micro-batches with activations in the memory of a rank at the same time."""
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return min(micro_batches, ranks - rank)
    if schedule == "zbv":
        return min(micro_batches, ranks)
    return min(2 * micro_batches, ranks + 2 * (ranks - 1 - rank) + 1) / 2


def balanced(costs: Sequence[int], sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage. This split minimizes the time of the slowest stage.

    `costs` has the number of parameters that a token uses in each layer, then in the output head. `sizes` has the
    number of stored parameters of the embedding, of each layer and of the head. If several splits are equally fast, the
    size of the largest stage is minimized too."""
    layers = len(sizes) - 2
    cost = [0, *accumulate(costs[:layers])]
    size = [0, *accumulate(sizes[1:-1])]
    cost[-1] += costs[layers]
    size = [0, *(each + sizes[0] for each in size[1:])]
    size[-1] += sizes[-1]

    @cache
    def best(start: int, left: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """Split the layers from `start` on into `left` stages. Minimize the largest cost, then the largest size, then
        the sum of squared costs. Return these three values, and the number of layers of each stage."""
        if left == 1:
            last = cost[-1] - cost[start]
            return (last, size[-1] - size[start], last**2), (layers - start,)
        candidates = []
        for end in range(start + 1, layers - left + 2):
            (slow, large, squares), others = best(end, left - 1)
            own = cost[end] - cost[start]
            worst = max(slow, own), max(large, size[end] - size[start]), squares + own**2
            candidates.append((worst, (end - start, *others)))
        return min(candidates)

    return best(0, stages)[1]


def bounds(split: Sequence[int], stages: Sequence[int]) -> tuple[list[int], bool, bool]:
    """Return the indices of the layers in `stages`, whether `stages` include the embedding, and whether they include
    the output head."""
    return [at for stage in stages for at in layers_of(split, stage)], 0 in stages, len(split) - 1 in stages


def layers_of(split: Sequence[int], stage: int) -> range:
    """Return the indices of the layers in a stage. `split` has the number of layers of each stage."""
    return range(*list(pairwise([0, *accumulate(split)]))[stage])
