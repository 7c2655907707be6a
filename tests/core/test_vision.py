"""Tokens of images, compared with the processors of transformers and published counts."""

import itertools
import random

import pytest

from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.families.vision import PIXELS

MODELS = [name for name, config in architectures().items() if "vision_config" in config]
PUBLISHED = {  # height and width: tokens (and tiles) of LLaVA-NeXT, tokens of Qwen2.5-VL, of Qwen3-VL
    (336, 336): (1176, 3, 144, 100),
    (500, 500): (2928, 5, 324, 256),
    (1024, 1024): (2928, 5, 1369, 1024),
    (1080, 1920): (1948, 5, 2691, 2040),
}


def vision(name):
    return describe(architectures()[name]).vision


@pytest.mark.parametrize("size", PUBLISHED)
def test_images_have_the_published_number_of_tokens(size):
    tiled = vision("llava-hf/llava-v1.6-mistral-7b-hf").size(*size)
    of_qwen = [vision(f"Qwen/{name}").size(*size).tokens for name in ("Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct")]
    assert (tiled.tokens, tiled.tiles, *of_qwen) == PUBLISHED[size]


def processed(name):
    """Return a function from height and width to tokens and patches, by the family's own processor."""
    config, shape = architectures()[name], vision(name)
    if shape.tile:
        from transformers import LlavaNextProcessor
        from transformers.image_utils import SizeDict
        from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

        from ftbench.worker.model.tokenizer import build_tokenizer

        images = LlavaNextImageProcessorPil(
            image_grid_pinpoints=config["image_grid_pinpoints"], size=SizeDict(shortest_edge=shape.tile)
        )
        whole = LlavaNextProcessor(
            images, build_tokenizer(512), patch_size=shape.patch, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )  # fmt: skip
        return lambda *size: whole._get_num_multimodal_tokens([size]).num_image_tokens[0]
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    fewest, most = PIXELS[config["model_type"]]
    images = Qwen2VLImageProcessorPil(patch_size=shape.patch, size={"shortest_edge": fewest, "longest_edge": most})
    return lambda *size: images.get_number_of_image_patches(*size) // shape.merge**2


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_token_counts_agree_with_the_processor(name):
    pytest.importorskip("transformers")
    shape, tokens, dice = vision(name), processed(name), random.Random(1)
    sides = [*(2**power for power in range(3, 12)), *(dice.randint(20, 5000) for _ in range(100))]
    for _ in range(400):
        height, width = dice.choice(sides), dice.choice(sides)
        if max(height, width) <= 200 * min(height, width):
            assert shape.size(height, width).tokens == tokens(height, width), (height, width)
    for height, width in itertools.product(range(1, 37), repeat=2):  # scaled up, often to sides that are whole tokens
        assert shape.size(height, width).tokens == tokens(height, width), (height, width)


def test_unsupported_images_are_refused():
    with pytest.raises(ValueError, match="more elongated"):
        vision("tiny/qwen3-vl").size(10, 4000)
