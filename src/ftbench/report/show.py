"""`ftbench show`: one finished run, by its folder, its id, or its number in a report."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.rows import FIELDS, LATER, RunSummary
from ftbench.errors import SpecError
from ftbench.report import advice
from ftbench.report.card import card
from ftbench.report.data import repeats
from ftbench.report.data.collect import Record, collect
from ftbench.spec.base import nearest, shortened
from ftbench.store.rundir import RunDir
from ftbench.store.summary import read_summary

_NAMED = 5  # runs in a message


@dataclass(frozen=True, slots=True)
class Shown:
    """A run with what to try next."""

    run: RunDir
    summary: dict[str, Any]
    tried: list[advice.Suggestion]

    def text(self) -> str:
        """Return the card, and below it what to try."""
        known = {name: value for name, value in self.summary.items() if name in FIELDS | LATER}
        return "\n".join(filter(None, [
            card(RunSummary(**known), self.run), advice.as_text(self.run, self.summary, self.tried),
        ]))  # fmt: skip

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        tried = [dataclasses.asdict(each) for each in self.tried]
        return {"run_dir": str(self.run.path), "summary": self.summary, "what_to_try": tried}


def show(name: str, paths: Sequence[Path]) -> Shown:
    """Return the run that a name means. Raise SpecError where it is none, or several."""
    if RunDir(Path(name)).state.exists():
        run = RunDir(Path(name))
        return shown(run, run.path.resolve().parent.parent)
    run = RunDir(Path(str(_record(name, paths)["path"])))
    return shown(run, paths[0])


def shown(run: RunDir, store: Path) -> Shown:
    """Return a run with what to try, by the runs of a store."""
    summary = read_summary(run)
    return Shown(run, summary, advice.suggestions(run, summary, store))


def _record(name: str, paths: Sequence[Path]) -> Record:
    folder = Path(name)
    if not any(path.exists() for path in paths):
        if not folder.is_dir():
            way_out = "say where the runs are, `ftbench show RUN FOLDER`"
            raise SpecError(f"show {shortened(name)}: there is no {_places(paths)}: {way_out}")
        return _the_one(name, repeats.with_axes(collect([folder]))[0], folder)
    records, _ = repeats.with_axes(collect(paths))
    ids = {str(record["run_id"]): record for record in records}
    if name.isdecimal():
        if 0 < int(name) <= len(records):
            return records[int(name) - 1]
        raise SpecError(
            f"show {shortened(name)}: {_places(paths)} holds {units.some(len(records), 'run')}, with numbers from 1"
        )
    plain = name.casefold()
    same = [record for record in records if plain in (record["run_id"].casefold(), record["label"].casefold())]
    near = same or [record for record in records if plain in f"{record['run_id']} {record['label']}".casefold()]
    if not near and folder.is_dir():
        near = [record for record in records if Path(record["path"]).resolve().is_relative_to(folder.resolve())]
        if not near:
            return _the_one(name, repeats.with_axes(collect([folder]))[0], folder)
    if not near:
        raise SpecError(f"show {shortened(name)}: no run in {_places(paths)} is called so{nearest(name, ids)}")
    return _the_one(name, near)


def _the_one(name: str, records: Sequence[Record], folder: Path | None = None) -> Record:
    """Return the run, where it is one. Their numbers are those of a report of `folder`, if not of all."""
    if len(records) == 1:
        return records[0]
    named = units.listed([f"{record['number']} ({record['label']})" for record in records], _NAMED)
    how = "" if folder is None else f", `ftbench show NUMBER {folder}`"
    raise SpecError(f"show {shortened(name)}: there are several: {named}; say which by its number{how}")


def _places(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))
