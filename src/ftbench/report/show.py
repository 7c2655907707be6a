"""`ftbench show`: one finished run, by folder, id or number in a report, and what to try next."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import canonical_name, capability_of, limited_gpu
from ftbench.core.rows import FIELDS, LATER, RunSummary
from ftbench.core.table import folded
from ftbench.errors import FtbenchError, SpecError
from ftbench.report.card import card
from ftbench.report.data import groups
from ftbench.report.data.collect import Record, collect
from ftbench.spec.ablation import Changes, settings, with_changes
from ftbench.spec.base import nearest, shortened
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.spec.optimizations import OPTIMIZATIONS
from ftbench.store.rundir import RunDir, first_gpu, read_json
from ftbench.store.summary import read_summary

_MAX_NAMED = 5  # runs in a message
_DATA = ("loader_processes", "image_cache")  # optimizations for data-bound runs
_BATCH, _ACCUMULATION = "train.batch_size", "train.gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change of a spec: name, effect, `--set` values, and the command that runs it."""

    name: str
    effect: str
    sets: tuple[str, ...]
    command: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A run with suggestions."""

    run: RunDir
    summary: dict[str, Any]
    suggestions: list[Suggestion]

    def text(self) -> str:
        """Return the card and what to try next."""
        known = {name: value for name, value in self.summary.items() if name in FIELDS | LATER}
        lines = [card(RunSummary(**known), self.run)]
        lines += ["what to try:"] if self.suggestions else []
        for each in self.suggestions:
            lines += [folded(f"  {each.name}: {each.effect}"), f"    {each.command}"]
        if self.summary["state"] in ("ok", "oom") and (gpu := self.summary.get("gpu")):
            lines += ["estimate other methods, batches and optimizations:"]
            lines += [f"    {_command('recommend', self.run, '--gpu', canonical_name(gpu))}"]
        if self.summary["state"] == "ok" and (self.summary.get("bound") or {}).get("verdict"):
            lines += ["see the time of a step by kernel:", f"    {_command('profile', self.run)}"]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        suggestions = [dataclasses.asdict(each) for each in self.suggestions]
        return {"run_dir": str(self.run.path), "summary": self.summary, "what_to_try": suggestions}


def show(name: str, paths: Sequence[Path]) -> Shown:
    """Return the run with this folder, id or number. Raise SpecError if no run or several runs match."""
    folder = Path(name)
    return shown(RunDir(folder if RunDir(folder).state.exists() else Path(str(_record(name, paths)["path"]))))


def shown(run: RunDir) -> Shown:
    """Return a run with suggestions."""
    summary = read_summary(run)
    return Shown(run, summary, suggestions(run, summary))


# --- suggestions -----------------------------------------------------------------------------------------------------


def suggestions(run: RunDir, summary: Mapping[str, Any]) -> list[Suggestion]:
    """Return changes for a run that was out of memory or data-bound. Empty if this version cannot load its spec."""
    values = read_json(run.spec_json)
    try:
        spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
    except (FtbenchError, ValueError):
        return []
    gpu = limited_gpu(first_gpu(read_json(run.machine)))
    capability = capability_of(gpu) if gpu else None
    if spec.launch.mock != "off":
        return []
    if summary["state"] == "oom":
        changes = list(_less_memory(spec))
    else:
        data_bound = summary["state"] == "ok" and (summary.get("bound") or {}).get("verdict") == "data-bound"
        changes = list(_faster_data(spec)) if data_bound else []
    suggested = []
    for name, effect, change in changes:
        changed = with_changes(spec, change)
        if not incompatibilities(changed) and not machine_incompatibilities(changed, capability):
            sets = settings(change.items())
            options = [word for text in sets for word in ("--set", text)]
            suggested.append(Suggestion(name, effect, sets, _command("run", run, *options)))
    return suggested


def _less_memory(spec: Experiment) -> Iterator[tuple[str, str, Changes]]:
    if spec.train.batch_size > 1:
        halved = {_BATCH: spec.train.batch_size // 2, _ACCUMULATION: spec.train.gradient_accumulation_steps * 2}
        yield "half the batch", "the same samples per step, in twice the passes", halved
    if not spec.optimizations.gradient_checkpointing:
        change = {"optimizations.gradient_checkpointing": True}
        yield "gradient checkpointing", "recomputes activations in the backward pass", change


def _faster_data(spec: Experiment) -> Iterator[tuple[str, str, Changes]]:
    for name in _DATA:
        if not getattr(spec.optimizations, name):
            effect = (OPTIMIZATIONS[name].description or "").partition(";")[0]
            yield name.replace("_", " "), effect, {f"optimizations.{name}": True}


def _command(command: str, run: RunDir, *options: str) -> str:
    return shlex.join(["ftbench", command, str(run.spec_json), *options])


# --- finding a run ---------------------------------------------------------------------------------------------------


def _record(name: str, paths: Sequence[Path]) -> Record:
    folder = Path(name)
    if not any(path.exists() for path in paths):
        if not folder.is_dir():
            raise SpecError(
                f"show {shortened(name)}: {_places(paths)} does not exist: name the folder, `ftbench show RUN FOLDER`"
            )
        return _only(name, groups.with_axes(collect([folder]))[0], folder)
    records, _ = groups.with_axes(collect(paths))
    ids = {str(record["run_id"]): record for record in records}
    if name.isdecimal():
        if 0 < int(name) <= len(records):
            return records[int(name) - 1]
        count = units.some(len(records), "run")
        raise SpecError(f"show {shortened(name)}: {_places(paths)} has {count}, with numbers from 1")
    plain = name.casefold()
    same = [record for record in records if plain in (record["run_id"].casefold(), record["label"].casefold())]
    near = same or [record for record in records if plain in f"{record['run_id']} {record['label']}".casefold()]
    if not near and folder.is_dir():
        near = [record for record in records if Path(record["path"]).resolve().is_relative_to(folder.resolve())]
        if not near:
            return _only(name, groups.with_axes(collect([folder]))[0], folder)
    if not near:
        raise SpecError(f"show {shortened(name)}: no run in {_places(paths)} matches{nearest(name, ids)}")
    return _only(name, near)


def _only(name: str, records: Sequence[Record], folder: Path | None = None) -> Record:
    """Return the only record. Raise SpecError for several; their numbers are those of a report of `folder`."""
    if len(records) == 1:
        return records[0]
    named = units.listed([f"{record['number']} ({record['label']})" for record in records], _MAX_NAMED)
    how = "" if folder is None else f", `ftbench show NUMBER {folder}`"
    raise SpecError(f"show {shortened(name)}: several runs match: {named}: choose one by its number{how}")


def _places(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))
