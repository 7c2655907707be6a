"""What was predicted beside what was measured (`--estimates`): memory and time of every run, and the store's own
error."""

from collections.abc import Callable, Sequence

from ftbench.core import units
from ftbench.core.hardware import gpus
from ftbench.errors import FtbenchError
from ftbench.estimate.memory import calibrate, constants, measured
from ftbench.estimate.time.duration import DurationEstimate, estimate_duration
from ftbench.estimate.time.history import TimedRun, timed_run
from ftbench.estimate.time.run_index import Store
from ftbench.report.data.facts import CPU
from ftbench.report.data.groups import Cell
from ftbench.report.render.document import Section
from ftbench.report.sections.rows import Record, field, names_of, section

_TITLE = "Memory: estimated and measured"


def memory(cells: Sequence[Cell]) -> Section | None:
    """Return each run's memory as `ftbench estimate` predicts it for the batch that it had, with the constants in use.
    Of runs without a GPU it says that they have no row; None where there are neither."""
    records: list[Record] = []
    rows: list[calibrate.RunErrors] = []
    stored: list[measured.Measured] = []
    for of_cell, run in ((cell, run) for cell in cells for run in cell.runs):
        known = measured.measured(run.dir)
        if known is None:
            continue
        stored.append(known)
        ended = calibrate.RunErrors(known, known.estimate(constants.constants()), {})
        of_run = calibrate.rows([known], constants.constants()) if known.fits else [ended]
        rows += of_run
        records += [names_of(of_cell) | _record(row) for row in of_run]
    without = _without_gpu(cells)
    if not records:
        return Section("estimates", _TITLE, None, without) if without else None
    columns = {f"{tier} GiB": _measured(tier) for tier in measured.TIERS}
    columns |= {f"{tier} estimated": _estimated(tier) for tier in measured.TIERS} | {"verdict": field("verdict")}
    return section("estimates", _TITLE, records, columns, [*_errors(rows, stored), *without], text=("verdict",))


def _without_gpu(cells: Sequence[Cell]) -> list[str]:
    """Return a sentence on the runs that have no row for want of a GPU."""
    count = sum(len(cell.runs) for cell in cells if cell.facts["gpu"] == CPU)
    if not count:
        return []
    ran = "A run without a GPU has" if count == 1 else f"{units.count(count)} runs without a GPU have"
    return [f"{ran} no row: memory and time are estimated for GPUs only."]


def _record(row: calibrate.RunErrors) -> Record:
    fits = row.run.fits  # the peaks of one that ran out of memory say only what it had when it ended
    fields: Record = {"verdict": row.estimate.verdict, "state": "ok" if fits else "oom"}
    for tier in measured.TIERS:
        fields |= {
            tier: getattr(row.run, tier) if fits else None,
            f"{tier}_estimated": getattr(row.estimate, tier).expected,
            f"{tier}_error": row.errors.get(tier),
        }
    return fields


def _measured(tier: str) -> Callable[[Record], str]:
    return lambda record: units.gibibytes(record[tier]) or ("oom" if record["state"] == "oom" else "")


def _estimated(tier: str) -> Callable[[Record], str]:
    def text(record: Record) -> str:
        error = record[f"{tier}_error"]
        return units.gibibytes(record[f"{tier}_estimated"]) + (f" ({units.change(error)})" if error is not None else "")

    return text


def _errors(rows: Sequence[calibrate.RunErrors], stored: Sequence[measured.Measured]) -> list[str]:
    errors = {tier: calibrate.error(rows, tier) for tier in measured.TIERS}
    parts = [
        f"{tier} {units.percent(error.mean)} in the mean of {units.some(error.count, 'run')}, "
        f"{units.percent(error.worst)} at worst"
        for tier, error in errors.items()
        if error is not None
    ]
    wrong = calibrate.false_fits(stored, constants.constants())
    misjudged = f"Said to fit and did not: {', '.join(wrong) or 'none'}."
    return [f"Errors: {'; '.join(parts)}. {misjudged}" if parts else misjudged]


def time(cells: Sequence[Cell]) -> Section | None:
    """Return each run's step as `ftbench estimate` predicts it from the other runs given, without those of the same
    step; None where no run on a GPU of the table has enough steps to tell."""
    stored = [(cell, known) for cell in cells for run in cell.runs if (known := timed_run(run.dir)) is not None]
    store = Store(runs=[known for _, known in stored])
    records = []
    for cell, known in stored:
        if (estimated := _step(known, store)) is not None:
            measured_s = known.step_s * estimated.samples / known.samples
            records.append(names_of(cell) | {
                "step_s": measured_s, "step_s_estimated": estimated.step_s.expected,
                "step_s_error": estimated.step_s.expected / measured_s - 1, "basis": estimated.basis,
            })  # fmt: skip
    if not records:
        return None
    errors = [abs(record["step_s_error"]) for record in records]
    mean, worst = units.percent(sum(errors) / len(errors)), units.percent(max(errors))
    words = [f"Errors: {mean} in the mean of {units.some(len(errors), 'run')}, {worst} at worst."]
    columns = {
        "mean step": field("step_s", units.seconds), "estimated": field("step_s_estimated", units.seconds),
        "error": field("step_s_error", units.change), "from": field("basis"),
    }  # fmt: skip
    return section("estimated_times", "Time: estimated and measured", records, columns, words, text=("from",))


def _step(known: TimedRun, store: Store) -> DurationEstimate | None:
    gpu = next((gpu for gpu in gpus() if gpu.name == known.gpu), None)
    try:
        return estimate_duration(known.spec, gpu, store.without(known.key)) if gpu else None
    except FtbenchError:
        return None
