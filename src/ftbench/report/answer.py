"""The answer at the start of a report: the fastest recipe, compared with the next recipe and with `plain`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ftbench.core import units
from ftbench.core.compare import Ratio
from ftbench.core.stats import MINIMUM_STEADY, grouped_by
from ftbench.report.compare.pairs import Noise, Pair, noise_of, pair_of
from ftbench.report.data.axes import PLAIN
from ftbench.report.data.cells import PEAK, SAMPLES, TOKENS, Cell, Run, number_of
from ftbench.report.data.facts import CARD, COMMIT, CPU, LIMIT
from ftbench.report.data.groups import named
from ftbench.report.document import ANSWER, Section, Table
from ftbench.spec.experiment import DAMAGED, RECORDED
from ftbench.store.rundir import NOT_FINITE
from ftbench.store.summary import PROFILED

_NUMBERS = {1: "one", 2: "two", 3: "three"}
_SMALLER = 0.95  # the recipe with the least memory is named if it needs less than this share of the winner's
_MOST_NAMED, _MOST_GROUPS, _MOST_ROWS = 6, 6, 20
_STATES = {"oom": "out of memory", NOT_FINITE: "not finite", "running": "unfinished", "interrupted": "unfinished"}
NOT_TIMED = {PROFILED: "profiled", DAMAGED: "control", RECORDED: "control"}  # warnings of runs without a valid speed
# Facts that comparable runs share, and words for runs that are left out because they differ in this fact.
_SHARED = {
    "model": "of other models", "data": "of other data", "dataset.max_length": "of other sample lengths",
    "objective.name": "of other objectives", "launch.gpus": "on another number of GPUs", "gpu": "on other machines",
    CARD: "on other cards", LIMIT: "at other power limits", COMMIT: "of other commits",
}  # fmt: skip
_PLACE = ("gpu", CARD, LIMIT, COMMIT)  # facts that do not change the work
# Facts that are not listed as differences: names show them, or they only change the length of the training.
_IN_NAMES = ("optimizations.", "applied.", "train.batch_size", "launch.framework",
             "launch.settings", "train.gradient_accumulation_steps", "dataset.hash", "dataset.order_hash",
             "train.max_steps", "train.epochs", "dataset.samples")  # fmt: skip


def unusable(run: Run) -> str:
    """Return the reason why an answer ignores a run, such as `contended`. Return an empty string for a usable run."""
    state, warnings = str(run.record["state"]), run.record["warnings"]
    if state != "ok":
        return _STATES.get(state, "failed")
    if marked := [word for start, word in NOT_TIMED.items() if any(text.startswith(start) for text in warnings)]:
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
    """Cells (repeated runs of one spec) with comparable speeds. `best` has the fastest cell of each recipe."""

    key: tuple[str, ...]
    cells: tuple[Cell, ...]
    noise: Noise

    @cached_property
    def best(self) -> list[Cell]:
        ranked = sorted(self.cells, key=rate_of, reverse=True)
        return [group[0] for group in grouped_by(ranked, lambda cell: cell.recipe).values()]

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
        """A text with the model, the data and the GPU of this ranking."""
        fact = dict(zip(_SHARED, self.key, strict=True))
        gpu = "the CPU" if fact["gpu"] == CPU else fact["gpu"]
        count = "" if self.winner.gpus == 1 else f"{self.winner.gpus} x "
        return f"{fact['model'].rsplit('/', 1)[-1]}, {fact['data']}, on {count}{gpu}"

    def name(self, cell: Cell) -> str:
        """Return the recipe of a cell (repeated runs of one spec). If batch sizes differ, add the batch size."""
        return cell.recipe if len({each.batch for each in self.cells}) == 1 else f"{cell.recipe} at batch {cell.batch}"

    def against(self, baseline: Cell, cell: Cell | None = None) -> Pair:
        """Return the comparison of a cell (by default the fastest cell) with a baseline. Leave out the differences that
        the names of the cells show."""
        pair = pair_of("method.name", cell or self.winner, baseline, noise=self.noise)
        return replace(pair, differences=tuple(
            fact for fact in pair.differences if not fact.key.startswith(_IN_NAMES)
        ))  # fmt: skip


def rankings(cells: Iterable[Cell]) -> tuple[list[Ranking], Counter[str]]:
    """Return one ranking per group of comparable runs, and {reason: number of ignored runs}. The group with the most
    recipes comes first."""
    left_out: Counter[str] = Counter()
    used = []
    for cell in cells:
        reasons = [(run, unusable(run)) for run in cell.runs]
        left_out.update(reason for _, reason in reasons if reason)
        if runs := tuple(run for run, reason in reasons if not reason):
            used.append(replace(cell, runs=runs))
    noise = noise_of(used)
    groups = grouped_by(used, _shared_facts)
    ranked = [Ranking(key, tuple(named(group)), noise) for key, group in groups.items()]
    return sorted(ranked, key=lambda each: (-len(each.best), -each.runs)), left_out


def rate_of(cell: Cell) -> float:
    return cell.figure(TOKENS) or cell.figure(SAMPLES) or 0.0


def left_out_text(
    ranked: Sequence[Ranking], left_out: Mapping[str, int], full: bool = False
) -> tuple[str, dict[str, int]]:
    """Count the runs that the answer leaves out. Return a text for the report, and {reason: number of runs}."""
    counts, faster, highest = Counter(left_out), "", rate_of(ranked[0].winner) if ranked else 0.0
    for other in ranked[1:]:
        differing = [name for name, a, b in zip(_SHARED, ranked[0].key, other.key, strict=True) if a != b]
        counts[_SHARED[differing[0]]] += other.runs
        if differing[0] in _PLACE and rate_of(other.winner) > highest:
            highest = rate_of(other.winner)
            faster = f" The fastest run that was left out: {other.name(other.winner)}, {_speed(other.winner)}."
    if not counts:
        return "", {}
    words = [f"{count:,} {reason}" for reason, count in counts.items()]
    total = units.some(sum(counts.values()), "run")
    text = f"{total} {next(iter(counts))}" if len(words) == 1 else f"{total} ({', '.join(words)})"
    more = " `--answers` compares other groups." if len(ranked) > 1 and not full else ""
    return f"Left out: {text}.{faster}{more}", dict(counts)


# --- the sentences --------------------------------------------------------------------------------------------------


def sections(cells: Iterable[Cell], *, full: bool = False) -> list[Section]:
    """Return the sections of the answer. With `full`, each further group of comparable runs also has a section."""
    ranked, reasons = rankings(cells)
    text, counts = left_out_text(ranked, reasons, full)
    if not ranked:
        return [Section(ANSWER, "Answer", None, [f"No run has a valid speed. {text}"], left_out=counts)] if text else []
    first = _section(ANSWER, ranked[0], [text] if text else [])
    more = [
        _section(f"{ANSWER}_{number}", each) for number, each in enumerate(ranked[1:_MOST_GROUPS] if full else (), 2)
    ]
    return [replace(first, left_out=counts), *more]


def _section(key: str, ranking: Ranking, more: Sequence[str] = ()) -> Section:
    texts, records = [_winner(ranking)], _records(ranking)
    if len(ranking.best) > 1:
        texts += [_lead(ranking), *_memory(ranking)]
    return Section(key, ranking.about, _table(records), [*texts, *more], records)


def _winner(ranking: Ranking) -> str:
    winner, count = ranking.winner, len(ranking.best)
    rank = f"is the fastest of {count} recipes" if count > 1 else "is the only recipe"
    figures = [_speed(winner)]
    if winner.figure(TOKENS) and (ends := winner.speed_interval()):
        figures[0] += f" (95 %: {units.rate(ends[0])} to {units.rate(ends[1])})"
    if peak := winner.figure(PEAK):
        figures.append(f"{units.gibibytes(peak)} GiB")
    figures.append(units.some(len(winner.runs), "run"))
    return f"{ranking.name(winner)} {rank}: {', '.join(figures)}. {ranking.about}{_rounds(ranking)}."


def _speed(cell: Cell) -> str:
    tokens = cell.figure(TOKENS)
    return f"{units.rate(tokens)} tokens/s" if tokens else f"{units.rate(cell.samples_per_hour)} samples/h"


def _rounds(ranking: Ranking) -> str:
    """Return the repeats of each recipe: `: three rounds, one card, one commit`. Empty for one recipe or no repeats."""
    least, *_, most = sorted([len(cell.runs) for cell in ranking.best] * 2)
    if len(ranking.best) == 1 or most == 1:
        return ""
    words = [_NUMBERS.get(number, str(number)) for number in dict.fromkeys((least, most))]
    cards = "one card" if ranking.winner.gpus == 1 else "the same cards"
    cards = "one kind of CPU" if ranking.winner.facts["gpu"] == CPU else cards
    code = "release" if ranking.winner.facts.get(COMMIT, "").startswith("release") else "commit"
    return f": {' to '.join(words)} rounds, {cards}, one {code}"


def _lead(ranking: Ranking) -> str:
    """Compare the fastest recipe with the next recipe and with `plain`, in one or two sentences."""
    second, plain = ranking.best[1], ranking.plain
    pairs = [ranking.against(second)]
    words = [times(pairs[0].speed, f"the next recipe, {ranking.name(second)}")]
    if plain and plain not in (second, ranking.winner):
        pairs.append(ranking.against(plain))
        words.append(times(pairs[1].speed, ranking.name(plain)))
    keys = dict.fromkeys(fact.key for pair in pairs for fact in pair.differences)
    also = f" They also differ in {units.listed(list(keys), _MOST_NAMED)}." if keys else ""
    return f"The fastest recipe is {'; '.join(words)}.{also}"


def times(ratio: Ratio | None, name: str) -> str:
    """Return a speed ratio as text: `likely 1.50 times as fast as plain (95 %: 1.42 to 1.58; one run)`."""
    if ratio is None:
        return f"not comparable with {name}"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f} times as fast as {name} (too few steps for an interval)"
    few = "; one run" if min(ratio.runs) == 1 else ""
    ends = f"(95 %: {ratio.low:.2f} to {ratio.high:.2f}{few})"
    if not ratio.direction:
        return f"not distinguishable in speed from {name} {ends}"
    return f"{'likely ' if few else ''}{ratio.value:.2f} times as fast as {name} {ends}"


def _memory(ranking: Ranking) -> Iterator[str]:
    known = [cell for cell in ranking.cells if cell.figure(PEAK)]
    least = min(known, key=lambda cell: cell.figure(PEAK) or 0.0, default=None)
    winner = ranking.winner
    if least is None or not (needs := least.figure(PEAK)) or needs >= _SMALLER * (winner.figure(PEAK) or 0.0):
        return
    speed = ranking.against(winner, least).speed
    share = "" if speed is None else f", {speed.value:.2f} times the speed of the fastest"
    yield f"Least memory: {ranking.name(least)}, {units.gibibytes(needs)} GiB{share}."


def rank_text(path: str, cells: Sequence[Cell]) -> str:
    """Return the rank of a run among comparable recipes as text, or the reason why comparisons ignore the run."""
    for run in (run for cell in cells for run in cell.runs if run.record["path"] == path):
        if reason := unusable(run):
            return f"left out of comparisons: {reason}"
    for ranking in rankings(cells)[0]:
        recipes = [cell.recipe for cell in ranking.cells if any(run.record["path"] == path for run in cell.runs)]
        if not recipes or len(ranking.best) == 1:
            continue
        position = [cell.recipe for cell in ranking.best].index(recipes[0])
        cell, count = ranking.best[position], f"{len(ranking.best)} comparable recipes"
        if position == 0:
            return f"{ranking.name(cell)} is the fastest of {count}"
        lead = times(ranking.against(cell).speed, ranking.name(cell))
        return f"{ranking.name(cell)} is number {position + 1} of {count}; {ranking.name(ranking.winner)} is {lead}"
    return ""


# --- the ranking as a table ------------------------------------------------------------------------------------------


def _table(records: Sequence[Mapping[str, Any]]) -> Table:
    headings = ["recipe", "tokens/s", "peak GiB", "×", "samples/h", "runs"]
    rows = [
        [record["recipe"], units.rate(record["tokens_per_s"]), units.gibibytes(record["peak_gb"]), _interval(record),
         units.rate(record["samples_per_hour"]), str(record["runs"])]
        for record in records
    ]  # fmt: skip
    return Table({"× relative to": records[0]["baseline"]}, headings, rows, [], ("recipe",))


def _interval(record: Mapping[str, Any]) -> str:
    if record["ratio"] is None or record["low"] is None:
        return "1" if record["recipe"] == record["baseline"] else ""
    return f"{record['ratio']:.2f} ({record['low']:.2f} to {record['high']:.2f})"


def _records(ranking: Ranking) -> list[dict[str, Any]]:
    """Return one flat dict per recipe, the fastest first. The recipes are compared with `plain`. If `plain` is missing,
    they are compared with the slowest of the recipes that have the most runs."""
    slowest = max(reversed(ranking.best), key=lambda cell: len(cell.runs))
    baseline, listed, records = ranking.plain or slowest, ranking.best[:_MOST_ROWS], list[dict[str, Any]]()
    for cell in listed if baseline in listed else [*listed, baseline]:
        ratio = None if cell is baseline else ranking.against(baseline, cell).speed
        ends = cell.speed_interval() or (None, None)
        records.append({
            "recipe": ranking.name(cell), "batch": cell.batch, "tokens_per_s": cell.figure(TOKENS),
            "tokens_per_s_low": ends[0], "tokens_per_s_high": ends[1], "samples_per_hour": cell.samples_per_hour,
            "peak_gb": cell.figure(PEAK), "runs": len(cell.runs), "baseline": ranking.name(baseline),
            "ratio": ratio.value if ratio else None, "low": ratio.low if ratio else None,
            "high": ratio.high if ratio else None, "verdict": ratio.verdict if ratio else None,
            "run_ids": " ".join(run.run_id for run in cell.runs),
            "numbers": " ".join(number_of(run.record) for run in cell.runs),
        })  # fmt: skip
    return records
