"""Worker process: `python -m ftbench.worker RUN_DIRECTORY` trains as spec.json requests and writes state.json."""

import gc
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
from ftbench.worker.outcome import Phases, Terminated, exit_now, of_exception


def main(path: str, handed_over: bool = False) -> int:
    """Train the run in `path`. Return the exit code. `handed_over`: this is the interpreter of another framework."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _terminate)
    directory = RunDir(Path(path), parallel.rank())
    phases = Phases(directory, "import", resumed=handed_over)
    run: Any = None
    outcome: dict[str, Any] = {"state": "ok"}
    try:
        values = read_json(directory.spec_json)
        spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields})
        if spec.method.name == "unsloth":  # importing unsloth patches other libraries and uses the GPU
            _acquire_gpu(spec, directory, phases)
            _import_unsloth(spec.method)
        train = _loop(spec, handed_over)
        from ftbench.worker.training_run import TrainingRun

        run = TrainingRun(spec, directory, phases)
        trains = handed_over or spec.launch.framework == "trl"  # preparing for another interpreter needs no GPU
        if trains and os.environ.get("LOCAL_RANK", "0") == "0":  # one lock per machine
            _acquire_gpu(spec, directory, phases)
        if trains and spec.launch.gpus > 1:
            _join_ranks(run)
        train(run)
        _ignore_signals()  # a signal after the training must not discard its result
    except BaseException as error:  # noqa: BLE001 - every error is an outcome of the run
        _ignore_signals()
        _log(error)
        outcome = of_exception(error, *(run.position() if run else (phases.current, None)))
        _rescue(run)
    _write_outcome(directory, outcome)
    phases.close()
    return 0 if outcome["state"] == "ok" else int(outcome.get("exit_code", 1))


def _loop(spec: Experiment, handed_over: bool) -> Callable[[Any], None]:
    """Return the training function. Frameworks other than trl have two parts: `prepare`, then `session`."""
    part = "frameworks.session" if handed_over else "frameworks.prepare"
    name = "train" if spec.launch.framework == "trl" else part
    gc.disable()  # imports keep nearly all objects that they create: never search them for garbage
    try:
        return importlib.import_module(f"ftbench.worker.{name}").train
    finally:
        gc.enable()
        gc.freeze()


def _write_outcome(directory: RunDir, outcome: dict[str, Any]) -> None:
    write_json(directory.state, read_json(directory.state) | {"schema": SCHEMA} | outcome)


def _join_ranks(run: Any) -> None:
    """Join the process group of all ranks. The first rank of each node joins after it has locked the node's GPUs."""
    from ftbench.worker.parallel.rendezvous import exit_on_sigterm, join

    def answer() -> None:
        _write_outcome(run.directory, of_exception(Terminated(), *run.position()))
        if run.recorder:
            with suppress(FtbenchError):  # raised on a full disk
                run.recorder.drain(last=True)

    exit_on_sigterm(answer)
    join()


def _acquire_gpu(spec: Experiment, directory: RunDir, phases: Phases) -> None:
    if not spec.measure.share_gpu:
        gpu_lock.acquire(directory, phases)


def _import_unsloth(method: Any) -> None:
    """Set environment variables, and import unsloth, which reads them during the import. One turns off telemetry."""
    os.environ |= {
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_PADDING_CHOICE": "auto",
        "UNSLOTH_DISABLE_AUTO_PADDING_FREE": "0",
        "UNSLOTH_BLOCK_COMPILE": str(int(method.block_compile)),
        "UNSLOTH_BLOCK_CUDAGRAPHS": str(int(method.cuda_graphs)),
        "UNSLOTH_COMPILE_MAXIMUM": str(int(method.compile_maximum)),
    }
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_dir() / "unsloth"))
    import unsloth  # noqa: F401


def _rescue(run: Any) -> None:
    """After an error, write the finished optimizer steps to steps.csv."""
    try:
        if run:
            run.finish()
    except Exception as another:  # noqa: BLE001 - the outcome reports the first error
        _log(another)


def _log(error: BaseException) -> None:
    with suppress(OSError):  # printing fails on a full disk, but the outcome must still be written
        traceback.print_exception(error)


def _ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT from now on, because a signal must not interrupt the writing of finished steps."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # unlike SIG_IGN, this still wakes the thread of `exit_on_sigterm`
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _terminate(*_: object) -> None:
    _ignore_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # data loader processes also get SIGTERM, and may exit
    raise Terminated


if __name__ == "__main__":
    exit_now(main(sys.argv[1]))
