"""A cell on a node: `python -m ftbench.sweep.execute.slurm_task SUBMISSION INDEX`, as the script of an array task does.

It trains in a directory of its own in the submission's folder and moves that to the run's place when the run has ended:
a rename, which the disk does for one of several and for none twice, whatever node was given up and came back.
"""

import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from ftbench.core.programs import run_program
from ftbench.errors import FtbenchError, MissingError
from ftbench.launch import runner
from ftbench.launch.runner import FinishedRun, Order
from ftbench.spec.experiment import Experiment
from ftbench.store import digests, rundir, summary
from ftbench.store.rundir import RunDir
from ftbench.sweep.execute import remote
from ftbench.sweep.execute.slurm_queue import ANSWER_S, ORDERS

BEFORE_S = 30.0  # a run ends so long before Slurm would end it: time for its last words and its files
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)")


def main(folder: Path, index: int) -> int:
    order = rundir.read_json(folder / ORDERS)["tasks"][index]
    outcome = folder / f"{index}.json"
    try:
        if "describe" in order:
            rundir.write_json(outcome, {"described": remote.describe(order["describe"])})
            return 0
        return _run(folder, index, order)
    except FtbenchError as error:
        rundir.write_json(outcome, {"error": str(error), "code": error.exit_code})
        return error.exit_code


def _run(folder: Path, index: int, order: dict[str, Any]) -> int:
    destination = RunDir(folder.parents[1] / order["run"])
    if destination.state.exists():
        print("this run is there already")
        return 0
    spec = Experiment.model_validate(order["spec"])
    if (name := runner.gpu_name(runner.describe(spec))) != order["gpu"]:
        raise MissingError(
            f"node {os.environ.get('SLURMD_NODENAME')} has {name or 'no GPU'} where this sweep is on "
            f"{order['gpu'] or 'none'}: ask for one kind, with gres (gpu:h200:1) or options (--constraint=…)"
        )
    own = Path(tempfile.mkdtemp(prefix=f"{index}-", dir=folder))
    late = folder / f"{index}.late"
    left = _left_s()
    deadline = None if left is None else time.monotonic() + left - BEFORE_S
    result = remote.train(
        lambda: rundir.create_at(own / order["run"]),
        Order(spec, (folder / "spec.yaml").read_bytes(), order["sets"], folder.parents[2]),
        order["shared"], print, deadline,
    )  # fmt: skip
    if deadline is None or time.monotonic() < deadline or not _is_cut_short(result.run):
        return _put(result, destination)
    if late.exists():
        return _put(_timed_out(result.run), destination)
    late.touch()
    rundir.archive(result.run, destination)
    print("ended before Slurm's time limit: into the queue again")
    return _requeue()


def _left_s() -> float | None:
    """Return the seconds until Slurm's time limit; None without one."""
    command = ["squeue", "-h", "-j", os.environ.get("SLURM_JOB_ID", ""), "-o", "%L"]
    with suppress(OSError):
        if match := _LEFT.fullmatch(run_program(command, ANSWER_S).stdout.strip()):
            days, first, second, last = (int(part or 0) for part in match.groups())
            hours, minutes = (first, second) if match[3] else (0, first)
            return float(((days * 24 + hours) * 60 + minutes) * 60 + last)
    return None


def _is_cut_short(run: RunDir) -> bool:
    """Return whether somebody else ended a run."""
    state = rundir.read_json(run.state)
    return state["state"] == "interrupted" or (state["state"] == "error" and state.get("signal") in rundir.CUT_SHORT)


def _put(result: FinishedRun, destination: RunDir) -> int:
    """Move a run to its place; a cut-short one, or one whose place is taken, beside the others that made way."""
    if not _is_cut_short(result.run):
        with suppress(OSError):  # not empty: another node was first
            os.rename(result.run.path, destination.path)
            return result.exit_code
    rundir.archive(result.run, destination)
    print(f"{result.summary.state}: {result.summary.reason}")
    return FtbenchError.exit_code


def _timed_out(run: RunDir) -> FinishedRun:
    """Return a run that had its time twice."""
    reason = "not done within Slurm's time limit, twice: ask for more (`time` in slurm.yaml)"
    rundir.write_json(run.state, rundir.read_json(run.state) | {"state": "timeout", "reason": reason})
    result = remote.finished(run)
    rundir.write_json(run.summary, summary.as_dict(result.summary))
    digests.write(run)
    return result


def _requeue() -> int:
    name = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        answer = run_program(["scontrol", "requeue", name], ANSWER_S)
    except OSError as error:
        answer = CompletedProcess((), FtbenchError.exit_code, "", str(error))
    if answer.returncode:
        print(f"scontrol requeue {name}: {answer.stderr.strip()}")
    return answer.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
