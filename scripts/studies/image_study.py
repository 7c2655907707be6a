"""The published image study compared with runs, and a guide to the best combination per memory size and steps.

`scripts/readme-table` writes both into docs/evidence/results.md."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftbench.core import units
from ftbench.core.compare import Pace, break_even
from ftbench.report.data.axes import in_order
from ftbench.report.data.cells import FIRST, PEAK, STEP, Cell
from ftbench.report.document import Section, table_of_rows
from ftbench.spec.optimizations import OPTIMIZATIONS

IMAGES = "images_per_s.images"
LOSS = "loss.eval"
MEMORIES = (16, 24, 32, 48, 80, 96, 141)  # GiB of common GPUs
_ROOM = 0.95  # share of GPU memory available to tensors; the allocator and the driver use the rest
_OFF = ("off", "false", "auto", "none", "")
_LOADING = ("image_cache", "loader_processes")  # not described by the study
_FIGURES = ("step time", "memory", "first step", "pays after steps", "loss")


def _published() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


def sections(cells: Sequence[Cell]) -> list[Section]:
    """Return the study and the guide, or an empty list if no run trained on images."""
    shown = [cell for cell in cells if cell.values(IMAGES)]
    return [part for part in (study(shown), guide(shown)) if part is not None] if shown else []


def combination(cell: Cell) -> tuple[str, tuple[str, ...]]:
    """Return the method and the names of the optimizations of a cell."""
    names = (name for name in OPTIMIZATIONS if name not in _LOADING)
    on = sorted(name for name in names if cell.facts.get(f"optimizations.{name}", "off").lower() not in _OFF)
    return cell.facts.get("method.name", ""), tuple(on)


def _workload(cell: Cell) -> tuple[str, ...]:
    """Return the facts that compared runs share. The number of image tokens may differ."""
    keys = ("model.id", "model.weights", "gpu", "dataset.name", "dataset.image_size", "dataset.image_sizes",
            "dataset.images_per_sample", "method.vision")  # fmt: skip
    return (*(cell.facts.get(key, "") for key in keys), str(cell.gpus))


# --- published and measured -------------------------------------------------------------------------------------------


def study(cells: Sequence[Cell]) -> Section | None:
    """Return a row per combination and workload with a plain run.

    Published changes are relative to the study's 16-bit runs. Measured changes are relative to plain LoRA at the same
    batch, over all batches. Combinations that are not in the study come last.
    """
    table = _published()
    plain = {(_workload(cell), cell.batch): cell for cell in cells if combination(cell) == ("lora", ())}
    records = []
    for workload in dict.fromkeys(workload for workload, _ in plain):
        groups: dict[Any, list[tuple[Cell, Cell]]] = {}
        for cell in cells:
            if base := plain.get((_workload(cell), cell.batch)) if _workload(cell) == workload else None:
                groups.setdefault(combination(cell), []).append((base, cell))
        for published in table["combinations"]:
            named = (published["method"], tuple(sorted(published["with"])))
            records.append(_record(published, workload, groups.pop(named, [])))
        records += [_record({"name": pairs[0][1].way}, workload, pairs) for pairs in groups.values()]
    if not records:
        return None
    naming = ("combination", "model", "GPU", "batches here")
    headings = [*naming, *(f"{name}, {side}" for name in _FIGURES for side in ("published", "here"))]
    words = (
        f"Published: {table['source']}: {table['setting']}; changes are relative to its 16-bit runs. Here: relative to "
        "plain LoRA at the same batch, over all batches. GPU, data and fp8 differ, so compare only directions.",
        *_missing(records),
    )
    shown = table_of_rows(records, text=naming, headings=headings, shared=("model", "GPU"))
    return Section("image_study", "The study of images, published and measured here", shown, words, records)


def _missing(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the combinations of the study without a run here, and the command that runs them."""
    if names := dict.fromkeys(record["combination"] for record in records if not record["batches"]):
        yield f"Not run here: {'; '.join(names)}. `ftbench sweep configs/llava-next.yaml` runs them all."


def _record(
    published: Mapping[str, Any], workload: Sequence[str], pairs: Sequence[tuple[Cell, Cell]]
) -> dict[str, Any]:
    others = [(base, cell) for base, cell in pairs if base is not cell]
    measured = {
        "step time": _range(_changes(others, STEP)), "memory": _range(_changes(others, PEAK)),
        "first step": _span([cell.figure(FIRST) for _, cell in pairs], units.seconds),
        "pays after steps": _span([_pays(base, cell) for base, cell in others], lambda steps: f"{steps:,.0f}"),
        "loss": _span([cell.figure(LOSS) for _, cell in pairs], lambda loss: f"{loss:.2f}"),
    }  # fmt: skip
    reported = {
        "step time": _range(published.get("step", ())), "memory": _range(published.get("memory", ())),
        "first step": units.seconds(published["first_step_s"]) if "first_step_s" in published else "",
        "pays after steps": f"{published['break_even']:,}" if "break_even" in published else "",
        "loss": f"{published['eval_loss']:.2f}" if "eval_loss" in published else "",
    }  # fmt: skip
    batches = in_order(cell.batch for _, cell in pairs)
    return {
        "combination": published["name"], "model": workload[0].rsplit("/", 1)[-1], "GPU": workload[2],
        "batches here": ", ".join(batches), "batches": len(batches),
        **{f"{name}, published": reported[name] for name in _FIGURES},
        **{f"{name}, here": measured[name] for name in _FIGURES},
    }  # fmt: skip


def _changes(pairs: Sequence[tuple[Cell, Cell]], name: str) -> list[float]:
    """Return the known changes in percent."""
    both = [(base.figure(name), cell.figure(name)) for base, cell in pairs]
    return [100 * (own / plain - 1) for plain, own in both if plain and own]


def _pays(base: Cell, cell: Cell) -> float | None:
    """Return the steps after which a slower start pays off, or None."""
    before, after = base.pace(), cell.pace()
    return break_even(before, after).steps if before and after and break_even(before, after).when == "after" else None


def _range(changes: Sequence[float]) -> str:
    """Return `-53 to -47 %`."""
    ends = dict.fromkeys(f"{change:+.0f}" for change in (min(changes), max(changes))) if changes else {}
    return f"{' to '.join(ends)} %" if ends else ""


def _span(values: Sequence[float | None], text: Any) -> str:
    known = [value for value in values if value is not None]
    return " to ".join(dict.fromkeys(text(value) for value in (min(known), max(known)))) if known else ""


# --- the guide --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """The best cell from a number of images on, and that number in its own steps."""

    cell: Cell
    images: float
    steps: float


def guide(cells: Sequence[Cell]) -> Section | None:
    """Return, per workload and memory size, the cell that first finishes a number of images, start-up included.

    A memory size with the same result as the previous one is skipped.
    """
    records = []
    for workload in dict.fromkeys(map(_workload, cells)):
        own = [cell for cell in cells if _workload(cell) == workload and cell.measured and cell.figure(PEAK)]
        before: list[Choice] = []
        for memory in MEMORIES:
            choices = list(best(own, memory))
            if choices != before:
                records += [_chosen(workload, memory, choice) for choice in choices]
            before = choices
    if not records:
        return None
    published = _published()
    rules = "; ".join(f"{rule['take']} where {rule['where']}" for rule in published["guide"])
    words = (
        "The combination that first finishes this many images, start-up included, among those whose tensors need at "
        f"most {units.percent(_ROOM, 0)} of the memory. It also applies to larger memory, up to the next row.",
        f"The study's guide ({published['source']}): {rules}.",
    )
    table = table_of_rows(records, text=("model", "GPU", "data", "take"), shared=("model", "GPU", "data"))
    return Section("image_guide", "Images: which combination, from how many steps on", table, words, records)


def _chosen(workload: Sequence[str], memory: int, choice: Choice) -> dict[str, Any]:
    rate, peak = choice.cell.figure(IMAGES), choice.cell.figure(PEAK)
    return {
        "model": workload[0].rsplit("/", 1)[-1], "GPU": workload[2], "data": choice.cell.workload[2],
        "GiB of memory": f"{memory} or more", "take": choice.cell.name,
        "from images on": units.count(choice.images), "from steps on": units.count(choice.steps),
        "images/s": units.rate(rate), "peak GiB": units.gibibytes(peak),
    }  # fmt: skip


def best(cells: Sequence[Cell], memory: float) -> Iterator[Choice]:
    """Yield the cells that fit and are fastest for some number of images, in the order of that number."""
    paces = {
        id(cell): (cell, pace) for cell in cells
        if (cell.figure(PEAK) or memory) <= _ROOM * memory and (pace := cell.pace()) is not None
    }  # fmt: skip
    done = 0.0
    current = min(paces.values(), key=lambda pair: (_seconds(pair[1], done), -pair[1].samples_per_s), default=None)
    while current is not None:
        cell, pace = current
        images = (cell.figure(IMAGES) or 0.0) / pace.samples_per_s
        yield Choice(cell, done * images, done / pace.samples_per_step)
        crossings = [
            (crossing, -other.samples_per_s, following)
            for following in paces.values()
            if (other := following[1]).samples_per_s > pace.samples_per_s
            and (crossing := _crossing(pace, other)) >= done
        ]
        done, _, current = min(crossings, key=lambda each: each[:2], default=(done, 0.0, None))


def _seconds(pace: Pace, samples: float) -> float:
    return max(0.0, pace.start_s) + samples / pace.samples_per_s


def _crossing(pace: Pace, other: Pace) -> float:
    """Return the samples after which a faster pace makes up for its later start."""
    later = max(0.0, other.start_s) - max(0.0, pace.start_s)
    return max(0.0, later) / (1 / pace.samples_per_s - 1 / other.samples_per_s)
