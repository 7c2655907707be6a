"""Compute the output of encoder and projector once per image. It is exact, because neither is trained."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model

_DROPPED = ("attention_dropout", "hidden_dropout", "dropout")  # with dropout, features differ between epochs


class Features:
    """Replaces a model's `get_image_features`: returns the features of the images passed to `show`, and keeps them on
    the host. An image has one tensor of tokens x hidden, and another one for each decoder layer that gets image
    features (Qwen3-VL)."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self.kept: dict[str, tuple[torch.Tensor, ...]] = {}
        self._compute, self._shown = compute, tuple[str, ...]()

    def show(self, images: Sequence[str]) -> bool:
        """Set the images of the next batch. Return whether the features of all of them are kept."""
        self._shown = tuple(images)
        return all(image in self.kept for image in images)

    def __call__(self, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(image not in self.kept for image in self._shown):
            with torch.no_grad():
                made = self._compute(pixel_values, *args, **kwargs)
            lengths = [len(tokens) for tokens in made.pooler_output]
            deep = (each.split(lengths) for each in getattr(made, "deepstack_features", None) or ())
            for image, *parts in zip(self._shown, made.pooler_output, *deep, strict=True):
                self.kept[image] = tuple(map(_on_host, parts))
        first, *deeper = (
            [part.to(pixel_values.device, non_blocking=True) for part in each]
            for each in zip(*(self.kept[image] for image in self._shown), strict=True)
        )
        return SimpleNamespace(pooler_output=first, deepstack_features=[torch.cat(each) for each in deeper])


def _on_host(part: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory without waiting. This is safe because only the device reads it later."""
    return torch.empty_like(part, device="cpu", pin_memory=part.is_cuda).copy_(part, non_blocking=True)


def apply(model: Any, spec: Experiment) -> None:
    """Keep the features of images. Raises SpecError for an encoder with dropout."""
    base = base_model(model)
    for name in _DROPPED:
        if share := getattr(base.config.vision_config, name, 0):
            raise SpecError(
                f"optimizations.feature_cache: the encoder has {name} {share}, so images differ: leave it off"
            )
    base.model.get_image_features = Features(base.model.get_image_features)


def of(model: Any) -> Features | None:
    """Return the model's feature cache, or None."""
    features = getattr(getattr(base_model(model), "model", None), "get_image_features", None)
    return features if isinstance(features, Features) else None


def verify(model: Any, spec: Experiment) -> list[str]:
    features = of(model)
    if not spec.optimizations.feature_cache or (features is not None and features.kept):
        return []
    return ["optimizations.feature_cache is on and nothing that an image became is kept"]
