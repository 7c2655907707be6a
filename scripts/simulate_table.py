"""Prints simulated against measured allocated memory for the runs under a results folder."""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

from ftbench.core.hardware import find_gpu
from ftbench.core.units import some
from ftbench.errors import FtbenchError
from ftbench.estimate.simulation import simulate
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import RunDir, first_gpu, read_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="runs whose path holds this text")
    arguments = parser.parse_args()
    print(f"{'run':<58}{'measured':>10}{'simulated':>11}{'error':>9}{'1st step':>10}{'error':>9}{'s':>6}")
    errors = []
    for spec_json in sorted(arguments.results.rglob("spec.json")):
        run = RunDir(spec_json.parent)
        summary = read_json(run.summary)
        if arguments.only in str(run.path) and summary.get("state") == "ok":
            error = line(run, summary)
            errors += [error] if error is not None else []
    if errors:
        sizes = [abs(error) for error in errors]
        print(f"{some(len(errors), 'run')}: mean error {sum(sizes) / len(sizes):.2%}, worst {max(sizes):.2%}")


def line(run: RunDir, summary: dict[str, Any]) -> float | None:
    """Prints a run's line; the error of its peak, or None where it cannot be simulated."""
    name = f"{run.path.parent.name}/{run.path.name}"[-56:]
    values = read_json(run.spec_json)
    spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
    gpu = find_gpu(first_gpu(read_json(run.machine))["name"])
    assert gpu is not None, run.path
    begun = time.monotonic()
    try:
        found = simulate(spec, gpu)
    except FtbenchError as error:
        print(f"{name:<58}{str(error).splitlines()[0][:100]}", flush=True)
        return None
    measured = summary["memory_gb"]["allocated_peak"]
    with run.steps.open() as file:
        first = float(next(csv.DictReader(file))["peak_memory_gb"])
    highest = max(found.steps_gb)
    error = highest / measured - 1
    print(
        f"{name:<58}{measured:>10.3f}{highest:>11.3f}{error:>9.2%}{found.steps_gb[0]:>10.3f}"
        f"{found.steps_gb[0] / first - 1:>9.2%}{time.monotonic() - begun:>6.0f}",
        flush=True,
    )
    return error


if __name__ == "__main__":
    main()
