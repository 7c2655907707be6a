"""Pictures → what an image model is given of them, by its family's own processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ftbench.families.vision import ImageSize, VisionShape
from ftbench.worker.data.formats import BadRow
from ftbench.worker.data.pictures import Picture
from ftbench.worker.data.tokens import ShownImages


class Pixels:
    """Processes images for a model of `shape`, in whose text `token` stands for one."""

    def __init__(self, shape: VisionShape, token: int, processor: Any) -> None:
        self.shape, self.token = shape, token
        self._processor = processor

    def size(self, picture: Picture) -> ImageSize:
        """Return what a picture becomes. Raises BadRow for one that the processor does not take."""
        try:
            return self.shape.size(picture.height, picture.width)
        except ValueError as error:
            raise BadRow(f"an image cannot be used: {error}") from None

    def shown(self, pictures: Sequence[Picture]) -> ShownImages:
        """Return pictures as a sample shows them."""
        return ShownImages(self.token, tuple(pictures), tuple(self.size(each).tokens for each in pictures))

    def process(self, picture: Picture) -> np.ndarray:
        """Return the pixels of one picture: tiles x 3 x height x width, or patches x values."""
        pixels = np.asarray(self._processor(images=[picture.open()], return_tensors="np")["pixel_values"])
        return pixels[0] if self.shape.tile else pixels

    def batch(self, pictures: Sequence[Picture], input_ids: np.ndarray, tiles: int = 0) -> dict[str, np.ndarray]:
        """Return what the model's forward pass takes beside `input_ids`; images are filled up to the most tiles among
        them, or to `tiles`."""
        made = [self.process(picture) for picture in pictures]
        if self.shape.tile:
            pixels = np.zeros((len(made), max(tiles, *map(len, made), 0), *made[0].shape[1:]), dtype=np.float32)
            for row, tiled in zip(pixels, made, strict=True):
                row[: len(tiled)] = tiled
            sizes = np.array([(picture.height, picture.width) for picture in pictures])
            return {"pixel_values": pixels, "image_sizes": sizes}
        grids = [(1, *self.shape.grid(picture.height, picture.width)) for picture in pictures]
        return {
            "pixel_values": np.concatenate(made),
            "image_grid_thw": np.array(grids),
            "mm_token_type_ids": (input_ids == self.token).astype(np.int64),
        }
