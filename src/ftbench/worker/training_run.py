"""What of a run its end needs to know, whatever ended it. Nothing here imports trl: a framework's own environment has
another version of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftbench.errors import NotAppliedError
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import RunDir, read_json, write_json
from ftbench.worker.measure.phases import Phases
from ftbench.worker.measure.recorder import Recorder

if TYPE_CHECKING:
    from ftbench.worker.measure.reporter import Reporter


class TrainingRun:
    """The objects of a run that its end needs to know, whatever ended it."""

    def __init__(self, spec: Experiment, directory: RunDir, phases: Phases) -> None:
        self.spec, self.directory, self.phases = spec, directory, phases
        self.recorder: Recorder | None = None
        self.reporter: Reporter | None = None
        self.profiler: Any = None
        self.trainer: Any = None
        kept = read_json(directory.applied).get("resolved")  # written by the parent
        self.facts: dict[str, Any] = {"resolved": kept} if kept else {}

    def position(self) -> tuple[str, int | None]:
        """Return where the run is: the phase, or within training the part of the step, and the step."""
        if self.phases.current == "train" and self.recorder and self.recorder.position:
            return self.recorder.position, self.recorder.step or None
        return self.phases.current, None

    def finish(self) -> None:
        """End the processes that make batches, and write the last rows into steps.csv and to the services; what a
        service did not take is a warning."""
        if self.trainer:
            self.trainer.end_loaders()
        if self.recorder:
            self.recorder.finish()
        if self.reporter:
            self.warn(*self.reporter.finish())

    def failed(self, error: BaseException) -> None:
        """Keep what shows why, while the objects of the failed step are still there."""
        if self.profiler:
            self.profiler.failed(error)

    def write_facts(self, **more: Any) -> None:
        """Add to applied.json."""
        self.facts |= more
        if "model" in more and self.spec.optimizations.attention == "auto":
            chosen = {"value": more["model"]["attention"], "reason": f"the default of {more['model']['class']}"}
            self.facts["resolved"] = {**self.facts.get("resolved", {}), "optimizations.attention": chosen}
        write_json(self.directory.applied, self.facts)

    def warn(self, *warnings: str) -> None:
        """Add warnings to applied.json."""
        if warnings:
            self.write_facts(warnings=[*self.facts.get("warnings", []), *warnings])

    def require_applied(self, problems: list[str]) -> None:
        """Raise NotAppliedError for what was asked for and not applied, unless the spec allows it: then warn."""
        if problems and not self.spec.measure.allow_fallback:
            raise NotAppliedError("; ".join(problems) + " (measure.allow_fallback=on measures it all the same)")
        self.warn(*problems)
