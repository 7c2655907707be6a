"""What one of several GPUs holds. All in bytes.

Sources: Rajbhandari et al. 2020 (ZeRO, sections 5 and 6), torch's fully_shard and DistributedDataParallel, DeepSpeed's
estimators of model states.
"""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero2-offload", "zero3-offload")


@dataclass(frozen=True, slots=True)
class Share:
    """The parts of weights, gradients and optimizer state that one GPU holds, 1 for all; `gathered` of one layer is
    held whole while it computes. Offloading keeps the optimizer state in host memory: 0 here."""

    weights: float
    gradients: float
    optimizer: float
    gathered: bool


def share(strategy: str, gpus: int) -> Share:
    """ZeRO-1 divides the optimizer state, ZeRO-2 the gradients too, ZeRO-3 and FSDP the weights too; DDP nothing.
    Raises ValueError for an unknown strategy or fewer than one GPU."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is none of {', '.join(STRATEGIES)}")
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs: there must be 1 or more")
    part = 1 / gpus
    stage = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}.get(strategy.removesuffix("-offload"), 0)
    optimizer = part if stage >= 1 else 1.0
    if strategy.endswith("-offload"):
        optimizer = 0.0
    return Share(part if stage >= 3 else 1.0, part if stage >= 2 else 1.0, optimizer, gathered=stage >= 3)


def ddp_buckets(strategy: str, gpus: int, trained_bytes: float) -> float:
    """DDP's flat copies of the gradients: as large as they are (gradient_as_bucket_view is off in accelerate)."""
    return trained_bytes if strategy == "ddp" and gpus > 1 else 0.0


def gathered(layer_bytes: float, largest_bytes: float) -> float:
    """What ZeRO-3 and FSDP gather: the layer at work, the next one that is fetched meanwhile, and at the ends the
    embedding or head alone."""
    return max(2 * layer_bytes, largest_bytes)
