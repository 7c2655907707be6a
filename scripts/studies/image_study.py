"""Write a guide to the best combination of optimizations for a memory size and a number of steps, from runs with
images.

`scripts/readme-table` writes it into docs/evidence/results.md; founding-images compares the study with its runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftbench.core import units
from ftbench.core.compare import Pace
from ftbench.report.data.cells import PEAK, Cell
from ftbench.report.document import Section, table_of

IMAGES = "images_per_s.images"
MEMORIES = (16, 24, 32, 48, 80, 96, 141)  # GiB of common GPUs
_ROOM = 0.95  # share of GPU memory available to tensors; the allocator and the driver use the rest


def published_study() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


def sections(cells: Sequence[Cell]) -> list[Section]:
    """Return the guide, or an empty list if no run trained on images."""
    found = guide([cell for cell in cells if cell.values(IMAGES)])
    return [found] if found else []


def _workload(cell: Cell) -> tuple[str, ...]:
    """Return the facts in which compared runs must agree. The number of image tokens may differ."""
    keys = ("model.id", "model.weights", "gpu", "dataset.name", "dataset.image_size", "dataset.image_sizes",
            "dataset.images_per_sample", "method.vision")  # fmt: skip
    return (*(cell.facts.get(key, "") for key in keys), str(cell.gpus))


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest cell for trainings of at least `images` images. `steps` is the same number in steps of this cell."""

    cell: Cell
    images: float
    steps: float


def guide(cells: Sequence[Cell]) -> Section | None:
    """Return the fastest cell for each workload, memory size and number of images. Its time includes the start.

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
    published = published_study()
    rules = "; ".join(f"if {rule['where']}, use {rule['take']}" for rule in published["guide"])
    words = (
        "Each row shows the combination that trains this number of images in the shortest time, including the "
        f"start. The tensors of this combination need at most {units.percent(_ROOM, 0)} of the GPU's memory. A row "
        "also applies to GPUs with more memory, until a later row names more memory.",
        f"The founding study recommends ({published['source']}): {rules}.",
    )
    columns = {name: [str(record[name]) for record in records] for name in records[0]}
    context = {name: columns.pop(name)[0] for name in ("model", "GPU", "data") if len(set(columns[name])) == 1}
    table = table_of(columns, text=("model", "GPU", "data", "combination"), context=context)
    return Section("image_guide", "Images: fastest combination by number of images", table, words, records)


def _chosen(workload: Sequence[str], memory: int, choice: Choice) -> dict[str, Any]:
    rate, peak = choice.cell.figure(IMAGES), choice.cell.figure(PEAK)
    return {
        "model": workload[0].rsplit("/", 1)[-1], "GPU": workload[2], "data": choice.cell.workload[2],
        "GiB of memory": f"{memory} or more", "combination": choice.cell.name,
        "from this image": units.count(choice.images), "from this step": units.count(choice.steps),
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
    """Return the number of samples after which a faster rate makes up for a longer start."""
    later = max(0.0, other.start_s) - max(0.0, pace.start_s)
    return max(0.0, later) / (1 / pace.samples_per_s - 1 / other.samples_per_s)
