"""Optimizations of how images are processed."""

from collections.abc import Iterator
from typing import Annotated

from ftbench.spec.base import Experiment
from ftbench.spec.optimizations.declaration import COARSE, EXACT, Optimization, Tolerance, or_number


def _feature_cache(spec: Experiment) -> Iterator[str]:
    trained = [part for part in ("vision", "projector") if getattr(spec.method, part, "full") != "frozen"]
    if trained and spec.method.name == "full":
        yield "optimizations.feature_cache needs a frozen encoder, and method full trains it: use lora or qlora"
    elif trained:
        keys = " and ".join(f"method.{part}" for part in trained)
        yield f"optimizations.feature_cache needs a frozen encoder and projector: set {keys} to frozen"


OPTIMIZATIONS = {
    "feature_cache": Optimization(
        description="keep the output of a frozen vision encoder and projector in host memory, and compute it only in "
        "the first epoch",
        verified="the features of the first step's images are cached",
        tolerance=Tolerance(EXACT),
        needs_images=True,
        not_with_unsloth="unsloth's own classes compute the features: set it to off",
        incompatibilities=_feature_cache,
    ),
    "image_cache": Optimization(
        description="process images once before training and keep them on disk, so that no step waits for them",
        verified="all images of a batch come from the disk cache",
        tolerance=Tolerance(EXACT),
        needs_images=True,
    ),
    "image_size": Optimization(
        type=Annotated[bool | int, or_number("the longest side of an image in pixels", 28, 8192, also="off")],
        description="scale images down until the longest side has this many pixels, and do not split larger ones into "
        "tiles: fewer tokens, less detail",
        verified="the number of tiles per image; images are scaled in the processor",
        tolerance=Tolerance(COARSE),
        needs_images=True,
        not_ablated=(True,),
    ),
}
