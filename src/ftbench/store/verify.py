"""`ftbench verify`: check the hashes of a bundle's files, and compare its figures with the recorded steps."""

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.rows import FIELDS, LATER, SCHEMA
from ftbench.store import bundle
from ftbench.store.rundir import RunDir, find_runs
from ftbench.store.summary import as_dict, read_documents, summarise

# Python 3.12 sums floats more exactly than 3.11. Manipulated figures differ by more than this.
TOLERANCE = 1e-9


@dataclass(slots=True)
class Verdict:
    """The result of checking a bundle. `problems` are reasons for distrust. `unchecked` lists runs without a check."""

    runs: int = 0
    files: int = 0
    figures: int = 0
    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def verify(path: Path) -> Verdict:
    """Check the hash of each file in a bundle, and compare each summary with the steps of its run.

    Raises:
        SpecError: The file is not a bundle.
    """
    with tempfile.TemporaryDirectory(prefix="ftbench-verify-") as folder:
        manifest = bundle.unpack(path, Path(folder))
        verdict = Verdict(files=len(manifest["hashes"]), problems=bundle.problems(manifest))
        for run in find_runs(Path(folder) / "runs"):
            verdict.runs += 1
            _check_summary(run, f"{run.path.parent.name}/{run.run_id}", verdict)
        if not verdict.runs:
            verdict.problems.append("the bundle contains no run: no figure was compared")
        return verdict


def as_text(verdict: Verdict, path: Path) -> str:
    """Return one line per problem, one line per run that was not compared, and a last line with the totals."""
    count = len(verdict.problems)
    agree = f"{count} {'does' if count == 1 else 'do'} not agree" if count else "every hash and every figure agrees"
    if verdict.unchecked:
        agree = f"{agree if count else 'all that was compared agrees'}, {len(verdict.unchecked)} not checked"
    counts = {"run": verdict.runs, "file": verdict.files, "figure": verdict.figures}
    last = f"{path}: {', '.join(units.some(number, noun) for noun, number in counts.items())}: {agree}"
    unchecked = (f"not checked: {text}" for text in verdict.unchecked)
    return "\n".join([*verdict.problems, *unchecked, last])


def _check_summary(run: RunDir, name: str, verdict: Verdict) -> None:
    documents, problem = read_documents(run)
    if problem:
        verdict.problems.append(f"{name}: {problem}")
        return
    written = documents["summary"]
    if not written:
        verdict.unchecked.append(f"{name}: has no summary to compare with its steps")
        return
    if written.get("schema") != SCHEMA or not written.keys() >= FIELDS:
        verdict.unchecked.append(f"{name}: its summary is of another version of ftbench; a report computes a new one")
        return
    computed = json.loads(json.dumps(as_dict(summarise(run))))
    computed = {key: value for key, value in computed.items() if key in written or key not in LATER}
    if written.get("ranks") and not computed.get("ranks"):
        del written["ranks"], computed["ranks"]
        verdict.unchecked.append(f"{name}: its figures per GPU, because the steps of the other GPUs are missing")
    known = written.pop("warnings", [])
    missing = [text for text in computed.pop("warnings") if text not in known]
    verdict.problems += [f"{name}: its summary lacks the warning: {text}" for text in missing]
    for key, stored, expected in _leaves(written, computed):
        verdict.figures += 1
        if not _same(stored, expected):
            texts = [json.dumps(value, ensure_ascii=False)[:80] for value in (stored, expected)]
            verdict.problems.append(f"{name}: {key} is {texts[0]} in summary.json, computed: {texts[1]}")


def _leaves(written: Any, computed: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, stored value, computed value) for each figure of a summary."""
    if isinstance(written, dict) and isinstance(computed, dict):
        for name in {**written, **computed}:
            yield from _leaves(written.get(name), computed.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(written, list) and isinstance(computed, list) and len(written) == len(computed):
        for index, (stored, expected) in enumerate(zip(written, computed, strict=True)):
            yield from _leaves(stored, expected, f"{key}.{index}")
    else:
        yield key, written, computed


def _same(written: Any, computed: Any) -> bool:
    if isinstance(written, float | int) and isinstance(computed, float | int):
        return math.isclose(written, computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(written == computed)
