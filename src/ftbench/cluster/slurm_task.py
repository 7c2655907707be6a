"""A Slurm job on its node: `python -m ftbench.cluster.slurm_task FOLDER`.

The run is trained in the job's folder and moved to its final path when it has ended. A job that Slurm requeues
(preemption, a lost node) starts the run again.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftbench.cluster import remote
from ftbench.cluster.slurm_queue import ORDER, OUTCOME
from ftbench.errors import FtbenchError
from ftbench.launch.runner import Order
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.sweep.plan.base import read_standing


def main(folder: Path) -> int:
    order = rundir.read_json(folder / ORDER)
    try:
        if "describe" in order:
            rundir.write_json(folder / OUTCOME, {"described": remote.describe(order["describe"])})
            return 0
        return _run(folder, order)
    except FtbenchError as error:
        rundir.write_json(folder / OUTCOME, {"error": str(error), "code": error.exit_code})
        return error.exit_code


def _run(folder: Path, order: dict[str, Any]) -> int:
    destination, own = RunDir(folder.parents[1] / order["run"]), RunDir(folder / order["run"])
    if destination.state.exists():
        print("the run is already finished")
        return 0
    if own.path.exists():  # of an attempt that was requeued
        rundir.archive(own, destination)
    spec = Experiment.model_validate(order["spec"])
    request = Order(spec, order["source"].encode(), order["sets"], folder.parents[2])
    result = remote.train(lambda: rundir.create_at(own.path), request, order["gpu"], order["shared"], print)
    if read_standing(own).done and not read_standing(own).killed:
        with suppress(OSError):  # not empty: the run is there already
            os.rename(own.path, destination.path)
            return result.exit_code
    rundir.archive(own, destination)
    print(f"{result.summary.state}: {result.summary.reason}")
    return FtbenchError.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
