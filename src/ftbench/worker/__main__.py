"""The child process: `python -m ftbench.worker RUN_DIRECTORY`. Reads spec.json, trains, writes how it ended."""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftbench.errors import FtbenchError
from ftbench.spec.experiment import Experiment
from ftbench.store.machine import cache_dir
from ftbench.store.rundir import SCHEMA, RunDir, read_json, write_json
from ftbench.worker import gpu_lock, parallel
from ftbench.worker.child import end
from ftbench.worker.measure.contention import HostLoad
from ftbench.worker.measure.outcome import Terminated, of_exception
from ftbench.worker.measure.phases import Phases


def main(path: str, handed_over: bool = False) -> int:
    """Train in a run's directory; `handed_over` in another framework's interpreter. Return the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _terminate)
    directory, load = RunDir(Path(path), parallel.rank(), parallel.node()), HostLoad()
    phases = Phases(directory, "import", resumed=handed_over)
    run: Any = None
    outcome: dict[str, Any]
    try:
        spec = _spec(directory)
        if spec.method.name == "unsloth":  # patches what the others import, and looks at the GPU at once
            _acquire_gpu(spec, directory, phases)
            _import_unsloth()
        from ftbench.worker.training_run import TrainingRun

        train = _loop(spec, handed_over)
        run = TrainingRun(spec, directory, phases)
        trains = handed_over or spec.launch.framework == "trl"  # what prepares for another interpreter needs no GPU
        if trains and parallel.is_first_of_node():
            _acquire_gpu(spec, directory, phases)
            _write_load(directory, load)
        if spec.launch.ranks > 1:
            _meet(run)
        train(run)
        outcome = {"state": "ok"}
    except BaseException as error:  # noqa: BLE001 - whatever ends a run is its outcome
        _hold_signals()
        _log(error)
        outcome = of_exception(_blamed(run, error), *(run.position() if run else (phases.current, None)))
        _rescue(run, error)
    _end(directory, outcome)
    phases.close()
    return 0 if outcome["state"] == "ok" else int(outcome.get("exit_code", 1))


def _blamed(run: Any, error: BaseException) -> BaseException:
    """Return the error, or what it says about the files of the user's model."""
    if run is None:
        return error
    from ftbench.worker.model.unusable import blame

    return blame(run.spec.model, error)


def _loop(spec: Experiment, handed_over: bool) -> Callable[[Any], None]:
    """Return what trains: our own loop, or the half of another framework's run that belongs to this interpreter."""
    if spec.launch.framework == "trl":
        module = "ftbench.worker.train"
    else:
        module = f"ftbench.worker.frameworks.{'session' if handed_over else 'hand_over'}"
    return importlib.import_module(module).train


def _end(directory: RunDir, outcome: dict[str, Any]) -> None:
    write_json(directory.state, read_json(directory.state) | {"schema": SCHEMA} | outcome)


def _meet(run: Any) -> None:
    """Join the other ranks: the first of each node has its GPUs by then."""
    from ftbench.worker.parallel.meeting import answer_when_told_to_end, meet

    def answer() -> None:
        _end(run.directory, of_exception(Terminated(), *run.position()))
        if run.recorder:
            with suppress(FtbenchError):  # a full disk
                run.recorder.drain(last=True)

    answer_when_told_to_end(answer)
    meet()


def _spec(directory: RunDir) -> Experiment:
    values = read_json(directory.spec_json)
    return Experiment.model_validate({key: values[key] for key in Experiment.model_fields})


def _acquire_gpu(spec: Experiment, directory: RunDir, phases: Phases) -> None:
    if not spec.measure.share_gpu:
        gpu_lock.acquire(directory, phases)


def _write_load(directory: RunDir, load: HostLoad) -> None:
    """Add to machine.json what others used of the host while this process started."""
    for interval in load.read():
        write_json(directory.machine, read_json(directory.machine) | interval.shares)


def _import_unsloth() -> None:
    """Import unsloth, which writes the modules it generates into a folder of its own, and would tell its makers."""
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_dir() / "unsloth"))
    import unsloth  # noqa: F401


def _rescue(run: Any, error: BaseException) -> None:
    """Write the steps that were finished before an error, and what shows its reason."""
    if run is None:
        return
    for save in (run.finish, lambda: run.failed(error)):
        try:
            save()
        except Exception as another:  # noqa: BLE001 - the first error is the one to tell
            _log(another)


def _log(error: BaseException) -> None:
    with suppress(OSError):  # a full disk takes no log either, and the state is still to be written
        traceback.print_exception(error)


def _hold_signals() -> None:
    """Let what ends this process be told once: a second word must not stop the rows of finished steps."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler still wakes the thread that answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _terminate(*_: object) -> None:
    _hold_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what makes batches has the signal too: its end is no other error
    raise Terminated


if __name__ == "__main__":
    end(main(sys.argv[1]))
