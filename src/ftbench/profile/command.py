"""`ftbench profile`: what its options ask for, and what it prints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.errors import SpecError
from ftbench.profile import files, table
from ftbench.store.rundir import RunDir


def request(spec: Path | None, sets: Sequence[str], steps: int | None, nsys: bool) -> tuple[Path, list[str]]:
    """Return the spec and the changes to it that make its run a profile. Raise SpecError without a spec."""
    if spec is None:
        raise SpecError("profile: name a spec file, or two profiled runs with --diff A B")
    count = [f"measure.profile_steps={steps}"] if steps is not None else []
    return spec, [f"measure.profile={'nsys' if nsys else 'on'}", *count, *sets]


def as_text(run: RunDir) -> str:
    """Return what a run has recorded, for a person; empty where it recorded nothing."""
    if (run.profile / files.NSYS).is_file():
        return f"{run.run_id}: recorded\n  open it with nsys-ui, or: nsys stats {run.profile / files.NSYS}"
    if not (run.profile / files.KERNELS).is_file():
        return ""
    return table.as_text(files.load(run.profile), run.profile)


def document(run: RunDir) -> dict[str, Any] | None:
    """Return kernels.json of a run; None where it recorded none."""
    return files.load(run.profile) if (run.profile / files.KERNELS).is_file() else None
