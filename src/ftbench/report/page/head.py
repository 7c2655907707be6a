"""What a workload comes to at a glance: a title, the fastest that fits, the smallest, and what failed."""

from collections.abc import Sequence

from ftbench.core import units
from ftbench.core.stats import MINIMUM_STEADY
from ftbench.report.compare.pairs import noise_of, pair_of
from ftbench.report.compare.words import change_in_words
from ftbench.report.data.facts import CPU
from ftbench.report.data.groups import PEAK, SAMPLES, TOKENS, Cell
from ftbench.report.page.view import View

Card = tuple[str, str, str, str]  # label, answer, figures, more
_MOST_NAMES = 6


def cards(cells: Sequence[Cell]) -> list[Card]:
    """Return what a workload's groups come to, the fastest of each number of GPUs."""
    counts = _by_count(cells)
    fastest = [
        _fastest_card(f"Fastest on {_gpus(count)}" if len(counts) > 1 else "Fastest that fits", own)
        for count, own in counts.items()
    ]
    return [*fastest, *_smallest_card(cells), _failed_card(cells)]


def _by_count(cells: Sequence[Cell]) -> dict[int, list[Cell]]:
    """Return cells by the number of their GPUs: speeds on unlike numbers are not compared."""
    return {count: [cell for cell in cells if cell.gpus == count] for count in sorted({cell.gpus for cell in cells})}


def _gpus(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"


def title(view: View, workload: int) -> str:
    """Return the answer of a workload in one sentence; how many runs it has where none can be relied on."""
    cells, model = view.cells[workload], view.workloads[workload].split(",")[0]
    if fastest := [ranked[0] for own in _by_count(cells).values() if (ranked := fastest_first(own))]:
        best, *others = fastest
        where = "" if best.facts["gpu"] == CPU else f" on {best.facts['gpu']}"
        beside = f" on {_gpus(best.gpus)}" if others else ""
        more = "".join(f"; on {cell.gpus}: {_alone(cell)}, {_per_hour(cell)}" for cell in others)
        return f"{model}{where}: {_alone(best)} is fastest{beside}, {_per_hour(best)} samples per hour{more}"
    own = [row for row in view.rows if row.workload == workload]
    gpus = list(dict.fromkeys(str(row.cell.facts["gpu"]) for row in own))
    where = ", ".join(gpus) if len(gpus) <= 3 else f"{len(gpus)} GPUs"
    return f"{model}: {len(own)} fine-tuning run{'s' * (len(own) > 1)} on {where}"


def _alone(cell: Cell) -> str:
    """Return the cell's name as a sentence tells it that has the number of GPUs, and is about no single run."""
    return f"{cell.recipe} at batch {cell.batch}".replace(f" on {cell.gpus} GPUs", "")


def _per_hour(cell: Cell) -> str:
    return units.rate((cell.figure(SAMPLES) or 0.0) * 3600)


def fastest_first(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose speed can be relied on, the fastest first: contended runs and those of fewer than five
    steady steps are left out."""
    alone = [own for cell in cells if (own := cell.undisturbed()) and own.measured and own.figure(SAMPLES)]
    return sorted(alone, key=lambda cell: cell.figure(TOKENS) or cell.figure(SAMPLES) or 0.0, reverse=True)


def _fastest_card(label: str, cells: Sequence[Cell]) -> Card:
    ranked = fastest_first(cells)
    if not ranked:
        ended = any(cell.ok for cell in cells)
        why = f"No undisturbed run has {MINIMUM_STEADY} steady steps." if ended else "No run ended well."
        return (label, "none", why, "")
    best = ranked[0]
    figures = f"{_per_hour(best)} samples/h"
    if best.gpus > 1:
        figures += f" ({units.rate((best.figure(SAMPLES) or 0.0) * 3600 / best.gpus)} a GPU)"
    if tokens := best.figure(TOKENS):
        figures += f", {units.rate(tokens)} real tokens/s"
    peak = best.figure(PEAK)
    memory = f"{units.gibibytes(peak)} GiB of tensors at the peak. " if peak else ""
    return (label, _where(best, cells), figures, memory + _runner_up(ranked, cells))


def _runner_up(ranked: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Return what speaks against taking the fastest at its word: how far the next one is behind."""
    if len(ranked) == 1:
        return "Nothing else was measured." if len(cells) > 1 else "The only one."
    best, second = ranked[:2]
    speed = pair_of("method.name", second, best, noise=noise_of(cells)).speed
    doubt = "" if speed is None or speed.direction else "not told apart: "
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
        slower = f"{units.rate(rate * 3600)} samples/h, {units.change(share, 0)} against the fastest."
        speed = "It is also the fastest." if own else slower
    figure = f"{units.gibibytes(least.figure(PEAK))} GiB of tensors at the peak{' of each GPU' * (least.gpus > 1)}"
    return [("Least memory", _where(least, cells), figure, speed)]


def _failed_card(cells: Sequence[Cell]) -> Card:
    count = sum(len(cell.runs) for cell in cells)
    failed = [(run, cell) for cell in cells for run in cell.runs if not run.ok]
    if not failed:
        return ("Failed", "nothing", f"{count} of {units.some(count, 'run')} ended well", "")
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
    """Return the cell's name, with its GPU where these differ."""
    several = len({other.facts["gpu"] for other in cells}) > 1
    return cell.name + (f", on {cell.facts['gpu']}" if several else "")
