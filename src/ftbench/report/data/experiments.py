"""Which runs are repeats: those of one spec, one set of tokens and one kind of machine, held to the same watts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ftbench.core.grouping import grouped_by
from ftbench.report.data.facts import CPU, IMPORTED, LIMIT, REWARD

if TYPE_CHECKING:
    from ftbench.report.data.groups import Run

DATA = "dataset.hash"  # of the tokens that a run was given


def repeats(runs: Iterable[Run], axis: str = "") -> list[list[Run]]:
    """Return runs in groups of repeats (and by `axis`, where that is a fact of the machine), in the order of their
    first. An edited file or another chat template makes other tokens of the same spec, which are another experiment; a
    run that ended before it had any is a repeat of the first that had."""
    known = [((identity(run), run.ran.get(axis), run.ran.get(LIMIT)), run.ran.get(DATA), run) for run in runs]
    first = {spec: data for spec, data, _ in reversed(known) if data}
    groups = grouped_by(known, lambda each: (each[0], each[1] or first.get(each[0])))
    return [[run for _, _, run in group] for group in groups.values()]


def identity(run: Run) -> Any:
    """Return what is equal for runs of the same spec on the same kind of machine, wherever and whenever they ran. Of a
    run that was made of a log too little is known to call another its repeat."""
    known = None if IMPORTED in run.spec else frozenset(run.spec.items())
    return known or run.record["path"], run.record.get("gpu") or CPU, run.ran.get(REWARD)
