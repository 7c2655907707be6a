"""What to do, as sentences computed from runs. A sentence is omitted if the data does not support it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ftbench.core import units
from ftbench.core.learning import CANNOT_TELL
from ftbench.core.stats import MINIMUM_STEADY, grouped_by
from ftbench.report.compare.pairs import Noise, Pair, learning_of, noise_of, pair_of
from ftbench.report.compare.words import change_in_words, differences_text
from ftbench.report.data.axes import FRAMEWORK, SETTINGS
from ftbench.report.data.cells import PEAK, SAMPLES, TOKENS, Cell
from ftbench.report.data.facts import CPU
from ftbench.report.document import Point, Section
from ftbench.report.sections.frameworks import framework_points
from ftbench.report.sections.rows import point

LESS_MEMORY = 0.95  # a recipe is called smaller if it needs less than this share of the other's memory
NEARLY_LEAST = 1.10  # among recipes within this factor of the least memory, recommend the fastest
_MAX_GROUPS = 6
_MAX_COMPARED, _MAX_NAMED = 50, 6
_IN_NAMES = ("method.", "optimizations.", "applied.", "train.optimizer", "train.batch_size",
             "train.gradient_accumulation_steps", FRAMEWORK, SETTINGS)  # fmt: skip
# With synthetic data, another number of steps implies these differences.
_LENGTH, _IMPLIED = ("train.max_steps", "dataset.samples"), ("dataset.samples", "dataset.hash", "dataset.order_hash")


def decision(cells: Sequence[Cell]) -> Section | None:
    """Return points per workload and GPUs, and per pair of GPUs that ran the same recipe.

    Contended runs, failed runs, and speeds from fewer than five steady steps are not used.
    """
    used = [own for cell in cells if (own := cell.without_contended())]
    noise = noise_of(used)
    groups = grouped_by(used, lambda cell: (*cell.workload, cell.gpus, cell.facts["gpu"]))
    points: list[Point] = []
    lists = []
    for (model, _, data, count, gpu), group in groups.items():
        where = "the CPU" if gpu == CPU else f"{count} x {gpu}" if count > 1 else gpu
        about = f"{model.rsplit('/', 1)[-1]}, {data}, on {where}"
        if of_group := [replace(own, about=about) for own in _points(group, noise)]:
            points += of_group
            lists.append([f"{about}:", *(f"- {own.sentence}" for own in of_group)])
    left = len(lists) - _MAX_GROUPS
    paragraphs = [text for group in lists[:_MAX_GROUPS] for text in group]
    paragraphs += [f"{left} more workloads: report them separately."] if left > 0 else []
    other = [*_gpus(used, noise), *_unused(cells, used)]
    points += other
    paragraphs += [f"- {own.sentence}" for own in other]
    return Section("decision", "What to do", None, paragraphs, points=points) if paragraphs else None


def _unused(cells: Sequence[Cell], used: Sequence[Cell]) -> Iterator[Point]:
    contended = sum(run.contended for cell in cells for run in cell.runs)
    short = sum(bool(cell.figure(SAMPLES)) and not cell.measured for cell in used)
    parts = [units.some(contended, "contended run")] if contended else []
    parts += [f"{units.some(short, 'speed')} from fewer than {MINIMUM_STEADY} steady steps"] if short else []
    if parts:
        yield Point(f"Not used: {', '.join(parts)}.")


def _points(group: Sequence[Cell], noise: Noise) -> Iterator[Point]:
    measured = [cell for cell in group if cell.measured and cell.figure(SAMPLES)]
    best = _best_of_each_recipe(measured)
    yield from framework_points(measured, noise)
    yield from _memory(measured, noise)
    yield from _limits(group)
    if len(best) > 1:
        yield _many_steps(best[0], best[1], _pair(best[0], best[1], noise))
        yield from _few_steps(best, noise)
        yield from _learning(best[0], best[1:])


def _best_of_each_recipe(measured: Sequence[Cell]) -> list[Cell]:
    """Return the fastest cell of each recipe, fastest first."""
    best: dict[str, Cell] = {}
    for cell in sorted(measured, key=_rate, reverse=True):
        best.setdefault(cell.recipe, cell)
    return list(best.values())


def _rate(cell: Cell) -> float:
    return cell.figure(TOKENS) or cell.figure(SAMPLES) or 0.0


def _memory(measured: Sequence[Cell], noise: Noise) -> Iterator[Point]:
    peaks = {id(cell): peak for cell in measured if (peak := cell.figure(PEAK))}
    known = [cell for cell in measured if id(cell) in peaks]
    if len(known) < 2:
        return
    least = min(peaks.values())
    small = max((cell for cell in known if peaks[id(cell)] <= NEARLY_LEAST * least), key=_rate)
    fast = max(known, key=_rate)
    needs, most = peaks[id(small)], peaks[id(fast)]
    if small is fast:
        rank = "the least" if needs == least else f"close to the least, {units.gibibytes(least)} GiB"
        second = max((cell for cell in known if cell is not fast), key=_rate)
        how = "as fast as any" if _is_noise(_pair(fast, second, noise)) else "the fastest"
        yield point(f"Memory: {small.name} is {how}, and needs {units.gibibytes(needs)} GiB, {rank}.", small)
    elif needs < LESS_MEMORY * most:
        pair = _pair(small, fast, noise)
        rest = "" if needs == least else f" (the least, {units.gibibytes(least)} GiB, is slower)"
        yield point(
            f"Least memory: {small.name} needs {units.gibibytes(needs)} GiB{rest}, {fast.name} "
            f"{units.gibibytes(most)} GiB; its speed is {change_in_words(pair.speed)}.",
            small, fast, also=_also(pair),
        )  # fmt: skip


def _limits(group: Sequence[Cell]) -> Iterator[Point]:
    """Yield, for each recipe, the largest batch that fits and the smallest larger one that does not."""
    sized = (cell for cell in group if (cell.facts.get("train.batch_size") or "").isdigit())
    parts, failed = [], list[Cell]()
    for way, cells in grouped_by(sized, lambda cell: cell.way).items():
        fits = [_batch(cell) for cell in cells if cell.ok]
        above = [_batch(c) for c in cells if any(run.record["state"] == "oom" for run in c.runs) and not c.ok]
        failing = [batch for batch in above if batch > max(fits, default=0)]
        if failing:
            failed += [cell for cell in cells if _batch(cell) in (min(failing), max(fits, default=0))]
            parts.append(f"{way} fits up to batch {max(fits)} and not {min(failing)}" if fits else
                         f"{way} does not fit at batch {min(failing)}")  # fmt: skip
    if parts:
        yield point(f"Out of memory: {units.listed(parts, _MAX_NAMED)}.", *failed)


def _batch(cell: Cell) -> int:
    return int(cell.facts["train.batch_size"])


def _many_steps(first: Cell, second: Cell, pair: Pair) -> Point:
    rate, words = units.rate((first.figure(SAMPLES) or 0.0) * 3600), change_in_words(pair.speed)
    text = f"Many steps: {first.name} trains {rate} samples/h, against {second.name} {words}."
    if _is_noise(pair):
        text = (
            f"Many steps: {first.name} ({rate} samples/h) and {second.name} are not distinguishable in speed, {words}."
        )
    return point(text, first, second, also=_also(pair))


def _is_noise(pair: Pair) -> bool:
    return pair.speed is not None and pair.speed.verdict == "not distinguishable"


def _few_steps(best: Sequence[Cell], noise: Noise) -> Iterator[Point]:
    """Yield the break-even between the fastest cell and the one that starts fastest, if their speeds differ."""
    paces = [(cell, pace) for cell in best if (pace := cell.pace()) is not None]
    if not paces or paces[0][0] is not best[0]:
        return
    fast, own = paces[0]
    quick, other = min(paces, key=lambda pair: pair[1].start_s)
    if quick is fast:
        lost = units.seconds(max(0.0, own.start_s))
        yield point(f"Few steps: {fast.name} also has the shortest warm-up ({lost}).", fast)
        return
    pair = _pair(fast, quick, noise)
    if pair.break_even is None or pair.break_even.when != "after" or pair.break_even.steps is None:
        return
    if (ahead := round(pair.break_even.steps)) >= 1:
        steps = f"{ahead:,} steps" if ahead > 1 else "step"
        yield point(
            f"Few steps: {quick.name} is ahead for the first {steps}; the warm-up of {fast.name} costs "
            f"{units.seconds(own.start_s - other.start_s)} more.",
            quick, fast, also=_also(pair),
        )  # fmt: skip


def _learning(best: Cell, others: Sequence[Cell]) -> Iterator[Point]:
    """Yield the next fastest cells that do not learn the same as the best, with the reason."""
    verdicts = [(cell, learning_of(cell, best)) for cell in others[:_MAX_COMPARED]]
    failed = [(cell, learning) for cell, learning in verdicts if learning.failed]
    for cell, learning in failed[:_MAX_NAMED]:
        yield point(f"{best.name} and {cell.name} do not learn the same: {learning.reason}.", best, cell)
    if verdicts and all(learning.verdict == CANNOT_TELL for _, learning in verdicts):
        text = f"These runs do not show whether {best.name} learns the same as the others: run `ftbench parity`."
        yield point(text, best)
    if more := [cell for cell, _ in failed[_MAX_NAMED:]]:
        yield point(f"{best.name} and {len(more)} more of the next fastest do not learn the same.", best, *more)
    if (left := len(others) - _MAX_COMPARED) > 0:
        yield point(f"The losses of {best.name} and the {left:,} slowest others were not compared.")


def _gpus(cells: Sequence[Cell], noise: Noise) -> Iterator[Point]:
    """Yield, for each pair of GPUs that ran the same recipe, a comparison of the fastest such recipe."""
    measured = (cell for cell in cells if cell.measured and cell.figure(SAMPLES) and cell.runs[0].spec)
    recipes = grouped_by(measured, lambda cell: frozenset(cell.runs[0].spec.items()))
    best: dict[tuple[str, str], tuple[Cell, Cell]] = {}
    for shared in recipes.values():
        ordered = sorted(shared, key=_rate)
        for slow, fast in ((a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]):
            names = (fast.facts["gpu"], slow.facts["gpu"])
            rates = list(map(_rate, (fast, slow)))
            if names[0] != names[1] and (names not in best or rates > list(map(_rate, best[names]))):
                best[names] = fast, slow
    for (faster, slower), (fast, slow) in best.items():
        pair = pair_of("gpu", fast, slow, noise=noise)
        words = differences_text(pair) or "the same recipe"
        text = f"{faster} against {slower}: {fast.name} is {change_in_words(pair.speed)} in speed, {words}."
        yield point(text, fast, slow)


def _pair(cell: Cell, baseline: Cell, noise: Noise) -> Pair:
    """Return the pair of two recipes. Method, optimizations and batch are in their names, so not in the differences."""
    pair = pair_of("method.name", cell, baseline, noise=noise)
    other = [fact for fact in pair.differences if not fact.key.startswith(_IN_NAMES)]
    if cell.batch != baseline.batch:
        other = [fact for fact in other if fact.key != "dataset.order_hash"]
    if cell.facts.get("dataset.name") == "synthetic" and {*_LENGTH} <= {fact.key for fact in other}:
        other = [fact for fact in other if fact.key not in _IMPLIED]
    return replace(pair, differences=tuple(other))


def _also(pair: Pair) -> str:
    """Return the differences that the names of the two do not show."""
    words = differences_text(pair).removeprefix("differs: ")
    return f"also differs: {words}" if words else ""
