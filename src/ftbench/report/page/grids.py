"""Ways of training × batch, a grid for each workload and GPU on which something was tried at several batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from ftbench.core import units
from ftbench.core.grouping import grouped_by
from ftbench.report.data.axes import in_order
from ftbench.report.data.collect import Record
from ftbench.report.data.groups import PEAK, SAMPLES, Cell
from ftbench.report.page.view import View

Spot = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class FitGrid:
    """A grid: the place of its workload, its batches, and a line for each way of training with a spot for each batch
    (one spec each): the kind of its end, what it came to, and more on that."""

    workload: int
    caption: str
    batches: list[str]
    lines: list[tuple[str, list[Spot]]]


def grids(view: View) -> list[FitGrid]:
    """Return a grid for each workload and GPU on which something was tried at several batches, or failed."""
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
        return "oom" if "oom" in states else "weak", words, _where_it_failed(failed[0].record)
    count = f" ({len(cell.ok)} of {len(cell.runs)})" if failed else ""
    peaks, rate = cell.values(PEAK), cell.figure(SAMPLES)
    figure = f"{units.gibibytes(max(peaks))} GiB" if peaks else "fits"
    return "some" if failed else "fits", figure + count, f"{units.rate(rate * 3600)} /h" if rate else ""


def _where_it_failed(record: Record) -> str:
    phase, step, reason = record.get("oom.phase"), record.get("oom.step"), record.get("reason")
    if isinstance(phase, str) and isinstance(step, (int, float)):
        return f"{phase}, step {step:.0f}"
    return reason[:40] if record["state"] != "oom" and isinstance(reason, str) else ""
