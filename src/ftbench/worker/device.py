"""The device that is measured: a GPU, or the CPU."""

import os
from typing import Any

import torch

from ftbench.core.hardware import rocm_refusal
from ftbench.errors import MissingError


def device() -> torch.device:
    """Return this rank's GPU, or the CPU if torch sees no GPU."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number) if torch.cuda.is_available() else torch.device("cpu")


def sees_amd() -> bool:
    """Return whether torch is a ROCm build and sees an AMD GPU, which it also calls `cuda`."""
    return bool(torch.version.hip) and torch.cuda.is_available()


def check_device(gpu: dict[str, Any] | None) -> None:
    """Raise MissingError if torch cannot use the GPU that the driver reports, or would use an AMD GPU."""
    if sees_amd():
        raise MissingError(rocm_refusal(torch.__version__))
    if gpu and not torch.cuda.is_available():
        raise MissingError(
            f"this machine has {gpu['name']} and torch {torch.__version__} cannot use it: install a build of torch for "
            "the driver's CUDA version, or set CUDA_VISIBLE_DEVICES= (empty) to measure the CPU"
        )
