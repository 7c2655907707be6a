"""Run `ftbench sweep` in a separate process, with mock runs by default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps
from waiting import Child, eventually, processes_about, without_supervisors
from warm import Warm

MOCK = {
    "name": "night",
    "model": {"id": "tiny/qwen3", "weights": "random"},
    "dataset": {"name": "synthetic", "samples": 64, "length": 32},
    "train": {"batch_size": 2, "max_steps": 3},
}
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def write_sweep(folder: Path, axes: dict[str, Any] | None = None, **parts: Any) -> Path:
    """Write a spec of mock runs with the axes of a sweep. `parts` add to its sections."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {**MOCK, "launch": {"mock": "ok"}}
    for key, value in parts.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    path = folder / "spec.yaml"
    path.write_text(json.dumps(values | ({"sweep": {"axes": axes}} if axes else {})))
    return path


class Folder:
    """The runs and tables of the experiment in `out`."""

    def __init__(self, out: Path, experiment: str = "night-mock") -> None:
        self.out, self.path = out, out / experiment

    def runs(self) -> list[RunDir]:
        return rundir.find_runs(self.path)

    def states(self) -> dict[str, str]:
        """Return the state of each run by the name of its directory."""
        return {run.run_id: rundir.read_json(run.state).get("state", "") for run in self.runs()}

    def told(self) -> list[str]:
        """Return the sorted states."""
        return sorted(self.states().values())

    def superseded(self) -> list[RunDir]:
        return [RunDir(path) for path in sorted(self.path.glob(".superseded/*"))]

    def started(self) -> list[str]:
        """Return the started runs in order, earlier ones of the same name too."""
        made = {RunDir(path): path.name for path in (run.path for run in self.runs())}
        made |= {run: run.run_id.rpartition(".")[0] for run in self.superseded()}
        return [made[run] for run in sorted(made, key=lambda run: run.spec_yaml.stat().st_mtime_ns)]

    def table(self) -> str:
        return (self.path / "summary.md").read_text()

    def children(self) -> list[psutil.Process]:
        """Return the processes of running runs with their supervisors."""
        return processes_about(self.path.resolve())

    def workers(self) -> list[psutil.Process]:
        """Return the processes of running runs."""
        return without_supervisors(self.children())

    def content(self) -> dict[str, tuple[int, bytes, bytes]]:
        """Return inode, state.json and steps.csv of each run with a result."""
        found = {}
        for run in self.runs():
            if rundir.read_json(run.state).get("state") in ("ok", "oom"):
                steps = run.steps.read_bytes() if run.steps.exists() else b""
                found[run.run_id] = (run.path.stat().st_ino, run.state.read_bytes(), steps)
        return found


def held(folder: Path, *names: str) -> None:
    """Let mock runs whose name contains one of `names` wait after their first step until they are `released`."""
    sleep, slept = time.sleep, []

    def wait(seconds: float) -> None:
        sleep(seconds)
        if not sys.argv[0].endswith("mock.py"):
            return
        slept.append(seconds)
        run = Path(sys.argv[1]).name
        while len(slept) > 1 and any(name in run for name in names) and not (folder / run).exists():
            sleep(0.01)

    time.sleep = wait


def released(folder: Path, run: RunDir) -> None:
    """Continue a run that was `held`."""
    (folder / run.run_id).touch()


def started(
    arguments: list[str], env: dict[str, str], before: Callable[[], None] | None = None
) -> Warm | subprocess.Popen[str]:
    """Start the command; in a new interpreter if `env` sets PYTHONPATH."""
    if "PYTHONPATH" not in env:
        return Warm(arguments, os.environ | ENVIRONMENT | env, before=before)
    return subprocess.Popen(
        [sys.executable, "-m", "ftbench", *arguments],
        env=os.environ | ENVIRONMENT | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Night(Folder, Child):
    """One `ftbench sweep` in a separate process."""

    def __init__(
        self, spec: Path | None, out: Path, *arguments: str, env: dict[str, str] | None = None,
        before: Callable[[], None] | None = None, **where: Any,
    ) -> None:  # fmt: skip
        super().__init__(out, **where)
        named = [str(spec), "--out", str(out)] if spec else []
        self.process = started(["sweep", *named, *arguments], env or {}, before)

    def kill(self) -> None:
        """Kill with -9, and check that no process is left."""
        self.process.kill()
        self.process.communicate()
        eventually(lambda: not self.children(), "a process has outlived its sweep")

    def until_training(self, steps: int = 1) -> RunDir:
        """Wait until a run has made `steps` steps, and return it."""

        def training() -> list[RunDir]:
            running = [run for run in self.runs() if rundir.read_json(run.state).get("state") == "running"]
            return [run for run in running if len(read_steps(run.steps)[0]) >= steps]

        self.until(training)
        return training()[0]


def sweep(spec: Path | None, out: Path, *arguments: str, within: float = 300.0, **more: Any) -> Night:
    """Run a sweep to its end."""
    with Night(spec, out, *arguments, **more) as night:
        night.finish(within)
    assert "Traceback" not in night.stderr, night.stderr
    return night
