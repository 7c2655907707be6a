"""`ftbench profile`: what its options ask for, and what it prints."""

from typing import Any

from ftbench.profile import files, table
from ftbench.store.rundir import RunDir


def as_text(run: RunDir) -> str:
    """Return what a run has recorded, for a person; empty where it recorded nothing."""
    if not (run.profile / files.KERNELS).is_file():
        return ""
    return table.as_text(files.load(run.profile), run.profile)


def document(run: RunDir) -> dict[str, Any] | None:
    """Return kernels.json of a run; None where it recorded none."""
    return files.load(run.profile) if (run.profile / files.KERNELS).is_file() else None
