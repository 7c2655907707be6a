"""The exact mode of an estimate: a child process runs the worker's own code for two steps on tensors without memory and
says what would have been allocated. Needs torch and no GPU. No torch here."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu
from ftbench.core.units import gibibytes
from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.estimate import command, view
from ftbench.estimate.memory.capacity import Capacity, capacity
from ftbench.estimate.memory.estimate import VERDICTS, Verdict, estimate_memory
from ftbench.launch import process, trl
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.load import load
from ftbench.spec.refusals import check_simulated
from ftbench.store import rundir

LIMIT_S = 600.0
SHOWN = 12  # tensors on the card
_ERRORS: dict[int, type[FtbenchError]] = {1: FtbenchError, 2: SpecError, 3: MissingError}


@dataclass(frozen=True, slots=True)
class Simulation:
    """What two steps on the heaviest batch would have allocated, in GiB: torch's `max_memory_allocated`.

    `parts_gb` adds up to `peak_gb`: weights, adapters, gradients, optimizer, activations, loss (logits and what is made
    of them), workspace (cuBLAS), inputs, temporary. `phase` is where the peak stands: load, setup, data, forward,
    backward or optimizer; `phases_gb` the highest of each. `steps_gb` is the peak of each step: the first runs without
    the optimizer's state. `after_step_gb` stays allocated between steps. `tensors` are the largest at the peak by their
    kind: part, shape and dtype, made by which operation of which module (`*` for the number of a layer), count and sum.
    """

    peak_gb: float
    phase: str
    parts_gb: Mapping[str, float]
    phases_gb: Mapping[str, float]
    steps_gb: Sequence[float]
    after_step_gb: float
    tensors: Sequence[Mapping[str, Any]]
    batch: Mapping[str, int]
    torch: str
    transformers: str
    seconds: float


def simulate(spec: Experiment, gpu: Gpu, limit_s: float = LIMIT_S) -> Simulation:
    """Simulate the spec on that GPU. Raises MissingError where torch or the model is missing, or where the GPU's
    compute capability is unknown; SpecError for what cannot be simulated; FtbenchError where the child fails or
    takes longer than `limit_s` seconds; KeyboardInterrupt when interrupted."""
    if gpu.compute_capability is None:
        raise MissingError(
            f"--simulate needs the compute capability of {gpu.name}, which facts/gpus.yaml does not say: name another "
            "GPU, or estimate without --simulate"
        )
    check_simulated(spec)
    trl.check_installed(spec)
    with tempfile.TemporaryDirectory(prefix="ftbench-simulate-") as folder:
        scratch = Path(folder)
        request = {
            "spec": resolve(spec, gpu.compute_capability).model_dump(mode="json"),
            "capability": gpu.compute_capability,
            "memory_bytes": int(gpu.memory_gb * 1e9),
        }
        rundir.write_json(scratch / "request.json", request)
        _run(spec, scratch, limit_s)
        document = rundir.read_json(scratch / "simulation.json")
    peak, steps = document["peak"], document["steps"]
    return Simulation(
        peak["gb"], peak["phase"], peak["parts_gb"], document["phases"], [step["peak_gb"] for step in steps],
        steps[-1]["end_gb"], peak["tensors"], document["batch"], document["torch"], document["transformers"],
        document["seconds"],
    )  # fmt: skip


def _run(spec: Experiment, scratch: Path, limit_s: float) -> None:
    """Run the child to its end. Raise what it said, or how it ended."""
    environment = trl.environment(os.environ, spec) | {"CUDA_VISIBLE_DEVICES": ""}  # a real GPU would be waited for
    ended, why = process.run_module(
        "ftbench.worker.simulate", [str(scratch.resolve())], environment, scratch / "log.txt", limit_s,
        f"took longer than {limit_s:.0f} s",
    )  # fmt: skip
    if error := rundir.read_json(scratch / "error.json"):
        raise _ERRORS.get(int(error["exit_code"]), FtbenchError)(error["message"])
    if ended.kernel_oom:
        raise MissingError("the simulation ran out of the host's memory: free some, or estimate without --simulate")
    if why:
        raise FtbenchError(f"the process that simulates {why}")


def answer(request: command.EstimateRequest) -> command.Answer:
    """Return the simulation of a spec on one GPU as text, document and exit code. Raises SpecError for what a
    simulation does not take, and what `simulate` raises."""
    given = {
        "--memory-gb": request.memory_gb is not None,
        "all but one of --gpu": request.gpu is not None and len(command.listed(request.gpu)) > 1,
        "--gpus": request.gpus not in (None, 1),
        "--strategy": request.strategy is not None,
        "--config": request.config is not None,
    }
    if refused := [name for name, is_given in given.items() if is_given]:
        raise SpecError(
            f"--simulate runs one process on one GPU of the table: leave out {', '.join(refused)}"
            + (", and set model.path to the config.json with model.weights=random" if "--config" in refused else "")
        )
    spec = load(request.spec, request.sets)
    if spec.launch.gpus > 1:
        raise SpecError(
            f"--simulate runs one process and launch.gpus is {spec.launch.gpus}: leave it out, or simulate what one "
            "GPU takes alone with --set launch.gpus=1 --set launch.strategy=none --set launch.offload=none"
        )
    ((name, gpu, total),) = command.gpus_of(request, request.store)
    if not isinstance(gpu, Gpu):
        raise SpecError(f"{name} is in no table, so its compute capability is not known: name a GPU with --gpu")
    has = capacity(gpu, total)
    simulated = simulate(spec, gpu)
    verdict = verdict_of(simulated, spec, gpu, has)
    head = {"schema": 1, "gpu": name, "model": spec.model.id, "method": spec.method.name}
    room = {"total": has.total, "usable": has.usable, "verdict": verdict}
    document = json.dumps(head | room | asdict(simulated))
    return command.Answer(as_text(simulated, spec, name, has, verdict), document, VERDICTS.index(verdict))


def verdict_of(simulation: Simulation, spec: Experiment, gpu: Gpu, has: Capacity) -> Verdict:
    """Return whether it fits: the tensors as simulated, and beside them what the estimate knows of the allocator's
    pool and the CUDA context. Uncertain for a model that no estimate knows, unless the tensors alone are too many."""
    if simulation.peak_gb > has.usable:
        return "does not fit"
    try:
        estimate = estimate_memory(spec, gpu, total=has.total)
    except FtbenchError:
        return "uncertain"
    beside = estimate.device.expected - estimate.allocated.expected
    return "fits" if simulation.peak_gb + 2 * beside <= has.usable - has.margin else "uncertain"


def as_text(simulation: Simulation, spec: Experiment, gpu: str, has: Capacity, verdict: Verdict) -> str:
    """Return the card: the peak, its parts as bars, the highest of each phase, the largest tensors."""
    batch = simulation.batch
    phases = " · ".join(f"{name} {gibibytes(size)}" for name, size in simulation.phases_gb.items())
    lines = [
        f"{spec.model.id}, {spec.method.name}, batch {spec.train.batch_size}: simulated in {simulation.seconds:.0f} s",
        f"heaviest batch: {batch['rows']} rows, {batch['positions']:,} positions, {batch['label_tokens']:,} labels",
        "",
        f"allocated at the peak: {gibibytes(simulation.peak_gb)} GiB, phase {simulation.phase}",
        view.bars(simulation.parts_gb),
        "",
        f"highest of each phase: {phases}",
        f"between steps: {gibibytes(simulation.after_step_gb)} GiB",
        "",
        "largest tensors at the peak:",
        *(_line(tensors) for tensors in simulation.tensors[:SHOWN]),
        "",
        f"{gpu} has {has.words}: {verdict}",
    ]
    return "\n".join(lines)


def _line(tensors: Mapping[str, Any]) -> str:
    shape = "x".join(map(str, tensors["shape"])) or "scalar"
    where = ".".join(tensors["module"].split(".")[-3:]) or tensors["operation"]
    size, count = gibibytes(tensors["gb"]), tensors["count"]
    return f"  {size:>8}  {count:>4} x {tensors['dtype']} {shape:<20} {tensors['part']} ({where})"
