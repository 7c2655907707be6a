"""Pictures → what an image model is given of them, by its family's own processor."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from ftbench.core.data_formats import BadRow
from ftbench.families.vision import ImageSize, VisionShape
from ftbench.store.machine import cache_error
from ftbench.worker.data.pictures import Picture
from ftbench.worker.data.tokens import ShownImages


class Pixels:
    """Processes images for a model of `shape`, in whose text `token` stands for one: scaled down until their `longest`
    side has so many pixels (0: as they are), and kept in a folder `cache`, if there is one."""

    def __init__(
        self, shape: VisionShape, token: int, processor: Any, longest: int = 0, cache: Path | None = None
    ) -> None:
        self.shape, self.token = shape, token
        self._processor, self._longest, self._cache = processor, longest, cache
        described = json.dumps([type(processor).__name__, longest, processor.to_dict()], sort_keys=True, default=str)
        self._recipe = hashlib.sha256(described.encode()).hexdigest()

    def side(self, picture: Picture) -> tuple[int, int]:
        """Return height and width of a picture once it is scaled."""
        scale = min(1.0, (self._longest or math.inf) / max(picture.height, picture.width))
        return max(1, round(picture.height * scale)), max(1, round(picture.width * scale))

    def size(self, picture: Picture) -> ImageSize:
        """Return what a picture becomes. Raises BadRow for one that the processor does not take."""
        try:
            return self.shape.size(*self.side(picture))
        except ValueError as error:
            raise BadRow(f"an image cannot be used: {error}") from None

    def shown(self, pictures: Sequence[Picture]) -> ShownImages:
        """Return pictures as a sample shows them."""
        return ShownImages(self.token, tuple(pictures), tuple(self.size(each).tokens for each in pictures))

    def process(self, picture: Picture) -> np.ndarray:
        """Return the pixels of one picture: tiles x 3 x height x width, or patches x values."""
        height, width = self.side(picture)
        image = picture.open()
        if image.size != (width, height):
            image = image.resize((width, height))
        pixels = np.asarray(self._processor(images=[image])["pixel_values"], dtype=np.float32)
        return pixels[0] if self.shape.tile else pixels

    def keep(self, pictures: Sequence[Picture]) -> None:
        """Write the pictures that the cache has not yet, processed. Raises MissingError where it takes none."""
        if self._cache is None:
            return
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self._keep, pictures))
        except OSError as error:
            raise cache_error(self._cache, error) from None

    def _keep(self, picture: Picture) -> None:
        path = self._path(picture)
        if not path.exists():
            with NamedTemporaryFile(dir=path.parent, suffix=".partial") as file:
                np.save(file, self.process(picture))
                file.flush()
                with suppress(FileExistsError):  # another process was faster
                    os.link(file.name, path)

    def _path(self, picture: Picture) -> Path:
        assert self._cache is not None
        return self._cache / f"{hashlib.sha256(f'{self._recipe} {picture.key}'.encode()).hexdigest()}.npy"

    def _pixels(self, picture: Picture) -> np.ndarray:
        if self._cache is None:
            return self.process(picture)
        return np.load(self._path(picture), mmap_mode="r")

    def batch(self, pictures: Sequence[Picture], rows: Mapping[str, np.ndarray], tiles: int = 0) -> dict[str, Any]:
        """Return what the forward pass takes beside the `rows` of tokens, and in place of the positions of samples end
        to end; images are filled up to the most tiles among them, or to `tiles`."""
        batch = self._shown(pictures, rows["input_ids"], tiles)
        if "position_ids" in rows and not self.shape.tile:
            batch["position_ids"] = self._positions(pictures, rows)
        return batch

    def _shown(self, pictures: Sequence[Picture], input_ids: np.ndarray, tiles: int) -> dict[str, Any]:
        made = [self._pixels(picture) for picture in pictures]
        if self.shape.tile:
            pixels = np.zeros((len(made), max(tiles, *map(len, made), 0), *made[0].shape[1:]), dtype=np.float32)
            for row, tiled in zip(pixels, made, strict=True):
                row[: len(tiled)] = tiled
            # Numbers, which the model reads one by one: a tensor of the device's would have it wait for each.
            return {"pixel_values": pixels, "image_sizes": [self.side(picture) for picture in pictures]}
        grids = [(1, *self.shape.grid(*self.side(picture))) for picture in pictures]
        return {
            "pixel_values": np.concatenate(made),
            "image_grid_thw": np.array(grids),
            "mm_token_type_ids": (input_ids == self.token).astype(np.int64),
        }

    def _positions(self, pictures: Sequence[Picture], rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return 4 x 1 x tokens: the place in the sample, by which attention knows where one begins, and time, row and
        column to rotate by. Text counts on in all three; an image has its own time, its tokens their rows and columns
        from there, and what follows goes on after the largest (Qwen2-VL, arXiv 2409.12191, section 2.1)."""
        (ids,), (positions,) = rows["input_ids"], rows["position_ids"]
        turned, images = np.empty((3, len(ids)), dtype=np.int64), iter(pictures)
        at = start = 0
        while at < len(ids):
            start = 0 if positions[at] == 0 else start
            if ids[at] == self.token:
                high, wide = (side // self.shape.merge for side in self.shape.grid(*self.side(next(images))))
                turned[:, at : at + high * wide] = start + np.indices((1, high, wide)).reshape(3, -1)
                at, start = at + high * wide, start + max(high, wide)
            else:
                turned[:, at] = start
                at, start = at + 1, start + 1
        return np.concatenate([positions[None], turned])[:, None]
