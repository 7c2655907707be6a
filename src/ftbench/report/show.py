"""`ftbench show`: show one finished run, its bottleneck, and one change to try.

The user selects the run by its folder, its id, or its number in a report."""

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import canonical_name, capability_of, limited_gpu
from ftbench.core.rows import FIELDS, LATER, RunSummary
from ftbench.core.table import folded, folded_command
from ftbench.errors import FtbenchError, SpecError
from ftbench.report.answer import rank_text
from ftbench.report.card import card
from ftbench.report.data import groups
from ftbench.report.data.collect import Record, collect, named_path
from ftbench.spec.ablation import Changes, settings, with_changes
from ftbench.spec.base import nearest, shortened
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.spec.optimizations import OPTIMIZATIONS
from ftbench.store.rundir import ARCHIVED, KERNELS, NOT_FINITE, RunDir, first_gpu, read_json
from ftbench.store.summary import read_summary

_MUCH_PADDING, _MUCH_IDLE = 0.1, 0.15  # share of padding in the computed positions, share of idle GPU time in a step
_DATA = ("loader_processes", "image_cache")  # optimizations for data-bound runs
_BATCH, _ACCUMULATION = "train.batch_size", "train.gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A suggestion after a run: name, expected effect, `--set` values for the spec, and the command to type."""

    name: str
    effect: str
    sets: tuple[str, ...]
    command: str

    @property
    def text(self) -> str:
        return folded(f"try:     {self.name}: {self.effect}") + "\n" + folded_command(self.command)


@dataclass(frozen=True, slots=True)
class Shown:
    """A run with its verdict, its rank among comparable runs, and suggestions. The best suggestion comes first."""

    run: RunDir
    summary: dict[str, Any]
    verdict: str
    rank: str
    suggestions: list[Suggestion]

    def text(self) -> str:
        """Return the card of the run, its profile (if any), and the verdict as text."""
        known = {name: value for name, value in self.summary.items() if name in FIELDS | LATER}
        parts = [card(RunSummary(**known), self.run), self.ending()]
        if self.run.profile.is_dir():
            from ftbench.profile import profile_table  # imported late: few runs have a profile

            parts[1:1] = [f"\n{profile}\n" for profile in [profile_table.run_text(self.run)] if profile]
        return "\n".join(parts)

    def ending(self) -> str:
        """Return the last lines: the verdict, the rank among comparable runs, and the best suggestion."""
        return "\n".join([folded(f"verdict: {self.verdict}"), *([folded(f"rank:    {self.rank}")] if self.rank else []),
                          *(each.text for each in self.suggestions[:1])])  # fmt: skip

    def document(self) -> dict[str, Any]:
        """Return the dict that `--json` prints."""
        return {
            "run_dir": named_path(self.run), "summary": self.summary, "verdict": self.verdict,
            "rank": self.rank or None, "what_to_try": [dataclasses.asdict(each) for each in self.suggestions],
        }  # fmt: skip


def show(name: str, paths: Sequence[Path]) -> Shown:
    """Find a run by folder, id or number, and return it. Raise SpecError if no run or several runs match."""
    if RunDir(Path(name)).state.exists():
        return shown(RunDir(Path(name)))
    record, records = _record(name, paths)
    return shown(RunDir(Path(str(record["path"]))), records)


def shown(run: RunDir, records: Sequence[Record] = ()) -> Shown:
    """Return a run with its verdict, its suggestions, and its rank among `records` (all runs of the report)."""
    summary = read_summary(run)
    rank = rank_text(str(run.path), groups.cells_of(groups.runs_of(records))) if records else ""
    verdict, bound = _profile_verdict(file) if (file := read_json(run.profile / KERNELS)) else (_verdict(summary), None)
    return Shown(run, summary, verdict, rank, suggestions(run, {**summary, "bound": bound or summary.get("bound")}))


# --- verdicts --------------------------------------------------------------------------------------------------------


def _verdict(summary: Mapping[str, Any]) -> str:
    """Return a sentence about the bottleneck of a run, or about the reason why its speed is not valid."""
    state, bound = summary["state"], summary.get("bound") or {}
    if state != "ok":
        return f"{'out of memory' if state == 'oom' else state}: {summary.get('reason') or 'no reason is recorded'}"
    if (summary.get("contention") or {}).get("contended"):
        return "no valid speed: other processes used the machine. Reports leave this run out."
    if bound.get("verdict"):
        return f"{bound['verdict']}: {bound.get('why') or ''}"
    wait = bound.get("data_wait")
    waited = "" if wait is None else f"; {units.percent(wait)} of the time is spent waiting for batches"
    if summary.get("gpu") or not summary.get("step_time_s"):
        return f"the bottleneck is unknown: {bound.get('why') or 'no step was measured'}{waited}"
    return f"limited by the CPU's arithmetic{waited}. Speed and memory of a GPU differ."


def _profile_verdict(document: Mapping[str, Any]) -> tuple[str, dict[str, str] | None]:
    """Return a sentence about a profiled step, and `{"verdict": "launch-bound"}` if the GPU is often idle."""
    listed, on_gpu = document["groups"], document["device"] == "cuda"
    busy = document["busy_share_unprofiled"] or document["busy_share"]
    work, share = ("kernels" if on_gpu else "operators"), units.percent(listed[0]["share"], 0) if listed else ""
    largest = f"{listed[0]['group']} takes {share} of the time of all {work}" if listed else f"no {work} were recorded"
    if on_gpu and busy < 1 - _MUCH_IDLE:
        return f"the GPU is idle for {units.percent(1 - busy, 0)} of a step; {largest}", {"verdict": "launch-bound"}
    return largest, None


# --- suggestions -----------------------------------------------------------------------------------------------------


def suggestions(run: RunDir, summary: Mapping[str, Any]) -> list[Suggestion]:
    """Return suggestions, the best first: none for mocks, controls, imported or bundled runs and unreadable specs."""
    values = read_json(run.spec_json)
    try:
        spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
    except (FtbenchError, ValueError):
        return []
    capability = capability_of(gpu) if (gpu := limited_gpu(first_gpu(read_json(run.machine)))) else None
    is_own = "imported" not in values and named_path(run) == str(run.path)
    if spec.launch.mock != "off" or spec.measure.control != "off" or not is_own:
        return []
    suggested = []
    for name, effect, change in _changes(spec, summary):
        changed = with_changes(spec, change)
        if not incompatibilities(changed) and not machine_incompatibilities(changed, capability):
            sets = settings(change.items())
            command = _command("run", run, *(word for text in sets for word in ("--set", text)))
            suggested.append(Suggestion(name, effect, sets, command))
    return [*suggested, *_other_commands(run, summary, spec)]


def _changes(spec: Experiment, summary: Mapping[str, Any]) -> Iterator[tuple[str, str, Changes]]:
    state, bound = summary["state"], (summary.get("bound") or {}).get("verdict")
    if state == "oom":
        yield from _less_memory(spec)
    elif state == NOT_FINITE:
        rate = spec.train.learning_rate / 2
        yield "half the learning rate", "steps that are too large make losses infinite", {"train.learning_rate": rate}
    elif state == "ok" and not (summary.get("contention") or {}).get("contended"):
        for name in _DATA:
            if bound == "data-bound" and not getattr(spec.optimizations, name):
                effect = (OPTIMIZATIONS[name].description or "").partition(";")[0]
                yield name.replace("_", " "), effect, {f"optimizations.{name}": True}
        real, padded = ((summary.get("tokens_per_s") or {}).get(name) for name in ("real", "padded"))
        if real and padded and (share := 1 - real / padded) > _MUCH_PADDING and not spec.optimizations.packing:
            effect = f"{units.percent(share)} of the computed positions are padding"
            yield "packing", effect, {"optimizations.packing": True}
        if bound == "launch-bound" and not spec.optimizations.compile:
            yield "compile", "fewer kernels to launch", {"optimizations.compile": True}


def _other_commands(run: RunDir, summary: Mapping[str, Any], spec: Experiment) -> Iterator[Suggestion]:
    """Yield suggestions to use other commands. `estimate` has no formulas for objectives with prompts."""
    gpu, state, has_formula = summary.get("gpu"), summary["state"], not spec.objective.prompts
    if (summary.get("contention") or {}).get("contended"):
        alone = ("--set", "measure.share_gpu=off") if spec.measure.share_gpu else ()
        again = _command("run", run, *alone)
        yield Suggestion("the same run again", "while nothing else uses the machine", alone[1:], again)
    elif gpu and has_formula and state in ("ok", "oom"):
        command = _command("recommend", run, "--gpu", canonical_name(gpu))
        yield Suggestion("other recipes", "estimates of methods, batches and optimizations", (), command)
    elif has_formula and not gpu and state == "ok":
        yield Suggestion("a GPU", "estimate its memory and time", (), _command("estimate", run, "--gpu", "RTX 4090"))


def _less_memory(spec: Experiment) -> Iterator[tuple[str, str, Changes]]:
    launched = {"optimizations.cuda_graph": False} if spec.optimizations.cuda_graph else {}  # neither works in a graph
    if (batch := spec.train.batch_size) > 1:
        parts = next(count for count in range(2, batch + 1) if batch % count == 0)
        smaller = {_BATCH: batch // parts, _ACCUMULATION: spec.train.gradient_accumulation_steps * parts} | launched
        yield f"batch {batch // parts}", f"the same samples per step, in {parts} times as many passes", smaller
    if not spec.optimizations.gradient_checkpointing:
        change = {"optimizations.gradient_checkpointing": True} | launched
        yield "gradient checkpointing", "recomputes activations in the backward pass", change


def _command(command: str, run: RunDir, *options: str) -> str:
    """Return a command for the spec of a run. A new run is written to the same folder of results."""
    results = os.path.normpath(run.path / ("../../.." if run.path.parent.name == ARCHIVED else "../.."))
    out = ["--out", results] if command == "run" and results != "results" else []
    return shlex.join(["ftbench", command, str(run.spec_json), *options, *out])


# --- finding a run ---------------------------------------------------------------------------------------------------


def _record(name: str, paths: Sequence[Path]) -> tuple[Record, Sequence[Record]]:
    """Find a run by folder, number, id or label, or by a part of id or label. Return its record and all records."""
    folder = Path(name)
    if folder.is_dir():
        paths = [folder]
    elif not any(path.exists() for path in paths):
        where = ", ".join(map(str, paths))
        raise SpecError(f"show {shortened(name)}: {where} does not exist: name the folder, `ftbench show RUN FOLDER`")
    records, _ = groups.with_axes(groups.runs_of(collect(paths)))
    plain = name.casefold()
    if folder.is_dir():
        matches = records
    elif name.isdecimal():
        matches = records[int(name) - 1 : int(name)] if int(name) else []
    else:
        matches = [record for record in records if plain in (record["run_id"].casefold(), record["label"].casefold())]
        matches = matches or [each for each in records if plain in f"{each['run_id']} {each['label']}".casefold()]
    if len(matches) == 1:
        return matches[0], records
    if matches:
        named = units.listed([f"{record['number']} ({record['label']})" for record in matches], 5)
        how = f", `ftbench show NUMBER {folder}`" if folder.is_dir() else ""
        raise SpecError(f"show {shortened(name)}: several runs match: {named}: choose one by its number{how}")
    count, near = units.some(len(records), "run"), nearest(name, {str(record["run_id"]) for record in records})
    listing = shlex.join(["ftbench", "report", *map(str, paths)])
    raise SpecError(f"show {shortened(name)}: no run matches{near} ({count}; `{listing}` lists them)")
