"""What is trained of the parts that read images, and what a patch passes through in them."""

from collections.abc import Sequence

from ftbench.core.flops import VisionMatmulShape
from ftbench.estimate.workload.method import Recipe
from ftbench.families.vision import VisionShape


def learns(recipe: Recipe) -> bool:
    """Return whether the gradient reaches what images become."""
    return (recipe.vision, recipe.projector) != ("frozen", "frozen")


def adapter_parameters(vision: VisionShape, recipe: Recipe) -> int:
    """Return the parameters of the adapters on encoder and projector: r (in + out) of each matrix."""
    encoder = vision.layers * _sides(vision.matrices) if recipe.vision == "lora" else 0
    return recipe.rank * (encoder + (_sides(vision.merging) if recipe.projector == "lora" else 0))


def trained_whole(vision: VisionShape, recipe: Recipe) -> int:
    """Return the parameters of the parts whose every weight is trained."""
    encoder = vision.encoder if recipe.vision == "full" else 0
    return encoder + (vision.projector if recipe.projector == "full" else 0)


def vision_matmul(vision: VisionShape, recipe: Recipe) -> VisionMatmulShape:
    """Return what a patch passes through in encoder and projector, as the worker counts it on the live model."""
    share, layers = 1 / vision.merge**2, vision.layers
    encoder = vision.values * vision.hidden + layers * _weights(vision.matrices)
    projector = _weights(vision.merging) * share
    ranks = [recipe.rank * _sides(matrices) for matrices in (vision.matrices, vision.merging)]
    return VisionMatmulShape(
        encoder, encoder if recipe.vision == "full" else 0, layers * ranks[0] if recipe.vision == "lora" else 0,
        projector, projector if recipe.projector == "full" else 0,
        ranks[1] * share if recipe.projector == "lora" else 0, vision.hidden, vision.windows,
    )  # fmt: skip


def _weights(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def _sides(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(inputs + outputs for inputs, outputs in matrices)
