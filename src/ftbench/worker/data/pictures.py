"""Images of samples: a file, bytes of one, or a made picture; decoded when they are asked for."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftbench.core.data_files import image_problem, orientation
from ftbench.core.data_formats import BadRow
from ftbench.spec.batches import picture_sizes
from ftbench.spec.datasets import Dataset
from ftbench.store.rundir import open_plain_file

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 256 * 2**20  # of an image's file
_BLOCKS = 8  # a made picture is this many colours wide and high, blended


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of `width` x `height` pixels: a path, a file's bytes, or the seed that it is made from. `key` tells
    different images apart."""

    width: int
    height: int
    source: Path | bytes | int
    key: str

    def open(self) -> Image:
        """Decode it, upright and in three colours. Raises BadRow for a file that is not any more what it was."""
        if isinstance(self.source, int):
            from PIL.Image import fromarray  # training on text needs no Pillow

            blocks = np.random.default_rng(self.source).integers(0, 256, (_BLOCKS, _BLOCKS, 3), dtype=np.uint8)
            return fromarray(blocks).resize((self.width, self.height))
        try:
            return _decoded(self.source.read_bytes() if isinstance(self.source, Path) else self.source)
        except Exception as error:  # noqa: BLE001 - as below
            raise BadRow(f"image {self.source!s:.200} cannot be read any more ({image_problem(error)})") from None


def read(reference: Any, folder: Path | None) -> Picture:
    """Return the image that a row refers to: a path (below `folder` where it is relative), a file's bytes, or both as
    `datasets` keeps them. Raises BadRow for one that cannot be read."""
    source: Any = reference
    if isinstance(reference, dict):
        source = reference.get("bytes") or reference.get("path")
    if source in ("", b"") or (source is None and reference):
        raise BadRow("an image is empty: it has neither a path nor a file's bytes")
    if isinstance(source, str):
        if "://" in source or source.startswith("data:"):
            raise BadRow(f"image {source[:60]!r} is an address: save it as a file beside the data")
        source = (folder or Path()) / source
    if isinstance(source, Path):
        name = f"image {source}"
        try:
            with open_plain_file(source, MOST_BYTES) as file:
                data = file.read()
        except OSError as error:
            raise BadRow(f"{name} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise BadRow(f"{name} {error}") from None
    elif isinstance(source, bytes):
        data, name = source, "an image"
    else:
        raise BadRow(f"an image is {type(source).__name__}, and neither a path nor a file's bytes")
    try:
        image = _decoded(data)
    except Exception as error:  # noqa: BLE001 - decoders of broken files raise anything
        raise BadRow(f"{name} cannot be decoded ({image_problem(error)})") from None
    return Picture(*image.size, source, hashlib.sha256(data).hexdigest())


def _decoded(data: bytes) -> Image:
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image: Image.Image = Image.open(BytesIO(data))
        if image.format == "EPS":  # Pillow gives it to Ghostscript, if there is one
            raise ValueError("PostScript is a program and no picture")
        if image.mode in ("I", "F"):
            raise ValueError("its values have 32 bits, of which nobody knows the range: save it with 8 or 16")
        if orientation(image) > 1:
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow would cut each value at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image.convert("RGB")


def made(dataset: Dataset, count: int) -> list[Picture]:
    """Return the pictures of `count` samples, of the size asked for or spread about it, the same for a seed."""
    number = count * dataset.images_per_sample
    sizes, seeds = picture_sizes(dataset, number), range(dataset.seed * 2**32, dataset.seed * 2**32 + number)
    return [Picture(*size, seed, f"made {seed} {size}") for seed, size in zip(seeds, sizes, strict=True)]
