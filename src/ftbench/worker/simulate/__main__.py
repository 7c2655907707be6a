"""The child process: `python -m ftbench.worker.simulate DIRECTORY`. Reads request.json, writes simulation.json.

A sentence for the user goes into error.json with the exit code of its kind.
"""

import sys
import time
import traceback
from pathlib import Path

import torch
import transformers

from ftbench.errors import FtbenchError
from ftbench.spec.experiment import Experiment
from ftbench.spec.refusals import OTHERWISE
from ftbench.store.rundir import RunDir, read_json, write_json
from ftbench.worker.child import end
from ftbench.worker.simulate.run import simulate
from ftbench.worker.simulate.values import Unknown

SCHEMA = 1


def main(path: Path) -> int:
    begun = time.monotonic()
    request = read_json(path / "request.json")
    spec = Experiment.model_validate(request["spec"])
    try:
        result = simulate(spec, RunDir(path), tuple(request["capability"]), int(request["memory_bytes"]))
    except Exception as error:  # noqa: BLE001 - the libraries under the worker raise anything
        message, code = _sentence(error, spec.model.id)
        write_json(path / "error.json", {"message": message, "exit_code": code})
        return 1
    head = {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": time.monotonic() - begun,
    }
    write_json(path / "simulation.json", head | result)
    return 0


def _sentence(error: Exception, model: str) -> tuple[str, int]:
    """Return what to tell the user, and the exit code of its kind."""
    if isinstance(error, FtbenchError):
        return str(error), error.exit_code
    if isinstance(error, Unknown):
        return f"{model}: {error}, so that it cannot be simulated: {OTHERWISE}", 2
    traceback.print_exception(error)
    reason = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{model} cannot be simulated: {type(error).__name__}: {reason}; {OTHERWISE}", 1


if __name__ == "__main__":
    end(main(Path(sys.argv[1])))
