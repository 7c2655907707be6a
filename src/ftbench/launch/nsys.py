"""The worker within Nsight Systems (`measure.profile: nsys`): it records while the worker asks it to."""

import shutil
from collections.abc import Sequence

from ftbench.errors import MissingError
from ftbench.store.rundir import RunDir


def around(command: Sequence[str], run: RunDir) -> list[str]:
    """Return the command that runs `command` under nsys, which leaves profile/nsys.nsys-rep."""
    return [
        "nsys", "profile", "--output", str(run.profile.resolve() / "nsys"), "--force-overwrite", "true",
        "--trace", "cuda,nvtx,cublas,cudnn", "--sample", "none", "--cpuctxsw", "none",
        "--capture-range", "cudaProfilerApi", "--capture-range-end", "stop",
        *command,
    ]  # fmt: skip


def check_installed() -> None:
    """Raise MissingError where nsys is not on the PATH."""
    if shutil.which("nsys") is None:
        raise MissingError(
            "measure.profile nsys needs Nsight Systems and `nsys` is not on the PATH: install the package "
            "nsight-systems-cli of NVIDIA's CUDA repository, or profile without --nsys"
        )
