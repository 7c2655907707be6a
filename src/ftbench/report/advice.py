"""What to try after a run, by what it was bound by: changes of its spec with what each brings here, as commands."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import Gpu, capability_of, limited_gpu
from ftbench.core.table import folded
from ftbench.core.units import gibibytes
from ftbench.errors import FtbenchError
from ftbench.estimate.memory.capacity import machine_gpu
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory
from ftbench.estimate.recommend.nearest import nearest_fit
from ftbench.estimate.time.duration import MEASURED, DurationEstimate, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.timed_runs import step_key
from ftbench.spec.ablation import Changes, label, settings, variants, with_changes
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.spec.optimizations import OPTIMIZATIONS
from ftbench.store.rundir import RunDir, first_gpu, read_json

_MOST, _WORTH = 5, 0.03  # suggestions, and the share of speed that one has to bring
_BATCH, _PASSES = "train.batch_size", "train.gradient_accumulation_steps"
_DATA = ("loader_processes", "image_cache", "feature_cache")  # what makes batches wait less


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Changes of a spec, what they are called, what they bring, and the command that tries them."""

    name: str
    effect: str
    sets: tuple[str, ...]
    command: str


def suggestions(run: RunDir, summary: Mapping[str, Any], store: Path) -> list[Suggestion]:
    """Return what to try after a run, the most promising first; nothing where its spec is not one of today's. `store`
    holds the runs that tell what a change brings."""
    waits = (summary.get("bound") or {}).get("verdict") == "data-bound"
    try:
        advisor = _Advisor(run, store)
        if summary["state"] not in ("ok", "oom") or advisor.spec.launch.mock != "off":
            return []
        if summary["state"] == "oom":
            return list(advisor.smaller())
        return list(advisor.sooner()) if waits else advisor.faster()[:_MOST]
    except (FtbenchError, ValueError):
        return []


def as_text(run: RunDir, summary: Mapping[str, Any], tried: list[Suggestion]) -> str:
    """Return the suggestions for people, and what shows why a step takes its time."""
    bound = (summary.get("bound") or {}).get("verdict")
    lines = ["what to try:"] if tried else []
    for each in tried:
        lines += [folded(f"  {each.name}: {each.effect}"), f"    {each.command}"]
    if summary["state"] == "ok" and bound and bound != "data-bound":
        lines += ["what a step does, kernel by kernel:", f"    {_command('profile', run, ())}"]
    return "\n".join(lines)


def _command(command: str, run: RunDir, sets: tuple[str, ...]) -> str:
    parts = [part for text in sets for part in ("--set", text)]
    return shlex.join(["ftbench", command, str(run.spec_json), *parts])


class _Advisor:
    """A run's spec and GPU, and the store by which changes are judged."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        values = read_json(run.spec_json)
        self.run, self.folder = run, folder
        self.spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
        self.described = first_gpu(read_json(run.machine))
        self.gpu: Gpu | None = limited_gpu(self.described)
        self.capability = capability_of(self.gpu) if self.gpu else None

    @cached_property
    def store(self) -> RunHistory:
        return RunHistory.read(self.folder)

    @cached_property
    def others(self) -> RunHistory:
        """The store as if no run had taken this step."""
        return self.store.without(step_key(resolve(self.spec, self.capability)))

    @cached_property
    def measured(self) -> DurationEstimate | None:
        return self._time(self.spec, self.store)

    @cached_property
    def estimated(self) -> DurationEstimate | None:
        return self._time(self.spec, self.others)

    def smaller(self) -> Iterator[Suggestion]:
        """Yield the nearest way that fits; of a run that should have fitted, half the batch."""
        fit = nearest_fit(self.spec, machine_gpu(self.described, self.folder)) if self.described else None
        if fit is not None and fit.sets:
            needed = f"takes {gibibytes(fit.memory.device.expected)} of {gibibytes(fit.memory.total)} GiB (estimate)"
            yield self._suggestion("the nearest that fits", needed, fit.sets)
        elif self.spec.train.batch_size > 1:
            half = self._of_batch(self.spec.train.batch_size // 2, self.spec.train.gradient_accumulation_steps * 2)
            yield self._suggestion(
                "half the batch", "as many samples a step, in twice the passes", settings(half.items())
            )
        if not self.spec.optimizations.gradient_checkpointing and (fit is None or len(fit.sets) > 1):
            changes = {"optimizations.gradient_checkpointing": True}
            yield from self._rule("gradient checkpointing", "activations are computed again", changes)

    def sooner(self) -> Iterator[Suggestion]:
        """Yield what makes batches beside the training, or before it."""
        for name in _DATA:
            if not getattr(self.spec.optimizations, name):
                description = (OPTIMIZATIONS[name].description or "").partition(";")[0]
                yield from self._rule(name.replace("_", " "), description, {f"optimizations.{name}": True})

    def faster(self) -> list[Suggestion]:
        """Return the changes that bring most, by the store or by the estimate; of those of the same keys the best, and
        one that was measured before one that was not."""
        if self.gpu is None:
            return []
        gains: dict[frozenset[str], tuple[bool, float, Suggestion]] = {}
        for name, changes in self._changes():
            spec = with_changes(self.spec, changes)
            if incompatibilities(spec) or machine_incompatibilities(spec, self.capability) or spec == self.spec:
                continue
            if (pair := self._pair(spec)) is None or (memory := self._memory(spec)) is None:
                continue
            keys = frozenset(changes)
            now, then = pair
            gain = then.tokens_per_s / now.tokens_per_s - 1
            if gain >= _WORTH and memory.verdict != "does not fit":
                unsure = ", which may not fit" if memory.verdict == "uncertain" else ""
                effect = (
                    f"about {units.change(gain, 0)} tokens/s, {gibibytes(memory.device.expected)} of "
                    f"{gibibytes(memory.total)} GiB{unsure} ({then.confidence})"
                )
                offer = then.basis == MEASURED, gain, self._suggestion(name, effect, settings(changes.items()))
                gains[keys] = max(gains.get(keys, offer), offer, key=lambda each: each[:2])
        return [suggestion for _, _, suggestion in sorted(gains.values(), key=lambda each: -each[1])]

    def _pair(self, spec: Experiment) -> tuple[DurationEstimate, DurationEstimate] | None:
        """Return the times of this step and of the changed one, both as measured or both as estimated: what the
        estimate is off would else be taken for what the change brings. None where one is not known."""
        then = self._time(spec, self.store)
        now = self.measured
        if then is not None and then.basis != MEASURED:
            now, then = self.estimated, self._time(spec, self.others)
        return None if now is None or then is None else (now, then)

    def _changes(self) -> Iterator[tuple[str, Changes]]:
        train = self.spec.train
        passes = train.gradient_accumulation_steps
        held = passes % 2 == 0
        words = "a larger batch" + (", in half the passes" if held else ", which learns otherwise")
        yield words, self._of_batch(2 * train.batch_size, passes // 2 if held else passes)
        if self.spec.optimizations.gradient_checkpointing:
            yield "without gradient checkpointing", {"optimizations.gradient_checkpointing": False}
        for variant in variants(train.optimizer, full=self.spec.method.name == "full"):
            new = {key: value for key, value in variant.changes.items() if self._is_new({key: value})}
            if new:
                yield label(new), new

    def _is_new(self, changes: Changes) -> bool:
        return with_changes(self.spec, changes) != self.spec

    def _of_batch(self, batch: int, passes: int) -> dict[str, Any]:
        own = self.spec.train.gradient_accumulation_steps
        return {_BATCH: batch} | ({_PASSES: passes} if passes != own else {})

    def _rule(self, name: str, effect: str, changes: Changes) -> Iterator[Suggestion]:
        spec = with_changes(self.spec, changes)
        if not incompatibilities(spec) and not machine_incompatibilities(spec, self.capability):
            yield self._suggestion(name, effect, settings(changes.items()))

    def _suggestion(self, name: str, effect: str, sets: tuple[str, ...]) -> Suggestion:
        return Suggestion(name, effect, sets, _command("run", self.run, sets))

    def _time(self, spec: Experiment, store: RunHistory) -> DurationEstimate | None:
        try:
            return estimate_duration(spec, self.gpu, store) if self.gpu else None
        except FtbenchError:
            return None

    def _memory(self, spec: Experiment) -> MemoryEstimate | None:
        try:
            gpu = machine_gpu(self.described, self.folder)
            return estimate_memory(spec, gpu, total=self.described.get("memory_gb"))
        except FtbenchError:
            return None
