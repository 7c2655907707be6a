"""The runs of a results store as the estimates of memory and of time read them."""

from dataclasses import dataclass
from typing import Any

from ftbench.errors import SpecError
from ftbench.estimate.workload.model import check_modelled
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.rundir import RunDir, first_gpu


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run that is no mock, with its resolved spec, its summary, and its GPU as machine.json describes it."""

    directory: RunDir
    spec: Experiment
    summary: dict[str, Any]
    gpu: dict[str, Any]


def recorded(run: RunDir) -> RecordedRun | None:
    """Return a run; None for an imported log, a spec of another version, a step that no formula describes, and code
    that did more than today's (`is_older`)."""
    values = rundir.read_json(run.spec_json)
    if "imported" in values:
        return None
    try:
        spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
        check_modelled(spec)
    except (SpecError, ValueError):
        return None
    if spec.launch.mock != "off" or (spec.optimizations.chunked_loss and is_older(run)):
        return None
    return RecordedRun(run, spec, rundir.read_json(run.summary), first_gpu(rundir.read_json(run.machine)))


def is_older(run: RunDir) -> bool:
    """Return whether the code of that day did more than today's: its loss over chunks made the logits again."""
    return rundir.read_json(run.applied).get("loss") == "chunked (ftbench)"
