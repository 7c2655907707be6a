"""Comparable runs of a report, ranked by speed: runs of one workload, card and commit, valid, and long enough."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ftbench.core import units
from ftbench.core.stats import MINIMUM_STEADY, grouped_by
from ftbench.report.compare.pairs import Noise, Pair, noise_of, pair_of
from ftbench.report.data.axes import PLAIN
from ftbench.report.data.cells import SAMPLES, TOKENS, Cell, Run
from ftbench.report.data.facts import CARD, COMMIT, CPU, LIMIT
from ftbench.report.data.groups import named
from ftbench.spec.experiment import DAMAGED, RECORDED
from ftbench.store.rundir import NOT_FINITE
from ftbench.store.summary import PROFILED, SHARED

_STATES = {"oom": "out of memory", NOT_FINITE: "not finite", "running": "unfinished", "interrupted": "unfinished"}
_WARNINGS = {PROFILED: "profiled", SHARED: "contended", DAMAGED: "control", RECORDED: "control"}
# Facts that comparable runs share, with the words for the runs that differ in them.
_SHARED = {
    "model": "of other models", "data": "of other data", "dataset.max_length": "of other sample lengths",
    "objective.name": "of other objectives", "launch.gpus": "on another number of GPUs", "gpu": "on other machines",
    CARD: "on other cards", LIMIT: "at other power limits", COMMIT: "of other commits",
}  # fmt: skip
# Names show these facts, or they only change the length of the training.
_IN_NAMES = ("method.", "optimizations.", "applied.", "train.optimizer", "train.batch_size", "launch.framework",
             "launch.settings", "train.gradient_accumulation_steps", "dataset.hash", "dataset.order_hash",
             "train.max_steps", "train.epochs", "dataset.samples")  # fmt: skip


def unusable(run: Run) -> str:
    """Return why the speed of a run is not used in an answer, or an empty string."""
    state, warnings = str(run.record["state"]), run.record["warnings"]
    if state != "ok":
        return _STATES.get(state, "failed")
    if marked := [word for start, word in _WARNINGS.items() if any(text.startswith(start) for text in warnings)]:
        return marked[0]
    if run.contended:
        return "contended"
    if not (run.record.get(TOKENS) or run.record.get(SAMPLES)):
        return "without a speed"
    return f"with fewer than {MINIMUM_STEADY} steady steps" if run.steady < MINIMUM_STEADY else ""


def _shared_facts(cell: Cell) -> tuple[str, ...]:
    model, weights, data = cell.workload
    known = {**cell.facts, "model": f"{model}, {weights} weights" if weights else model, "data": data}
    return tuple(known.get(name, "") for name in _SHARED)


@dataclass(frozen=True)
class Ranking:
    """Comparable cells with their usable runs. It has the fastest cell of each recipe, the fastest recipe first."""

    key: tuple[str, ...]
    cells: tuple[Cell, ...]
    noise: Noise

    @cached_property
    def best(self) -> list[Cell]:
        best: dict[str, Cell] = {}
        for cell in sorted(self.cells, key=rate_of, reverse=True):
            best.setdefault(cell.recipe, cell)
        return list(best.values())

    @property
    def winner(self) -> Cell:
        return self.best[0]

    @property
    def plain(self) -> Cell | None:
        return next((cell for cell in self.best if cell.recipe == PLAIN[0]), None)

    @property
    def runs(self) -> int:
        return sum(len(cell.runs) for cell in self.cells)

    @property
    def about(self) -> str:
        """The workload and the card."""
        fact = dict(zip(_SHARED, self.key, strict=True))
        gpu = "the CPU" if fact["gpu"] == CPU else fact["gpu"]
        count = "" if self.winner.gpus == 1 else f"{self.winner.gpus} x "
        return f"{fact['model'].rsplit('/', 1)[-1]}, {fact['data']}, on {count}{gpu}"

    def name(self, cell: Cell) -> str:
        """Return the recipe, with its batch if the batches differ."""
        return cell.recipe if len({each.batch for each in self.cells}) == 1 else f"{cell.recipe} at batch {cell.batch}"

    def against(self, baseline: Cell, cell: Cell | None = None) -> Pair:
        """Return the pair of a cell (the winner) and a baseline, with the differences that their names do not show."""
        pair = pair_of("method.name", cell or self.winner, baseline, noise=self.noise)
        return replace(pair, differences=tuple(
            fact for fact in pair.differences if not fact.key.startswith(_IN_NAMES)
        ))  # fmt: skip


def rankings(cells: Iterable[Cell]) -> tuple[list[Ranking], Counter[str]]:
    """Return the comparable groups, the one with the most recipes and runs first; and the unusable runs by reason."""
    left_out: Counter[str] = Counter()
    used = []
    for cell in cells:
        reasons = [(run, unusable(run)) for run in cell.runs]
        left_out.update(reason for _, reason in reasons if reason)
        if runs := tuple(run for run, reason in reasons if not reason):
            used.append(replace(cell, runs=runs))
    noise = noise_of(used)
    groups = grouped_by(used, _shared_facts)
    made = [Ranking(key, tuple(named(group)), noise) for key, group in groups.items()]
    return sorted(made, key=lambda each: (-len(each.best), -each.runs)), left_out


def rate_of(cell: Cell) -> float:
    return cell.figure(TOKENS) or cell.figure(SAMPLES) or 0.0


def left_out_text(ranked: Sequence[Ranking], left_out: Mapping[str, int]) -> tuple[str, dict[str, int]]:
    """Return one line that counts the runs outside the first ranking by reason, and these counts."""
    counts = Counter(left_out)
    for other in ranked[1:]:
        differing = (name for name, a, b in zip(_SHARED, ranked[0].key, other.key, strict=True) if a != b)
        counts[_SHARED[next(differing)]] += other.runs
    if not counts:
        return "", {}
    words = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
    total = units.some(sum(counts.values()), "run")
    more = " `--answers` compares other groups." if len(ranked) > 1 else ""
    return f"Left out: {total}: {words}.{more}", dict(counts)
