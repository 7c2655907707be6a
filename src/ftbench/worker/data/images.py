"""Read images, and convert them to pixel inputs with the image processor of the model family."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np

from ftbench.core.data_files import LARGEST_IMAGE, image_problem, orientation
from ftbench.core.data_formats import BadRow
from ftbench.families.vision import ImageSize, VisionShape, scaled
from ftbench.spec.batches import picture_sizes
from ftbench.spec.datasets import Dataset
from ftbench.store.machine import cache_error
from ftbench.store.rundir import open_plain_file

if TYPE_CHECKING:
    from PIL.Image import Image

_BLOCKS = 8  # random colors per side of a generated picture, which is scaled up to its size
CELLS = 4  # a picture for tasks is a grid of 4 x 4 cells, each with one color
COLORS = np.array([[r, g, b] for r in (0, 255) for g in (0, 255) for b in (0, 255)], dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of `width` x `height` pixels, decoded on demand. Images with the same content have the same `key`."""

    width: int
    height: int
    source: Path | bytes | int  # a path, the bytes of a file, or the seed of a generated picture
    key: str
    for_tasks: bool = False  # a generated picture of 4 x 4 cells with one color each

    @property
    def colors(self) -> np.ndarray:
        """Return an index into `COLORS` for each cell of a generated picture, row by row."""
        assert isinstance(self.source, int)
        return np.random.default_rng(self.source).integers(0, len(COLORS), CELLS**2)

    def open(self) -> Image:
        """Return the decoded image in RGB, rotated upright. Raise BadRow if the file can no longer be read."""
        if isinstance(self.source, int):
            from PIL.Image import Resampling, fromarray  # Pillow is only needed for images

            if self.for_tasks:
                cells = fromarray(COLORS[self.colors].reshape(CELLS, CELLS, 3))
                return cells.resize((self.width, self.height), Resampling.NEAREST)
            blocks = np.random.default_rng(self.source).integers(0, 256, (_BLOCKS, _BLOCKS, 3), dtype=np.uint8)
            return fromarray(blocks).resize((self.width, self.height))
        try:
            return _decode(self.source.read_bytes() if isinstance(self.source, Path) else self.source)
        except Exception as error:  # noqa: BLE001 - decoders raise errors of any type
            raise BadRow(f"image {self.source!s:.200} cannot be read any more ({image_problem(error)})") from None


@dataclass(frozen=True, slots=True)
class SampleImages:
    """The images of one sample, the number of tokens of each image, and the id of the image token."""

    token: int
    pictures: tuple[Picture, ...]
    counts: tuple[int, ...]


def read(reference: Any, folder: Path | None) -> Picture:
    """Return the image that `reference` describes: a path relative to `folder`, the bytes of a file, or a dictionary of
    the `datasets` library with the key `path` or `bytes`.

    Raises:
        BadRow: The image cannot be read.
    """
    source: Any = (reference.get("bytes") or reference.get("path")) if isinstance(reference, dict) else reference
    if source in ("", b"") or (source is None and reference):
        raise BadRow("an image is empty: it has neither a path nor bytes")
    if isinstance(source, str):
        if "://" in source or source.startswith("data:"):
            raise BadRow(f"image {source[:60]!r} is a URL: download it and use its path")
        source = (folder or Path()) / source
    if not isinstance(source, (Path, bytes)):
        raise BadRow(f"an image must be a path or bytes, not {type(source).__name__}")
    name = f"image {source}" if isinstance(source, Path) else "an image"
    data = source if isinstance(source, bytes) else _read_file(source)
    try:
        image = _decode(data)
    except Exception as error:  # noqa: BLE001 - decoders raise errors of any type
        raise BadRow(f"{name} cannot be decoded ({image_problem(error)})") from None
    return Picture(*image.size, source, hashlib.sha256(data).hexdigest())


def _read_file(path: Path) -> bytes:
    try:
        with open_plain_file(path, LARGEST_IMAGE) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise BadRow(f"image {path} cannot be read ({getattr(error, 'strerror', error)})") from None


def _decode(data: bytes) -> Image:
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image: Image.Image = Image.open(BytesIO(data))
        if image.format == "EPS":  # Pillow would execute the file with Ghostscript
            raise ValueError("EPS files are not supported")
        if image.mode in ("I", "F"):
            raise ValueError("its values have 32 bits and an unknown range: convert it to 8 or 16 bits")
        if orientation(image) > 1:
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow would clip each value at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image.convert("RGB")


def generate(dataset: Dataset, count: int) -> list[Picture]:
    """Return random pictures for `count` samples, in the sizes of the spec. The same seed gives the same pictures."""
    number = count * dataset.images_per_sample
    sizes, seeds = picture_sizes(dataset, number), range(dataset.seed * 2**32, dataset.seed * 2**32 + number)
    tasks = dataset.structure == "tasks"
    kind = "tasks" if tasks else "made"
    return [Picture(*size, seed, f"{kind} {seed} {size}", tasks) for seed, size in zip(seeds, sizes, strict=True)]


class Pixels:
    """Converts images to the pixel inputs of one model."""

    def __init__(
        self, shape: VisionShape, token: int, processor: Any, longest: int = 0, cache: Path | None = None
    ) -> None:
        """Create a converter. `shape` describes the image encoder, and `token` is the id of the image token.
        Images are scaled down to at most `longest` pixels per side (0: no limit). `cache` is a folder or None."""
        self.shape, self.token = shape, token
        self._processor, self._longest, self._cache = processor, longest, cache
        described = json.dumps([type(processor).__name__, longest, processor.to_dict()], sort_keys=True, default=str)
        self._settings = hashlib.sha256(described.encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Save the settings of the image processor in `folder`, for runs with this folder as `model.path`."""
        self._processor.save_pretrained(folder)

    def side(self, picture: Picture) -> tuple[int, int]:
        """Return the height and width of an image in pixels, after scaling."""
        return scaled(picture.height, picture.width, self._longest)

    def size(self, picture: Picture) -> ImageSize:
        """Return the tiles, patches and tokens of an image. Raise BadRow for an unsupported image size."""
        try:
            return self.shape.size(*self.side(picture))
        except ValueError as error:
            raise BadRow(f"an image cannot be used: {error}") from None

    def of_sample(self, pictures: Sequence[Picture]) -> SampleImages:
        """Return the images of a sample, with the number of tokens of each image."""
        return SampleImages(self.token, tuple(pictures), tuple(self.size(each).tokens for each in pictures))

    def process(self, picture: Picture) -> np.ndarray:
        """Return the pixels of one image. The shape is `(tiles, 3, height, width)` or `(patches, values)`."""
        height, width = self.side(picture)
        image = picture.open()
        if image.size != (width, height):
            image = image.resize((width, height))
        pixels = np.asarray(self._processor(images=[image])["pixel_values"], dtype=np.float32)
        return pixels[0] if self.shape.tile else pixels

    def fill_cache(self, pictures: Sequence[Picture]) -> None:
        """Add the pixels of missing images to the cache. Raise MissingError if the cache folder is not writable."""
        if self._cache is None:
            return
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self._write, pictures))
        except OSError as error:
            raise cache_error(self._cache, error) from None

    def _write(self, picture: Picture) -> None:
        path = self._path(picture)
        if not path.exists():
            with NamedTemporaryFile(dir=path.parent, suffix=".partial") as file:
                np.save(file, self.process(picture))
                file.flush()
                with suppress(FileExistsError):  # another process has already written this file
                    os.link(file.name, path)

    def _path(self, picture: Picture) -> Path:
        assert self._cache is not None
        return self._cache / f"{hashlib.sha256(f'{self._settings} {picture.key}'.encode()).hexdigest()}.npy"

    def batch(self, pictures: Sequence[Picture], rows: Mapping[str, np.ndarray], tiles: int = 0) -> dict[str, Any]:
        """Return the image inputs for a batch. `rows` are its token inputs. Pad each image to at least `tiles` tiles.
        If the batch concatenates samples and the model does not use tiles, also return new `position_ids`."""
        arrays = [np.load(self._path(each), mmap_mode="r") if self._cache else self.process(each) for each in pictures]
        if self.shape.tile:
            pixels = np.zeros((len(arrays), max(tiles, *map(len, arrays), 0), *arrays[0].shape[1:]), dtype=np.float32)
            for row, tiled in zip(pixels, arrays, strict=True):
                row[: len(tiled)] = tiled
            # Python numbers, because reading a size from a tensor would synchronize with the device.
            return {"pixel_values": pixels, "image_sizes": [self.side(picture) for picture in pictures]}
        grids = [(1, *self.shape.grid(*self.side(picture))) for picture in pictures]
        return {
            "pixel_values": np.concatenate(arrays),
            "image_grid_thw": np.array(grids),
            "mm_token_type_ids": (rows["input_ids"] == self.token).astype(np.int64),
            **({"position_ids": self._positions(pictures, rows)} if "position_ids" in rows else {}),
        }

    def _positions(self, pictures: Sequence[Picture], rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return four position values per token, in an array of shape `(4, 1, tokens)`.

        The first value is the position in the sample. The others are time, row and column for rotary embedding
        (Qwen2-VL, arXiv 2409.12191, section 2.1). A text token increases time, row and column by 1. All tokens of an
        image have the same time. Row and column depend on the place in the image. The next text token continues after
        the largest value.
        """
        (ids,), (positions,) = rows["input_ids"], rows["position_ids"]
        rotary, images = np.empty((3, len(ids)), dtype=np.int64), iter(pictures)
        at = start = 0
        while at < len(ids):
            start = 0 if positions[at] == 0 else start
            if ids[at] == self.token:
                high, wide = (side // self.shape.merge for side in self.shape.grid(*self.side(next(images))))
                rotary[:, at : at + high * wide] = start + np.indices((1, high, wide)).reshape(3, -1)
                at, start = at + high * wide, start + max(high, wide)
            else:
                rotary[:, at] = start
                at, start = at + 1, start + 1
        return np.concatenate([positions[None], rotary])[:, None]
