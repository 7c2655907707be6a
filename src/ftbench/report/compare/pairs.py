"""Compare each cell (repeated runs of one spec) with its baseline: ratios and differences."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from ftbench.core import compare as core
from ftbench.core.compare import BreakEven, Difference, Ratio
from ftbench.report.data.axes import implied, value_at
from ftbench.report.data.cells import ENERGY, PEAK, SAMPLES, TOKENS, Cell, Run, sitting_spread
from ftbench.report.data.collect import figure
from ftbench.report.data.facts import IMPORTED
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise between repeated runs: the standard deviation of log(value) for each figure.

    `comparisons` is the number of comparisons for the Bonferroni correction. If `sittings` is true, intervals of single
    runs include the spread between sittings. A sitting is a group of runs on one card within 12 hours.
    """

    spread: Mapping[str, float] = field(default_factory=dict)
    comparisons: int = 1
    sittings: bool = True


def noise_of(cells: Iterable[Cell], comparisons: int = 1, *, sittings: bool = True) -> Noise:
    """Return the noise of speed and energy between the runs of a cell (repeated runs of one spec)."""
    cells = list(cells)
    spread = {name: core.spread_between(cell.values(name) for cell in cells) for name in (TOKENS, SAMPLES, ENERGY)}
    return Noise(spread, comparisons, sittings)


@dataclass(frozen=True, slots=True)
class Pair:
    """A cell (repeated runs of one spec), its baseline, and the comparison of both.

    A ratio is the cell's figure / the baseline's figure, or None if a figure is unknown. `first_step` has one ratio for
    each state of the compiler's cache. `differences` has the settings and machine facts that differ. `reason` explains
    a missing or weak comparison.
    """

    cell: Cell
    baseline: Cell | None
    differences: tuple[Difference, ...] = ()
    speed: Ratio | None = None
    memory: Ratio | None = None
    first_step: Mapping[str, Ratio] = field(default_factory=dict)
    energy: Ratio | None = None
    break_even: BreakEven | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of cells (repeated runs of one spec) by one key.

    `axis` is this key, and `baseline` is its baseline value. `cells` has all cells in table order. `pairs` has one
    entry per cell that is not a baseline.
    """

    axis: str
    baseline: str
    cells: tuple[Cell, ...]
    pairs: tuple[Pair, ...]

    def value(self, cell: Cell) -> str:
        return value_at(self.axis, cell.facts) or "unknown"


def compare(runs: Sequence[Run], axis: str, baseline: str | None = None, *, one_sitting: bool = False) -> Comparison:
    """Compare runs by a key: a short name (`gpu`, `method`, …), a spec key, or a fact about the machine.

    `baseline` is the baseline value, by default a plain value such as `none`, or the value with the most successful
    runs. With `one_sitting`, intervals are corrected for the number of comparisons. Without this correction, 1 of 20
    intervals shows a difference by chance. Raise SpecError if the key or the baseline does not exist.
    """
    from ftbench.report.compare.partners import along, baseline_value, partners

    key, cells = along(axis, runs)
    chosen = baseline_value(key, cells, baseline)
    noise = noise_of(cells, max(1, len(cells) - 1), sittings=False) if one_sitting else noise_of(cells)
    find = partners(key, [cell for cell in cells if value_at(key, cell.facts) == chosen])
    pairs = [pair_of(key, cell, *find(cell), noise) for cell in cells if value_at(key, cell.facts) != chosen]
    return Comparison(key, chosen, tuple(cells), tuple(pairs))


def pair_of(axis: str, cell: Cell, baseline: Cell | None, reason: str = "", noise: Noise | None = None) -> Pair:
    """Compare a cell (repeated runs of one spec) with its baseline. Return ratios and differences as a Pair.

    The tokens of an image depend on its size and on the model. If these differ, speeds are in samples per second."""
    if baseline is None:
        return Pair(cell, None, reason=reason)
    facts = core.differences(baseline.facts, cell.facts, lambda key: implied(axis, baseline.facts, cell.facts, key))
    differences = tuple(fact for fact in facts if _of_recipe(fact, baseline, cell))
    if not baseline.ok or not cell.ok:
        reason = "" if baseline.ok else "the baseline failed"
        return Pair(cell, baseline, differences, reason=reason)
    noise = noise or Noise()
    keys = ("optimizations.image_size", "model.id" if cell.values("images_per_s.images") else "")
    equal = all(baseline.facts.get(key) == cell.facts.get(key) for key in keys)
    rate = TOKENS if equal and baseline.values(TOKENS) and cell.values(TOKENS) else SAMPLES
    speed = _ratio(baseline, cell, rate, noise)
    paces = baseline.pace(), cell.pace()
    sides = [name for side, name in ((baseline, "the baseline"), (cell, "it")) if any(r.contended for r in side.ok)]
    reasons = [f"{' and '.join(sides)} shared the machine with other work (contended)"] if sides else []
    if len(baseline.valid) == len(cell.valid) == 1 and not all(steps_of(s.valid[0]).numbers for s in (baseline, cell)):
        reasons.append("there is no interval, because steps.csv of a run is missing or damaged")
    return Pair(
        cell, baseline, differences, speed=speed,
        memory=core.ratio_of_runs(baseline.values(PEAK), cell.values(PEAK)), first_step=_first_steps(baseline, cell),
        energy=_ratio(baseline, cell, ENERGY, noise),
        break_even=core.break_even(paces[0], paces[1]) if speed and speed.direction and paces[0] and paces[1] else None,
        reason="; ".join(reasons),
    )  # fmt: skip


# Facts that older runs do not record.
_RECENT = ("applied.trained_dtype", "applied.weights_dtype", "applied.loss_normalisation", "applied.padding")


def _of_recipe(fact: Difference, baseline: Cell, cell: Cell) -> bool:
    """Return whether the report lists this difference. A fact that one side could not record is not listed.

    Examples: a library that only one machine has, or a fact that failed runs, older runs or imported logs lack."""
    if fact.key.startswith("versions.") or fact.key in _RECENT:
        return None not in (fact.baseline, fact.candidate)
    if fact.key in core.UNPROVEN and IMPORTED in baseline.facts and IMPORTED in cell.facts:  # logs lack token hashes
        name = baseline.facts.get("dataset.name")
        return name is None or name != cell.facts.get("dataset.name")
    late = fact.key == "dataset.order_hash" or fact.key.startswith("applied.")
    return not late or bool(baseline.ok and cell.ok)


# --- figures ---------------------------------------------------------------------------------------------------------


# Each figure is the ratio of two columns of steps.csv.
_PER_STEP = {
    TOKENS: ("real_tokens", "step_time_s"),
    SAMPLES: ("samples", "step_time_s"),
    ENERGY: ("energy_j", "samples"),
}
_COLUMNS = ("step", "step_time_s", "real_tokens", "energy_j", "samples", "loss")


@dataclass(frozen=True, eq=False)
class Steps:
    """The timed training steps of one run: columns of steps.csv (None if unknown) and the number of warm-up steps."""

    columns: Mapping[str, Sequence[float | None]]
    warmup: int

    @cached_property
    def numbers(self) -> list[int]:
        return [int(number or 0) for number in self.columns["step"]]

    def per_step(self, above: str, below: str) -> dict[int, float]:
        """Return {step: column `above` / column `below`}, without warm-up steps and without steps that lack a value."""
        steady = list(zip(self.numbers, self.columns[above], self.columns[below], strict=True))[self.warmup :]
        return {step: a / b for step, a, b in steady if a and b and a > 0 and b > 0}

    @cached_property
    def samples_by_step(self) -> dict[int, float]:
        return {step: count for step, count in zip(self.numbers, self.columns["samples"], strict=True) if count}


@lru_cache(maxsize=64)  # a baseline is compared many times
def _steps(path: Path, ended_at: str | None, warmup: int) -> Steps:
    rows = [row for row in read_steps(RunDir(path).steps)[0] if row.phase in ("train", None) and row.step is not None]
    timed = [row for row in rows if row.step_time_s is not None and math.isfinite(row.step_time_s)]
    return Steps({name: [getattr(row, name) for row in timed] for name in _COLUMNS}, warmup)


def steps_of(run: Run) -> Steps:
    """Return the timed training steps of a run."""
    return _steps(run.dir.path, run.record.get("ended_at"), int(figure(run.record, "steps.warmup") or 0))


def _ratio(baseline: Cell, cell: Cell, name: str, noise: Noise) -> Ratio | None:
    """Return the ratio of a figure: `cell / baseline`. If each side has one run, the interval comes from the steps."""
    sides, spread = (baseline.values(name), cell.values(name)), noise.spread.get(name, core.TYPICAL_SPREAD)
    sitting = sitting_spread([baseline, cell], single=not noise.sittings)
    ratio = core.ratio_of_runs(*sides, spread=spread, comparisons=noise.comparisons, sitting=sitting)
    if ratio is None or max(map(len, sides)) > 1:
        return ratio
    first, second = baseline.valid[0], cell.valid[0]
    below, above = (steps_of(run).per_step(*_PER_STEP[name]) for run in (first, second))
    common = sorted(below.keys() & above.keys())
    before, after = (side.facts.get("dataset.order_hash") for side in (baseline, cell))
    paired = len(common) >= min(len(below), len(above)) / 2
    paired = paired and before is not None and before == after and _same_samples(first, second)
    columns = [[side[step] for step in common] if paired else list(side.values()) for side in (below, above)]
    return core.ratio_of_steps(
        ratio.value, *columns, paired=paired, spread=spread, comparisons=noise.comparisons, sitting=sitting
    )


def _first_steps(baseline: Cell, cell: Cell) -> dict[str, Ratio]:
    """Return {state of the compiler cache: ratio of first-step times, cell / baseline}. `none`: not compiled."""
    before, after = baseline.first_steps(), cell.first_steps()
    ratios = {state: core.ratio_of_runs(before.get(state) or before.get("none") or [], values)
              for state, values in after.items()}  # fmt: skip
    if len(before) == 1 and "none" in after and "none" not in before:
        ratios["none"] = core.ratio_of_runs(next(iter(before.values())), after["none"])
    return {state: ratio for state, ratio in ratios.items() if ratio is not None}


def _same_samples(first: Run, second: Run) -> bool:
    before, after = steps_of(first).samples_by_step, steps_of(second).samples_by_step
    common = before.keys() & after.keys()
    return bool(common) and all(before[step] == after[step] for step in common)
