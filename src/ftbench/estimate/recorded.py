"""The runs of a results store as the estimates of memory and of time read them."""

from ftbench.errors import SpecError
from ftbench.estimate.workload.model import check_modelled
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.rundir import RunDir


def recorded(run: RunDir) -> Experiment | None:
    """Return the spec of a run; None for an imported log, a mock, a run that had a part of its GPU only, a spec of
    another version, a step that no formula describes, and code that did more than today's (`is_older`)."""
    values = rundir.read_json(run.spec_json)
    if "imported" in values or values.get("measure", {}).get("share_gpu"):
        return None
    try:
        spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
        check_modelled(spec)
    except (SpecError, ValueError):
        return None
    return None if spec.launch.mock != "off" or (spec.optimizations.chunked_loss and is_older(run)) else spec


def is_older(run: RunDir) -> bool:
    """Return whether the code of that day did more than today's: its loss over chunks made the logits again."""
    try:
        return b'"loss": "chunked (ftbench)"' in rundir.read_bytes(run.applied)  # parsed, it took ten times as long
    except (OSError, ValueError):
        return False


def is_outdated(run: RunDir, spec: Experiment) -> bool:
    """Return whether a run took its step in another way than today's code would: under ZeRO-3 with checkpointing the
    weights came one at a time, or none ahead of their layer, before applied.json said what is fetched ahead."""
    if spec.launch.strategy != "zero3" or not spec.optimizations.gradient_checkpointing:
        return False
    return "fetched_ahead" not in (rundir.read_json(run.applied).get("parallel") or {})
