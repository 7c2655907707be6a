"""Choose and check the device that ftbench measures: a GPU or the CPU.

`python -m ftbench.worker.device` prints the torch version and the GPUs as JSON, for `ftbench doctor`.
"""

import json
import os
import warnings
from typing import Any

import torch

from ftbench.core.hardware import rocm_refusal
from ftbench.errors import MissingError
from ftbench.worker.outcome import exit_now


def device() -> torch.device:
    """Return the GPU of this rank. Return the CPU if torch does not see a GPU."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number) if torch.cuda.is_available() else torch.device("cpu")


def sees_amd() -> bool:
    """Return whether torch is a ROCm build and sees an AMD GPU. torch calls AMD GPUs `cuda` too."""
    return bool(torch.version.hip) and torch.cuda.is_available()


def check_device(gpu: dict[str, Any] | None) -> None:
    """Raise MissingError if torch cannot use the GPU that the driver reports, or if torch would use an AMD GPU."""
    if sees_amd():
        raise MissingError(rocm_refusal(torch.__version__))
    if gpu and not torch.cuda.is_available():
        raise MissingError(
            f"this machine has {gpu['name']} and torch {torch.__version__} cannot use it: install a build of torch for "
            "the driver's CUDA version, or set CUDA_VISIBLE_DEVICES= (empty) to measure the CPU"
        )


def versions() -> dict[str, Any]:
    """Return the torch version and the GPUs, and test the first GPU.

    `cuda` is the CUDA version of the torch build, or None. `rocm` is True if torch sees an AMD GPU. `works` is True if
    a kernel ran on the first GPU. After a failure, `error` contains the reason.
    """
    result: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "rocm": sees_amd()}
    result |= {"devices": [], "works": None, "error": None}
    if torch.version.cuda is None:
        return result
    try:
        torch.cuda.init()
        every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        result["devices"] = [{"name": each.name, "capability": [each.major, each.minor]} for each in every]
        result["works"] = False
        result["works"] = float(torch.ones(2, device="cuda").sum()) == 2
    except Exception as error:  # noqa: BLE001 - the result contains the error
        result["error"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return result


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(versions()))
    exit_now(0)
