"""Select the class, image token and image processor of vision models."""

import importlib
import importlib.util
from dataclasses import replace
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ftbench.families import vision as families
from ftbench.families.vision import PIXELS, VisionShape
from ftbench.spec.methods import WITH_IMAGES

# Module and class of a family's image processor. It uses Pillow, or the faster torchvision if installed.
_PROCESSORS = {
    "llava_next": ("llava_next", "LlavaNextImageProcessor"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLImageProcessor"),
    "qwen3_vl": ("qwen2_vl", "Qwen2VLImageProcessor"),
}


def reads_images(config: Any) -> bool:
    """Return whether ftbench trains models with this configuration on images."""
    return config.model_type in WITH_IMAGES


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers that loads models with this configuration."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def architecture(config: Any) -> str:
    """Return the class name of the model, for the field `architectures` of config.json."""
    images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = images if reads_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return str(names[config.model_type])


def processor_class(model_type: str) -> Any:
    """Return the class of the image processor for a model type. It uses torchvision, or Pillow without torchvision."""
    module, name = _PROCESSORS[model_type]
    if importlib.util.find_spec("torchvision"):
        return getattr(importlib.import_module(f"transformers.models.{module}.image_processing_{module}"), name)
    return getattr(importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), f"{name}Pil")


def shape_of(config: Any, processor: Any) -> VisionShape:
    """Return the VisionShape (sizes of layers and images) of a vision encoder. `processor` has the image sizes."""
    shape = families.describe(config.model_type, config.to_dict())
    if shape.tile:
        return replace(shape, pinpoints=tuple((high, wide) for high, wide in processor.image_grid_pinpoints))
    return replace(shape, pixels=(processor.size["shortest_edge"], processor.size["longest_edge"]))


def limited_pinpoints(config: Any, longest: int) -> list[list[int]]:
    """Return the image sizes [height, width] with sides up to `longest`. If none fits, return the size of one tile."""
    tile = config.vision_config.image_size
    return [list(size) for size in config.image_grid_pinpoints if max(size) <= longest] or [[tile, tile]]


def processor_of(config: Any) -> Any:
    """Return the image processor for a configuration, with the published default settings of the model family."""
    vision = config.vision_config
    if config.model_type in PIXELS:
        fewest, most = PIXELS[config.model_type]
        options: dict[str, Any] = {
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "size": {"shortest_edge": fewest, "longest_edge": most},
        }
    else:
        side = vision.image_size
        options = {
            "image_grid_pinpoints": config.image_grid_pinpoints,
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        }
    return processor_class(config.model_type)(**options)
