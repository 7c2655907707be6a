"""What to do, in words: each sentence is computed from runs, names its figures, and is left out where the data does not
support it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ftbench.core import units
from ftbench.core.compare import Ratio
from ftbench.report.compare.pairs import Pair, pair_of
from ftbench.report.compare.table import in_words
from ftbench.report.data.facts import OPTIMIZATIONS, value_at
from ftbench.report.data.groups import PEAK, SAMPLES, TOKENS, Cell
from ftbench.report.render.document import Section

LESS_MEMORY = 0.95  # a recipe that needs more than this share of another's memory is not called smaller
NEARLY_LEAST = 1.10  # within this of the least memory, the fastest is the one to take
_MOST_GROUPS = 6
_NAMED = ("method.", "optimizations.", "applied.", "train.batch_size", "train.gradient_accumulation_steps")


def decision(cells: Sequence[Cell]) -> Section | None:
    """One paragraph for each workload (model, weights, data) on each GPU, and a sentence for each pair of GPUs that ran
    the same recipe."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        facts = cell.facts
        place = (facts.get("model.id", ""), facts.get("model.weights", ""), cell.runs[0].data, facts["gpu"])
        groups.setdefault(place, []).append(cell)
    told = [(place, list(_sentences(group))) for place, group in groups.items()]
    paragraphs = [
        f"{place[0].rsplit('/', 1)[-1]}, {place[2]}, on {place[3]}: " + " ".join(found)
        for place, found in told
        if found
    ]
    left = len(paragraphs) - _MOST_GROUPS
    paragraphs[_MOST_GROUPS:] = [f"{left} more workloads: report them one by one."] if left > 0 else []
    paragraphs += _cards(cells)
    return Section("decision", "What to do", None, paragraphs) if paragraphs else None


def _sentences(group: Sequence[Cell]) -> Iterator[str]:
    timed = [cell for cell in group if cell.figure(SAMPLES)]
    best = _best_of_each_way(timed)
    if timed:
        yield from _memory_short(timed)
    yield from _limits(group)
    if len(best) > 1:
        first, second = best[0], best[1]
        pair = _pair(first, second)
        yield _many_steps(first, second, pair)
        yield from _few_steps(best)
        yield from _other_learning(best)


def _best_of_each_way(timed: Sequence[Cell]) -> list[Cell]:
    """The fastest cell of each method with its optimizations, fastest first."""
    best: dict[tuple[str | None, str | None], Cell] = {}
    for cell in sorted(timed, key=_rate, reverse=True):
        best.setdefault((cell.facts.get("method.name"), value_at(OPTIMIZATIONS, cell.facts)), cell)
    return list(best.values())


def _rate(cell: Cell) -> float:
    return cell.figure(TOKENS) or cell.figure(SAMPLES) or 0.0


def _memory_short(timed: Sequence[Cell]) -> Iterator[str]:
    known = [cell for cell in timed if cell.figure(PEAK)]
    if len(known) < 2:
        return
    least = min(cell.figure(PEAK) or 0.0 for cell in known)
    small = max((cell for cell in known if (cell.figure(PEAK) or 0.0) <= NEARLY_LEAST * least), key=_rate)
    fast = max(known, key=_rate)
    peaks = [cell.figure(PEAK) or 0.0 for cell in (small, fast)]
    if small is fast:
        yield (
            f"Memory short or not: {small.name} is the fastest, and needs {units.gibibytes(peaks[0])} GiB where the "
            f"least is {units.gibibytes(least)} GiB."
        )
    elif peaks[0] < LESS_MEMORY * peaks[1]:
        pair = _pair(small, fast)
        rest = "" if peaks[0] == least else f" (the least is {units.gibibytes(least)} GiB)"
        yield (
            f"Memory short: {small.name} needs {units.gibibytes(peaks[0])} GiB{rest}, {fast.name} "
            f"{units.gibibytes(peaks[1])} GiB; the price is speed, {_change(pair.speed)}{_also(pair)}."
        )


def _limits(group: Sequence[Cell]) -> Iterator[str]:
    """The largest batch that fits and the first above it that does not, for each way of training."""
    ways: dict[str, list[Cell]] = {}
    for cell in group:
        if (cell.facts.get("train.batch_size") or "").isdigit():
            ways.setdefault(cell.name.partition(" at batch ")[0], []).append(cell)
    parts = []
    for way, cells in ways.items():
        fits = [_batch(cell) for cell in cells if cell.ok]
        above = [_batch(c) for c in cells if any(run.record["state"] == "oom" for run in c.runs) and not c.ok]
        failing = [batch for batch in above if batch > max(fits, default=0)]
        if failing:
            parts.append(f"{way} fits up to batch {max(fits)} and not {min(failing)}" if fits else
                         f"{way} does not fit at batch {min(failing)}")  # fmt: skip
    if parts:
        yield "Out of memory: " + ", ".join(parts) + "."


def _batch(cell: Cell) -> int:
    return int(cell.facts["train.batch_size"])


def _many_steps(first: Cell, second: Cell, pair: Pair) -> str:
    rate = units.rate((first.figure(SAMPLES) or 0.0) * 3600)
    if pair.speed is not None and pair.speed.verdict == "not distinguishable":
        return (
            f"Many steps: {first.name} ({rate} samples/h) and {second.name} are not distinguishable in speed, "
            f"{_change(pair.speed)}{_also(pair)}."
        )
    return (
        f"Many steps: {first.name} trains {rate} samples/h, against {second.name} {_change(pair.speed)}{_also(pair)}."
    )


def _few_steps(best: Sequence[Cell]) -> Iterator[str]:
    """The fastest against the one that starts with the least delay, where the noise lets their speeds be told apart."""
    paces = [(cell, pace) for cell in best if (pace := cell.pace()) is not None]
    if not paces or paces[0][0] is not best[0]:
        return
    fast, own = paces[0]
    quick, other = min(paces, key=lambda pair: pair[1].start_s)
    if quick is fast:
        lost = units.seconds(max(0.0, own.start_s))
        yield f"Few steps: {fast.name} also loses the least before it is steady ({lost})."
        return
    pair = _pair(fast, quick)
    if pair.break_even is None or pair.break_even.when != "after" or pair.break_even.steps is None:
        return
    if (ahead := round(pair.break_even.steps)) >= 1:
        yield (
            f"Few steps: {quick.name} is ahead for the first {f'{ahead:,} steps' if ahead > 1 else 'step'} of the "
            f"other, whose warm-up costs {units.seconds(own.start_s - other.start_s)} more{_also(pair)}."
        )


def _other_learning(best: Sequence[Cell]) -> Iterator[str]:
    for cell in best[1:]:
        learning = _pair(best[0], cell).learning
        if learning is not None and learning.failed:
            yield f"{best[0].name} and {cell.name} do not learn the same: {learning.reason}."


def _cards(cells: Sequence[Cell]) -> Iterator[str]:
    """For each further GPU that ran the recipe of another: the fastest recipe that both ran."""
    recipes: dict[tuple[tuple[str, str], ...], list[Cell]] = {}
    for cell in cells:
        if cell.figure(SAMPLES) and cell.runs[0].spec:
            recipes.setdefault(tuple(sorted(cell.runs[0].spec.items())), []).append(cell)
    best: dict[tuple[str, str], tuple[Cell, Cell]] = {}
    for shared in recipes.values():
        ordered = sorted(shared, key=_rate)
        for slow, fast in ((a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]):
            names = (fast.facts["gpu"], slow.facts["gpu"])
            if names not in best or _rate(fast) > _rate(best[names][0]):
                best[names] = (fast, slow)
    for (faster, slower), (fast, slow) in best.items():
        pair = pair_of("gpu", fast, slow)
        words = in_words(pair)
        yield (
            f"{faster} against {slower}: {fast.name} is {_change(pair.speed)} in speed, {words or 'the same recipe'}."
        )


def _pair(cell: Cell, baseline: Cell) -> Pair:
    """Two recipes whose names tell the method, the optimizations and the batch: these are what is compared."""
    pair = pair_of("method.name", cell, baseline)
    named = [one for one in pair.differences if not one.key.startswith(_NAMED)]
    other_batch = _steps(cell) != _steps(baseline)
    kept = tuple(one for one in named if not (other_batch and one.key == "dataset.order_hash"))
    return replace(pair, differences=kept)


def _steps(cell: Cell) -> tuple[str | None, ...]:
    return tuple(cell.facts.get(key) for key in _NAMED[-2:])


def _also(pair: Pair) -> str:
    """What else differs, beside what the names of the two say."""
    words = in_words(pair).removeprefix("differs: ")
    return f" (also differs: {words})" if words else ""


def _change(ratio: Ratio | None) -> str:
    if ratio is None:
        return "by an unknown share"
    value = f"{(ratio.value - 1) * 100:+.1f} %"
    if ratio.low is None or ratio.high is None:
        return f"{value} (too few steady steps to know the noise)"
    likely = "likely " if ratio.basis == "steps" else ""
    if ratio.vague:
        return f"{likely}{value} (its repeats are too few or too far apart to say more than that)"
    return f"{likely}{value} (95 %: {(ratio.low - 1) * 100:+.1f} to {(ratio.high - 1) * 100:+.1f})"
