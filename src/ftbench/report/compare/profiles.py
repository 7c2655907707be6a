"""`ftbench profile --diff`: where the time of two profiled runs differs, and in what the runs do."""

import json
from pathlib import Path

from ftbench.core.compare import Difference, differences
from ftbench.errors import SpecError
from ftbench.profile import files
from ftbench.profile.diff import as_text, diff
from ftbench.report.data.facts import machine_facts, spec_facts
from ftbench.store.rundir import RunDir


def compared(paths: tuple[Path, Path], spec: Path | None, as_json: bool) -> str:
    """Return two profiles side by side, as text or JSON. Raises SpecError for what is no profile."""
    if spec is not None:
        raise SpecError(f"profile: --diff compares two profiles and runs nothing: leave {spec} out")
    a, b = files.folder_of(paths[0]), files.folder_of(paths[1])
    difference = diff(files.load(a), files.load(b), differing(a, b))
    return json.dumps(difference, ensure_ascii=False) if as_json else as_text(difference, (_name(a), _name(b)))


def differing(a: Path, b: Path) -> list[Difference] | None:
    """Return on what the runs of two profiles do not agree, of all that is known of both: spec, tokens, versions,
    commit. What really ran follows from these. None where a spec is not known."""
    runs = [RunDir(folder.resolve().parent) for folder in (a, b)]
    if not all(spec_facts(run) for run in runs):
        return None
    baseline, candidate = ({**spec_facts(run), **machine_facts(run)} for run in runs)
    facts = differences(baseline, candidate, lambda key: key.startswith("applied."))
    return [fact for fact in facts if fact.baseline is not None and fact.candidate is not None]


def _name(folder: Path) -> str:
    return folder.resolve().parent.name if folder.name == "profile" else folder.name
