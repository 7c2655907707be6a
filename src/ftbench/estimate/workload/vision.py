"""Trained parameters and products of the image encoder and projector."""

from collections.abc import Sequence

from ftbench.core.flops import VisionMatmulShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.vision import VisionShape


def learns(plan: TrainingPlan) -> bool:
    """Return whether encoder or projector are trained."""
    return (plan.vision, plan.projector) != ("frozen", "frozen")


def adapter_parameters(vision: VisionShape, plan: TrainingPlan) -> int:
    """Return the parameters of the adapters on encoder and projector: r (in + out) of each matrix."""
    encoder = vision.layers * _sides(vision.matrices) if plan.vision == "lora" else 0
    return plan.rank * (encoder + (_sides(vision.merging) if plan.projector == "lora" else 0))


def trained_whole(vision: VisionShape, plan: TrainingPlan) -> int:
    """Return the parameters of the fully trained parts."""
    encoder = vision.encoder if plan.vision == "full" else 0
    return encoder + (vision.projector if plan.projector == "full" else 0)


def vision_matmul(vision: VisionShape, plan: TrainingPlan) -> VisionMatmulShape:
    """Return the products per patch in encoder and projector, as the worker counts them on the live model."""
    share, layers = 1 / vision.merge**2, vision.layers
    encoder = vision.values * vision.hidden + layers * _weights(vision.matrices)
    projector = _weights(vision.merging) * share
    ranks = [plan.rank * _sides(matrices) for matrices in (vision.matrices, vision.merging)]
    return VisionMatmulShape(
        encoder, encoder if plan.vision == "full" else 0, layers * ranks[0] if plan.vision == "lora" else 0,
        projector, projector if plan.projector == "full" else 0,
        ranks[1] * share if plan.projector == "lora" else 0, vision.hidden, vision.windows,
    )  # fmt: skip


def _weights(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def _sides(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(inputs + outputs for inputs, outputs in matrices)
