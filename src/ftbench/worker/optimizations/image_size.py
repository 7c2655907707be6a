"""Train on smaller images. `data/images.py` scales the images, and this module limits the image sizes of the model."""

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model
from ftbench.worker.model.vision import limited_pinpoints


def apply(model: Any, spec: Experiment) -> None:
    config = base_model(model).config
    if hasattr(config, "image_grid_pinpoints"):
        config.image_grid_pinpoints = limited_pinpoints(config, spec.optimizations.image_size)


def verify(model: Any, spec: Experiment) -> list[str]:
    config, side = base_model(model).config, spec.optimizations.image_size
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    if not side or pinpoints is None or pinpoints == limited_pinpoints(config, side):
        return []
    return [f"optimizations.image_size is {side} and the model's tiles are {pinpoints}"]
