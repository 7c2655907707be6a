"""`ftbench verify`: are the files of a bundle those that were packed, and do the figures follow from the steps?"""

import json
import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.rows import FIELDS, LATER, SCHEMA
from ftbench.core.units import reworded
from ftbench.store import digests
from ftbench.store.bundle import unpack
from ftbench.store.bundle.pack import files_of
from ftbench.store.documents import read_documents
from ftbench.store.rundir import RunDir, find_runs, read_document
from ftbench.store.summary import as_dict, summarise

# Python 3.12 sums floats more exactly than 3.11; a figure that somebody changed is further off than this.
TOLERANCE = 1e-9


@dataclass(slots=True)
class Verdict:
    """`problems` are reasons not to trust the bundle, `unchecked` is what could not be compared with anything, `notes`
    is what to know beside; a sentence each."""

    runs: int = 0
    files: int = 0
    figures: int = 0
    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(path: Path) -> Verdict:
    """Check every hash of a bundle, every summary in it against its steps, and every file against the digest that its
    run ended with. Raises SpecError for what is no bundle."""
    with tempfile.TemporaryDirectory(prefix="ftbench-verify-") as folder:
        manifest = unpack.unpack(path, Path(folder))
        verdict = Verdict(files=len(manifest["hashes"]), problems=unpack.problems(manifest))
        left, older = set(manifest["hashes"]), 0
        for run in find_runs(Path(folder) / "runs"):
            inside = run.path.relative_to(folder).as_posix()
            left -= {f"{inside}/{name}" for name in files_of(run, with_logs=True)}
            redacted = {Path(name).name for name, entry in manifest["files"].items()
                        if name.startswith(f"{inside}/") and entry.get("redacted")}  # fmt: skip
            verdict.runs += 1
            _check(run, f"{run.path.parent.name}/{run.run_id}", verdict)
            older += _check_digest(run, f"{run.path.parent.name}/{run.run_id}", redacted, verdict)
        if not verdict.runs:
            verdict.unchecked.append("it holds no run: no figure was compared with anything")
        verdict.unchecked += [f"{name}: is no file of a run (a folder with a state.json)" for name in sorted(left)]
        if older:
            verdict.unchecked.append(
                f"no digest.json in {older} of {verdict.runs} runs, as in those of earlier versions: a column or a key "
                "that feeds no figure may have been changed"
            )
        return verdict


def as_text(verdict: Verdict, path: Path) -> str:
    """Return a line for each problem and note, and one that sums up."""
    count = len(verdict.problems)
    agree = f"{count} {'does' if count == 1 else 'do'} not agree" if count else "every hash and every figure agrees"
    if verdict.unchecked:
        agree = f"{agree if count else 'what was compared agrees'}, {len(verdict.unchecked)} not checked"
    counts = {"run": verdict.runs, "file": verdict.files, "figure": verdict.figures}
    last = f"{path}: {', '.join(units.some(number, noun) for noun, number in counts.items())}: {agree}"
    unchecked = (f"not checked: {text}" for text in verdict.unchecked)
    return "\n".join([*verdict.problems, *unchecked, *(f"note: {note}" for note in verdict.notes), last])


def _check(run: RunDir, name: str, verdict: Verdict) -> None:
    documents, problem = read_documents(run)
    if problem:
        verdict.problems.append(f"{name}: {problem}")
        return
    written = documents["summary"]
    if not written:
        verdict.unchecked.append(f"{name}: has no summary to compare with its steps")
        return
    if written.get("schema") != SCHEMA or not written.keys() >= FIELDS:
        verdict.unchecked.append(f"{name}: its summary is of another version of ftbench; a report computes its own")
        return
    computed = json.loads(json.dumps(as_dict(summarise(run))))
    computed = {key: value for key, value in computed.items() if key in written or key not in LATER}
    old, new = written.pop("warnings", []), computed.pop("warnings")
    verdict.problems += [f"{name}: its summary does not say: {text}" for text in _beside(new, old)]
    verdict.notes += [f"{name}: its summary says what its files do not show: {text}" for text in _beside(old, new)]
    for key, said, shown in _leaves(written, computed):
        verdict.figures += 1
        if not _same(said, shown):
            verdict.problems.append(f"{name}: {key} is {_shown(said)} in summary.json and {_shown(shown)} by its files")


def _check_digest(run: RunDir, name: str, redacted: Collection[str], verdict: Verdict) -> bool:
    """Compare a run's files with what they were as it ended; return whether there is no digest."""
    if problem := read_document(run.digest)[1]:
        verdict.problems.append(f"{name}: {problem}")
        return False
    changed = digests.changed(run)
    for file in changed or ():
        if file in redacted:
            verdict.unchecked.append(f"{name}: secrets were taken out of {file}, so it is not as the run left it")
        else:
            verdict.problems.append(f"{name}: {file} is not as the run left it, by its digest.json")
    return changed is None


_ABSENT = object()


def _leaves(written: Any, computed: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(written, dict) and isinstance(computed, dict):
        for name in {**written, **computed}:
            yield from _leaves(written.get(name, _ABSENT), computed.get(name, _ABSENT), f"{key}.{name}".lstrip("."))
    elif isinstance(written, list) and isinstance(computed, list) and len(written) == len(computed):
        for index, (said, shown) in enumerate(zip(written, computed, strict=True)):
            yield from _leaves(said, shown, f"{key}.{index}")
    else:
        yield key, written, computed


def _beside(sentences: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the sentences that are not among others, as these would be written today."""
    known = set(map(reworded, others))
    return [text for text in sentences if reworded(text) not in known]


def _same(written: Any, computed: Any) -> bool:
    if _number(written) and _number(computed):
        return math.isclose(written, computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(written, str) and isinstance(computed, str):
        return reworded(written) == reworded(computed)
    return bool(written == computed)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return "missing" if value is _ABSENT else json.dumps(value, ensure_ascii=False)[:80]
