"""`ftbench profile`: what its options ask for, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.errors import SpecError
from ftbench.profile import store
from ftbench.profile.diff import as_text as diff_text
from ftbench.profile.diff import diff
from ftbench.profile.table import as_text
from ftbench.rundir import RunDir


def request(spec: Path | None, sets: Sequence[str], steps: int | None, nsys: bool) -> tuple[Path, list[str]]:
    """The spec and the changes to it that make its run a profile. Raises SpecError without a spec."""
    if spec is None:
        raise SpecError("profile: name a spec file, or two profiled runs with --diff A B")
    count = [f"measure.profile_steps={steps}"] if steps is not None else []
    return spec, [f"measure.profile={'nsys' if nsys else 'on'}", *count, *sets]


def shown(run: RunDir) -> str:
    """What a run has recorded, for a person; empty where it recorded nothing."""
    if (run.profile / store.NSYS).is_file():
        return f"{run.run_id}: recorded\n  open it with nsys-ui, or: nsys stats {run.profile / store.NSYS}"
    if not (run.profile / store.KERNELS).is_file():
        return ""
    return as_text(store.load(run.profile), run.profile)


def document(run: RunDir) -> dict[str, Any] | None:
    """kernels.json of a run; None where it recorded none."""
    return store.load(run.profile) if (run.profile / store.KERNELS).is_file() else None


def compared(paths: tuple[Path, Path], spec: Path | None, as_json: bool) -> str:
    """Where the time of two profiles differs. Raises SpecError for what is no profile."""
    if spec is not None:
        raise SpecError(f"profile: --diff compares two profiles and runs nothing: leave {spec} out")
    folders = (store.folder_of(paths[0]), store.folder_of(paths[1]))
    found = diff(store.load(folders[0]), store.load(folders[1]))
    if as_json:
        return json.dumps(found, ensure_ascii=False)
    return diff_text(found, (name_of(folders[0]), name_of(folders[1])))


def name_of(folder: Path) -> str:
    return folder.resolve().parent.name if folder.name == "profile" else folder.name
