"""Describe the image encoder and the projector of a model, and compute the number of tokens of an image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ftbench.families.config import Config

# Models of images and text, and the family of their language model.
FAMILIES = {"llava": "mistral", "llava_next": "mistral", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
# Smallest and largest number of pixels after scaling (preprocessor_config.json of the published models).
PIXELS = {"qwen2_5_vl": (56 * 56, 12_845_056), "qwen3_vl": (65_536, 16_777_216)}
MOST_ELONGATED = 200  # largest aspect ratio that Qwen's processors accept
_CLIP_DEFAULTS = {"temporal_patch_size": 1, "image_size": 336}
_QWEN_DEFAULTS = {"temporal_patch_size": 2, "spatial_merge_size": 2}


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The numbers of tokens, tiles and patches of an image, or of several images.

    The language model gets `tokens`, and the encoder gets `patches` (including class tokens). The image is split into
    `tiles`. A patch attends only to patches of the same tile."""

    tokens: int
    tiles: int
    patches: int

    def __add__(self, other: ImageSize) -> ImageSize:
        return ImageSize(self.tokens + other.tokens, self.tiles + other.tiles, self.patches + other.patches)


NOTHING = ImageSize(0, 0, 0)


@dataclass(frozen=True)
class VisionShape:
    """The shape of image encoder and projector. Sizes are numbers of elements.

    `patch` is the side of a patch in pixels. `merge * merge` patches become one token. `tile` is the side of a tile in
    pixels. Before tiling, an image is scaled to one of the sizes `pinpoints` (height, width). Without tiles, an image
    is scaled to between `pixels[0]` and `pixels[1]` pixels. `windows` is the number of patches that a patch attends to
    in each layer; None is the full image. `values` is the number of values in a patch. `matrices` are (inputs, outputs)
    of the matrices in a layer, and `merging` of the matrices in the projector. The MLP of a layer saves `activations`
    tensors of width `inner`. `deep` decoder layers also get image features."""

    family: str
    layers: int
    hidden: int
    encoder: int
    projector: int
    patch: int
    merge: int
    tile: int
    pinpoints: tuple[tuple[int, int], ...]
    pixels: tuple[int, int]
    windows: tuple[int | None, ...]
    heads: int
    inner: int
    activations: int
    values: int
    matrices: tuple[tuple[int, int], ...]
    merging: tuple[tuple[int, int], ...]
    deep: int = 0

    @property
    def total(self) -> int:
        return self.encoder + self.projector

    def size(self, height: int, width: int) -> ImageSize:
        """Return the tokens, tiles and patches of an image. Raise ValueError for an extreme aspect ratio."""
        if self.tile:
            return self._tiled(height, width)
        if max(height, width) > MOST_ELONGATED * min(height, width):
            raise ValueError(f"{width} x {height} pixels are more elongated than {MOST_ELONGATED} to 1")
        rows, columns = self.grid(height, width)
        return ImageSize(rows * columns // self.merge**2, 1, rows * columns)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of the patches of an image without tiles.

        The sides are rounded to full tokens. An image with too many or too few pixels is scaled (Qwen2-VL, arXiv
        2409.12191, section 2.1)."""
        unit, (fewest, most) = self.patch * self.merge, self.pixels
        rows, columns = round(height / unit), round(width / unit)
        pixels = rows * columns * unit**2
        # Use the processor's order of operations, because another order may round differently.
        if pixels > most:
            scale = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / scale / unit)) for side in (height, width))
        elif pixels < fewest:
            scale = math.sqrt(fewest / (height * width))
            rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
        return rows * self.merge, columns * self.merge

    def _tiled(self, height: int, width: int) -> ImageSize:
        """Return the tokens, tiles and patches of an image: one tile for the full image, and the tiles of its parts.

        Padding is removed, and a token is added per row of patches (LLaVA-NeXT, llava-vl.github.io, 2024-01-30)."""
        side = self.tile // self.patch
        high, wide = self.pinpoint(height, width)
        rows, columns = high // self.patch, wide // self.patch
        if width / height > columns / rows:
            rows -= (rows - int(round(height * columns / width, 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * rows / height, 7))) // 2 * 2
        tiles = 1 + (high // self.tile) * (wide // self.tile)
        return ImageSize(side**2 + rows * (columns + 1), tiles, tiles * (side**2 + 1))

    def pinpoint(self, height: int, width: int) -> tuple[int, int]:
        """Return the size (height, width) in `pinpoints` that keeps the most pixels of an image.

        If several sizes keep the same number of pixels, return the size with the least padding."""

        def kept(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[0] / height, size[1] / width)
            pixels = min(int(height * scale) * int(width * scale), height * width)
            return pixels, pixels - size[0] * size[1]

        return max(self.pinpoints, key=kept)


def scaled(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size of an image that is scaled down to at most `longest` pixels per side (0: no limit)."""
    scale = min(1.0, (longest or math.inf) / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def describe(family: str, config: dict[str, Any]) -> VisionShape:
    """Return the image encoder and projector of a config.json. Raise ValueError for an invalid value."""
    return (_qwen if "depth" in config["vision_config"] else _clip)(family, config)


def _clip(family: str, config: dict[str, Any]) -> VisionShape:
    """Return the shape of CLIPVisionModel and LlavaNextMultiModalProjector (transformers)."""
    vision = Config(config["vision_config"], _CLIP_DEFAULTS)
    hidden, layers, inner = (vision.whole(key) for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    patch, tile = vision.whole("patch_size"), vision.whole("image_size")
    positions = (tile // patch) ** 2 + 1
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
    text = Config(config.get("text_config", config), {}).whole("hidden_size")
    pinpoints = config.get("image_grid_pinpoints") or [[tile, 2 * tile], [2 * tile, tile], [2 * tile, 2 * tile]]
    return VisionShape(
        family, layers, hidden, (3 * patch**2 + 1 + positions + 4) * hidden + layers * layer,
        text * (hidden + 1) + text * (text + 1) + text, patch, 1, tile,
        tuple((int(high), int(wide)) for high, wide in pinpoints), (0, 0), (None,) * layers,
        vision.whole("num_attention_heads"), inner, 3, 3 * patch**2,
        (*[(hidden, hidden)] * 4, (hidden, inner), (inner, hidden)), ((hidden, text), (text, text)),
    )  # fmt: skip


def _qwen(family: str, config: dict[str, Any]) -> VisionShape:
    """Return the shape of Qwen's image encoder, which takes any number of patches, and of its projector.

    The projector merges patches. qwen3_vl has a further projector for each decoder layer that gets image features
    (transformers, Qwen2_5_VisionTransformer and Qwen3VLVisionModel)."""
    vision = Config(config["vision_config"], _QWEN_DEFAULTS)
    hidden, layers, inner = vision.whole("hidden_size"), vision.whole("depth"), vision.whole("intermediate_size")
    patch, merge, out = vision.whole("patch_size"), vision.whole("spatial_merge_size"), vision.whole("out_hidden_size")
    merged, pixels = merge**2 * hidden, 3 * vision.whole("temporal_patch_size") * patch**2
    attention, projector = 4 * hidden * (hidden + 1), merged * (merged + 1) + merged * out + out
    windows: list[int | None] = [None] * layers
    matrices, merging, deep = [(hidden, 3 * hidden), (hidden, hidden)], [(merged, merged), (merged, out)], 0
    activations = 2
    if family == "qwen3_vl":
        layer = attention + 2 * hidden * inner + inner + hidden + 4 * hidden
        encoder = (pixels + 1) * hidden + vision.whole("num_position_embeddings") * hidden + layers * layer
        deep = len(vision.get("deepstack_visual_indexes") or ())
        projectors = projector + 2 * hidden + deep * (projector + 2 * merged)
        matrices += [(hidden, inner), (inner, hidden)]
    else:
        encoder = pixels * hidden + layers * (attention + 3 * hidden * inner + 2 * inner + hidden + 2 * hidden)
        projectors, full = projector + hidden, vision.get("fullatt_block_indexes") or ()
        window = (vision.whole("window_size", 112) // patch) ** 2
        windows = [None if layer in full else window for layer in range(layers)]
        matrices += [(hidden, inner), (hidden, inner), (inner, hidden)]
        activations = 4
    return VisionShape(
        family, layers, hidden, encoder, projectors, patch, merge, 0, (), PIXELS.get(family, (0, 0)), tuple(windows),
        vision.whole("num_heads"), inner, activations, pixels, tuple(matrices),
        tuple(merging * (1 + deep)), deep,
    )  # fmt: skip
