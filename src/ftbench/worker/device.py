"""The device that is measured: a GPU, or the CPU."""

import os
from typing import Any

import torch

from ftbench.core.hardware import rocm_refusal
from ftbench.errors import MissingError


def device() -> torch.device:
    """Return the first visible GPU, that of its number to each rank of several; or the CPU."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number) if torch.cuda.is_available() else torch.device("cpu")


def sees_amd() -> bool:
    """Return whether torch is built for ROCm and sees a GPU of AMD's, which it calls CUDA's too."""
    return bool(torch.version.hip) and torch.cuda.is_available()


def check_device(gpu: dict[str, Any] | None) -> None:
    """Raise MissingError where the driver shows a GPU that torch cannot use, and where torch would use one that nothing
    here measures: the figures would be those of something else."""
    if sees_amd():
        raise MissingError(rocm_refusal(torch.__version__))
    if gpu and not torch.cuda.is_available():
        raise MissingError(
            f"this machine has {gpu['name']} and torch {torch.__version__} cannot use it: install a build of torch for "
            "the driver's CUDA version, or set CUDA_VISIBLE_DEVICES= (empty) to measure the CPU"
        )
