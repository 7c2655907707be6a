"""Images that are processed before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _refusals(spec: Experiment) -> Iterator[str]:
    if not spec.dataset.may_have_images:
        yield f"optimizations.image_cache keeps images, and {spec.dataset.name} has none: leave it off"


OPTIMIZATION = Optimization(
    description="process images once, before training, and keep them on disk: steps do not wait for them",
    verified="batches take images from the disk alone",
    tolerance=Tolerance(EXACT),
    unsloth="its image models are not measured here: leave it off",
    refusals=_refusals,
)
