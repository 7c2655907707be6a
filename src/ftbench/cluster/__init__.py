"""Clusters: sweeps on Slurm and Ray, and runs on several nodes. The rest of ftbench works without this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment
    from ftbench.sweep.gpu_slots import GpuSlot


def slots(
    on: str, spec: Experiment, source: Path, folder: Path, stack: ExitStack, notify: Callable[[str], None]
) -> tuple[Sequence[GpuSlot], dict[str, Any]]:
    """Return the GPU slots of the cluster in `--on`, and the machine.json of one node.

    Args:
        on: `slurm`, `slurm:FILE`, `ray` or `ray://host:port`.
        spec: A resolved spec of the sweep.
        source: The spec's file.
        folder: The experiment's folder.
        stack: Closes the connection.
        notify: Receives notes about waiting.

    Raises:
        SpecError: `on` or a setting is invalid.
        MissingError: The cluster is not available.
    """
    if on.partition(":")[0] == "slurm":
        from ftbench.cluster import slurm

        return slurm.slots(on, spec, source, folder, notify)
    from ftbench.cluster import ray

    return ray.slots(on, spec, stack)
