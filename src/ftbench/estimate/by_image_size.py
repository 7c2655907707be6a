"""What a spec does with images of several sizes: tokens and tiles, the largest batch that fits, images in a night."""

from collections.abc import Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import Gpu
from ftbench.core.table import text_table
from ftbench.errors import SpecError
from ftbench.estimate.memory.memory_cache import largest_batch
from ftbench.estimate.time.duration import estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.largest import largest
from ftbench.estimate.workload.model import shape_of
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment

SIZES = ((336, 336), (500, 500), (1024, 1024), (1920, 1080))
SAMPLES = 1024  # drawn for each size: more than any batch that fits a GPU
_TEXT = 256  # tokens of room for the text of a sample
Record = dict[str, Any]


def by_image_size(
    spec: Experiment, gpu: Gpu | float, store: RunHistory, hours: float, config: dict[str, Any] | None = None,
    total: float | None = None,
) -> list[Record]:  # fmt: skip
    """Return a record for each size of made pictures, in pictures a sample as the spec has them; nothing for a spec
    without images. Images a second and in `hours` are None where no batch is sure to fit or no rate is known."""
    if not spec.dataset.has_images or (vision := shape_of(spec.model, config).vision) is None:
        return []
    records = []
    for size in SIZES:
        trial = _sized(spec, size, spec.dataset.max_length)
        sample = largest(_with_batch(trial, 1), vision).expected
        trial = _sized(spec, size, max(spec.dataset.max_length, sample.images.tokens + _TEXT))
        sample = largest(_with_batch(trial, 1), vision).expected
        batch = largest_batch(trial, gpu, total=total, config=config)
        rate = _rate(_with_batch(trial, batch), gpu, store, config) if batch else None
        records.append({
            "width": size[0], "height": size[1], "tokens": sample.images.tokens, "tiles": sample.images.tiles,
            "largest_batch": batch, "images_per_s": rate, "images_in_hours": rate and rate * 3600 * hours,
        })  # fmt: skip
    return records


def _sized(spec: Experiment, size: tuple[int, int], max_length: int) -> Experiment:
    """Return the spec with made pictures of that size and the text of its own made ones."""
    data = spec.dataset
    made = Dataset.model_validate({
        "name": "images", "samples": SAMPLES, "image_size": size, "images_per_sample": data.images_per_sample,
        "max_length": max_length, "length": data.length, "mean_length": data.mean_length,
    })  # fmt: skip
    return spec.model_copy(update={"dataset": made})


def _with_batch(spec: Experiment, batch: int) -> Experiment:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"batch_size": batch})})


def _rate(spec: Experiment, gpu: Gpu | float, store: RunHistory, config: dict[str, Any] | None) -> float | None:
    """Return images a second; None where it is not known how fast a GPU is."""
    if not isinstance(gpu, Gpu):
        return None
    try:
        duration = estimate_duration(spec, gpu, store, config=config)
    except SpecError:
        return None
    return spec.dataset.images_per_sample * duration.samples / duration.step_s.expected


def as_text(records: Sequence[Record], hours: float) -> str:
    """Return a line a size."""
    columns = ["images of", ">tokens", ">tiles", ">largest batch", ">images/s", f">images in {hours:g} h"]
    return text_table(columns, [
        (f"{each['width']} x {each['height']}", units.count(each["tokens"]), units.count(each["tiles"]),
         str(each["largest_batch"] or "none"), units.rate(each["images_per_s"]),
         "" if each["images_in_hours"] is None else units.count(each["images_in_hours"]))
        for each in records
    ])  # fmt: skip
