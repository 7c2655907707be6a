"""The overview of a workload: title, cards (fastest, least memory, failed), and the grid of batches that fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from ftbench.core import units
from ftbench.core.stats import MINIMUM_STEADY, grouped_by
from ftbench.report.compare.pairs import noise_of, pair_of
from ftbench.report.compare.words import change_in_words
from ftbench.report.data.axes import in_order
from ftbench.report.data.cells import PEAK, SAMPLES, TOKENS, Cell
from ftbench.report.data.collect import Record
from ftbench.report.data.facts import CPU
from ftbench.report.page.view import View

Card = tuple[str, str, str, str]  # label, answer, figures, more
_MOST_NAMES = 6


def cards(cells: Sequence[Cell]) -> list[Card]:
    """Return the cards of a workload, with the fastest cell for each number of GPUs."""
    counts = _by_count(cells)
    fastest = [
        _fastest_card(f"Fastest on {_gpus(count)}" if len(counts) > 1 else "Fastest that fits", own)
        for count, own in counts.items()
    ]
    return [*fastest, *_smallest_card(cells), _failed_card(cells)]


def _by_count(cells: Sequence[Cell]) -> dict[int, list[Cell]]:
    """Return cells by number of GPUs. Speeds on different numbers are not compared."""
    return {count: [cell for cell in cells if cell.gpus == count] for count in sorted({cell.gpus for cell in cells})}


def _gpus(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"


def title(view: View, workload: int) -> str:
    """Return the fastest recipe in one sentence, or the number of runs without a valid speed."""
    cells, model = view.cells[workload], view.workloads[workload].split(",")[0]
    if fastest := [ranked[0] for own in _by_count(cells).values() if (ranked := fastest_first(own))]:
        best, *others = fastest
        where = "" if best.facts["gpu"] == CPU else f" on {best.facts['gpu']}"
        on_gpus = f" on {_gpus(best.gpus)}" if others else ""
        more = "".join(f"; on {cell.gpus}: {_short_name(cell)}, {_per_hour(cell)}" for cell in others)
        return f"{model}{where}: {_short_name(best)} is fastest{on_gpus}, {_per_hour(best)} samples per hour{more}"
    own = [row for row in view.rows if row.workload == workload]
    gpus = list(dict.fromkeys(str(row.cell.facts["gpu"]) for row in own))
    where = ", ".join(gpus) if len(gpus) <= 3 else f"{len(gpus)} GPUs"
    return f"{model}: {len(own)} fine-tuning run{'s' * (len(own) > 1)} on {where}"


def _short_name(cell: Cell) -> str:
    """Return the cell's name without the number of GPUs and the number of steps."""
    return f"{cell.recipe} at batch {cell.batch}".replace(f" on {cell.gpus} GPUs", "")


def _per_hour(cell: Cell) -> str:
    return units.rate((cell.figure(SAMPLES) or 0.0) * 3600)


def fastest_first(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with a valid speed, fastest first, without contended runs and those with few steady steps."""
    valid = [own for cell in cells if (own := cell.without_contended()) and own.measured and own.figure(SAMPLES)]
    return sorted(valid, key=lambda cell: cell.figure(TOKENS) or cell.figure(SAMPLES) or 0.0, reverse=True)


def _fastest_card(label: str, cells: Sequence[Cell]) -> Card:
    ranked = fastest_first(cells)
    if not ranked:
        ended = any(cell.ok for cell in cells)
        why = (
            f"No valid speed: contended, or fewer than {MINIMUM_STEADY} steady steps." if ended else "All runs failed."
        )
        return (label, "none", why, "")
    best = ranked[0]
    figures = f"{_per_hour(best)} samples/h"
    if best.gpus > 1:
        figures += f" ({units.rate((best.figure(SAMPLES) or 0.0) * 3600 / best.gpus)} per GPU)"
    if tokens := best.figure(TOKENS):
        figures += f", {units.rate(tokens)} real tokens/s"
    peak = best.figure(PEAK)
    memory = f"{units.gibibytes(peak)} GiB of tensors at the peak. " if peak else ""
    return (label, _where(best, cells), figures, memory + _runner_up(ranked, cells))


def _runner_up(ranked: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Return the next fastest cell and how far it is behind."""
    if len(ranked) == 1:
        return "No other valid speed." if len(cells) > 1 else "The only one."
    best, second = ranked[:2]
    speed = pair_of("method.name", second, best, noise=noise_of(cells)).speed
    doubt = "" if speed is None or speed.direction else "not distinguishable: "
    return f"Next: {_where(second, cells)}, {doubt}{change_in_words(speed)}."


def _smallest_card(cells: Sequence[Cell]) -> list[Card]:
    fitting = [cell for cell in cells if cell.figure(PEAK)]
    if not fitting:
        return []
    least = min(fitting, key=lambda cell: (cell.figure(PEAK), -(cell.figure(SAMPLES) or 0.0)))
    ranked = fastest_first([cell for cell in cells if cell.gpus == least.gpus])
    speed, rate = "", least.figure(SAMPLES)
    if ranked and rate:
        share = rate / (ranked[0].figure(SAMPLES) or rate) - 1
        own = ranked[0].runs[0].run_id == least.runs[0].run_id
        slower = f"{units.rate(rate * 3600)} samples/h, {units.change(share, 0)} compared with the fastest."
        speed = "It is also the fastest." if own else slower
    figure = f"{units.gibibytes(least.figure(PEAK))} GiB of tensors at the peak{' per GPU' * (least.gpus > 1)}"
    return [("Least memory", _where(least, cells), figure, speed)]


def _failed_card(cells: Sequence[Cell]) -> Card:
    count = sum(len(cell.runs) for cell in cells)
    failed = [(run, cell) for cell in cells for run in cell.runs if not run.ok]
    if not failed:
        return ("Failed", "nothing", f"{count} of {units.some(count, 'run')} succeeded", "")
    states: dict[str, dict[int, Cell]] = {}
    for run, cell in failed:
        states.setdefault(str(run.record["state"]), {})[id(cell)] = cell
    listed = []
    for state, own in states.items():
        more = f" and {len(own) - _MOST_NAMES} more" if len(own) > _MOST_NAMES else ""
        words = "Out of memory" if state == "oom" else state.capitalize()
        listed.append(f"{words}: {'; '.join(_where(cell, cells) for cell in list(own.values())[:_MOST_NAMES])}{more}.")
    return ("Failed", f"{len(failed)} of {units.some(count, 'run')}", " ".join(listed), "")


def _where(cell: Cell, cells: Sequence[Cell]) -> str:
    """Return the cell's name, with its GPU if the GPUs differ."""
    several = len({other.facts["gpu"] for other in cells}) > 1
    return cell.name + (f", on {cell.facts['gpu']}" if several else "")


# --- what fits -------------------------------------------------------------------------------------------------------

Spot = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class FitGrid:
    """A grid of recipe and batch.

    `workload` is the index of the workload. Each line is a recipe with one spot per batch: kind, result, and details.
    """

    workload: int
    caption: str
    batches: list[str]
    lines: list[tuple[str, list[Spot]]]


def grids(view: View) -> list[FitGrid]:
    """Return a grid per workload and GPU, of the recipes that ran at several batches or failed."""
    listed = []
    for workload, cells in enumerate(view.cells):
        groups = grouped_by(cells, lambda cell: str(cell.facts["gpu"]))
        listed += [grid for gpu, own in groups.items() if (grid := _grid(workload, gpu, own)).lines]
    return listed


def _grid(workload: int, caption: str, cells: Sequence[Cell]) -> FitGrid:
    ways: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        ways.setdefault(cell.way, {})[cell.batch] = cell
    lines = {
        way: line for way, line in ways.items()
        if len(line) > 1 or not all(run.ok for cell in line.values() for run in cell.runs)
    }  # fmt: skip
    batches = in_order(batch for line in lines.values() for batch in line)
    spots = [(way, [_spot(line.get(batch)) for batch in batches]) for way, line in lines.items()]
    return FitGrid(workload, caption, batches, spots)


def _spot(cell: Cell | None) -> Spot:
    if cell is None:
        return "none", "", "–"
    failed = [run for run in cell.runs if not run.ok]
    if not cell.ok:
        states = dict.fromkeys(str(run.record["state"]) for run in failed)
        words = " / ".join("out of memory" if state == "oom" else state for state in states)
        return "oom" if "oom" in states else "weak", words, _failure(failed[0].record)
    count = f" ({len(cell.ok)} of {len(cell.runs)})" if failed else ""
    peaks, rate = cell.values(PEAK), cell.figure(SAMPLES)
    figure = f"{units.gibibytes(max(peaks))} GiB" if peaks else "fits"
    return "some" if failed else "fits", figure + count, f"{units.rate(rate * 3600)} /h" if rate else ""


def _failure(record: Record) -> str:
    phase, step, reason = record.get("oom.phase"), record.get("oom.step"), record.get("reason")
    if isinstance(phase, str) and isinstance(step, (int, float)):
        return f"{phase}, step {step:.0f}"
    return reason[:40] if record["state"] != "oom" and isinstance(reason, str) else ""
