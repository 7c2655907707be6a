"""Compute the lengths of samples with images, and the numbers of image tokens and image tiles."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.errors import SpecError
from ftbench.estimate.workload.lengths import DRAWN, MOST_SAMPLES, Lengths, file_lengths
from ftbench.families.vision import NOTHING, ImageSize, VisionShape, scaled
from ftbench.spec.batches import CAPTION, picture_sizes, synthetic_lengths
from ftbench.spec.datasets import Dataset, row_example, row_format
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import open_plain_file

if TYPE_CHECKING:
    from ftbench.core.data_files import FileRows

Sides = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True, slots=True)
class SampleWithImages:
    """A sample with images: the number of tokens, the number of label tokens, and the total size of the images."""

    length: int
    labels: int
    images: ImageSize = NOTHING


@dataclass(frozen=True, slots=True)
class KnownSamples:
    """The samples of a data set in training order, or some samples of a file. `basis` describes their source.

    If `exact` is false, training may use other samples."""

    samples: tuple[SampleWithImages, ...]
    basis: str
    exact: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sample.length for sample in self.samples)


def known_samples(spec: Experiment, vision: VisionShape, fitting: bool = True) -> KnownSamples | None:
    """Return the samples of a spec. Return None if the samples have no images, as for dpo and grpo.

    With `fitting`, return only samples of a file that fit max_length. Raise SpecError if the image sizes are unknown
    before training."""
    data = spec.dataset
    if not data.may_have_images or spec.objective.pairs or spec.objective.prompts:
        return None
    known = _samples(data, spec.model, replace(vision, pinpoints=_limited(spec, vision)), spec.optimizations.image_size)
    if known is None or data.path is None or not fitting:
        return known
    kept = tuple(sample for sample in known.samples if sample.length <= data.max_length)
    if not kept:
        raise SpecError(f"dataset: no sample of {data.path} fits max_length {data.max_length:,}: raise it")
    return replace(known, samples=kept)


def lengths_with_images(spec: Experiment, vision: VisionShape) -> Lengths | None:
    """Return sample lengths including image tokens, or None without images. Raise SpecError if sizes are unknown."""
    if (known := known_samples(spec, vision)) is None:
        return None
    samples = known.samples[:MOST_SAMPLES]
    tokens, labels = sum(each.length for each in samples), sum(each.labels for each in samples)
    total = sum((each.images for each in samples), NOTHING)
    counted = file_lengths(spec.dataset, spec.model) if spec.dataset.path and not known.exact else ""
    rows = None if isinstance(counted, str) else counted.rows * len(known.samples) // len(counted.values)
    return Lengths(
        tuple(each.length for each in samples), labels / tokens, known.basis, rows=rows,
        patches=total.patches / len(samples), tiles=total.tiles / len(samples),
    )  # fmt: skip


def _limited(spec: Experiment, vision: VisionShape) -> tuple[Sides, ...]:
    """Return the (height, width) pairs of `vision.pinpoints` that the spec allows (worker/model/vision.py)."""
    longest = int(spec.optimizations.image_size)
    fitting = tuple(size for size in vision.pinpoints if max(size) <= longest)
    return vision.pinpoints if not longest or not vision.tile else fitting or ((vision.tile, vision.tile),)


@lru_cache(maxsize=64)
def _samples(dataset: Dataset, model: Any, vision: VisionShape, longest: int) -> KnownSamples | None:
    if dataset.name == "images":
        count = min((dataset.samples or 0) + dataset.eval_samples, DRAWN)
        shown, sizes = dataset.images_per_sample, picture_sizes(dataset, count * dataset.images_per_sample)
        texts = synthetic_lengths(dataset, count)
        groups = [sizes[at : at + shown] for at in range(0, len(sizes), shown)]
        made = [_sample(vision, group, text, longest, shown) for group, text in zip(groups, texts, strict=True)]
        about = "about " if len(set(sizes)) > 1 else ""
        pixels = f"{about}{sizes[0][0]} x {sizes[0][1]}"
        return _known(made[: dataset.samples], f"synthetic pictures of {pixels} pixels", True)
    if size := dataset.source.image_size:
        sample = _sample(vision, [size], round(CAPTION), longest)
        count = min(dataset.samples or MOST_SAMPLES, MOST_SAMPLES)
        return _known([sample] * count, f"photographs of {size[0]} x {size[1]} pixels", False)
    if dataset.path is None:
        raise SpecError(
            f"dataset: the image sizes of {dataset.name} are not known: estimate with --set 'dataset={{name: images, "
            "samples: 100, image_size: [500, 500]}', or with a local copy (dataset.name=file)"
        )
    return _of_file(dataset, model, vision, longest)


def _known(samples: Sequence[SampleWithImages], basis: str, exact: bool) -> KnownSamples:
    return KnownSamples(tuple(samples), f"{basis}, the longest sample {max(each.length for each in samples):,}", exact)


def _sample(vision: VisionShape, sizes: Sequence[Sides], text: int, longest: int, heads: int = 0) -> SampleWithImages:
    """Return a sample with images of these sizes, `text` tokens with labels, and `heads` tokens without labels.

    In synthetic data, one token without a label follows each image (worker/data/synthetic.py)."""
    images = NOTHING
    for width, height in sizes:
        images += vision.size(*scaled(height, width, longest))
    return SampleWithImages(images.tokens + heads + text, text, images)


def _of_file(dataset: Dataset, model: Any, vision: VisionShape, longest: int) -> KnownSamples | None:
    """Return one sample for each row that `file_lengths` reads. Return None if the file is missing or has no images."""
    counted, path = file_lengths(dataset, model), Path(dataset.path or "")
    if isinstance(counted, str):
        return None
    from ftbench.core.data_files import read_file

    rows = read_file(path)
    form = row_format(dataset, rows[0], rows.where(0))
    positions = range(0, len(rows), -(-len(rows) // MOST_SAMPLES))
    images = {at: row_example(dataset, rows[at], form, rows.where(at)).images for at in positions}
    if not any(images.values()):
        return None
    samples = [_shown(rows, at, images[at], vision, text, longest)
               for at, text in zip(positions, counted.values, strict=True)]  # fmt: skip
    return _known(samples, f"images of {path.name}; text {counted.source}", False)


def _shown(
    rows: FileRows, at: int, images: Sequence[Any], vision: VisionShape, text: int, longest: int
) -> SampleWithImages:
    """Return the sample of a row. If an image cannot be read, raise a SpecError that names the file and the row."""
    try:
        return _sample(vision, [_size_of(image, rows.folder) for image in images], text, longest)
    except Exception as error:  # noqa: BLE001 - decoders of broken files raise anything
        from ftbench.core.data_files import image_problem

        why = image_problem(error)
        raise SpecError(f"dataset: {rows.where(at)}: its image cannot be read ({why})") from None


def _size_of(image: Any, folder: Path) -> Sides:
    """Return (width, height) of an image in pixels. Read the file header, and apply the rotation in the EXIF data."""
    from PIL import Image

    from ftbench.core.data_files import LARGEST_IMAGE, orientation

    source = image.get("bytes") or image.get("path") if isinstance(image, dict) else image
    file = BytesIO(source) if isinstance(source, bytes) else open_plain_file(folder / str(source), LARGEST_IMAGE)
    with file, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # as in training
        with Image.open(file) as opened:
            width, height = opened.size
            return (width, height) if orientation(opened) < 5 else (height, width)
