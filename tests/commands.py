"""Run `ftbench run` in a separate process, with real training of a tiny model on the CPU."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load
from ftbench.spec.model_argument import spec_sets
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps
from waiting import Child, processes_about, without_supervisors
from warm import Warm

TINY = {"id": "tiny/qwen3", "weights": "random"}
# Small enough for a step to take some 20 ms, and more steps than any test waits for.
ENDLESS = {
    "dataset": {"name": "synthetic", "samples": 64, "length": 32},
    "train": {"batch_size": 2, "max_steps": 1_000_000, "lr_scheduler": "constant"},
}


def write_spec(folder: Path, **parts: Any) -> Path:
    """A spec of the tiny model; JSON is YAML."""
    path = folder / "spec.yaml"
    path.write_text(json.dumps({"model": TINY, **parts}))
    return path


def printed_command(out: str) -> list[str]:
    """The words of the first `ftbench run` that an output prints, possibly on several lines, without these two."""
    text = out[out.index("  ftbench run ") :].replace("\\\n", "")
    return shlex.split(text.splitlines()[0])[2:]


def typed_spec(words: Sequence[str]) -> Experiment:
    """The spec that the arguments of `ftbench run` stand for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--set", action="append", dest="sets")
    for name in ("recipe", "dataset"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--length", type=int)
    typed = parser.parse_args(words)
    return load(typed.spec, spec_sets(typed.sets, typed.recipe, typed.dataset, typed.length))


class Left:
    """The results of a command: exit code, output, and the files of its run."""

    code: int
    stdout: str
    stderr: str

    def __init__(self, out: Path) -> None:
        self.out = out

    @property
    def run(self) -> RunDir:
        """Return the run directory; it exists when state.json is written."""
        return RunDir(next(self.out.glob("*/*/state.json")).parent)

    def phase(self) -> str | None:
        phases = rundir.read_json(self.run.phases).get("phases")
        return phases[-1]["name"] if phases else None

    def steps(self) -> list[Any]:
        return read_steps(self.run.steps)[0]

    def children(self) -> list[psutil.Process]:
        """Return the training process, its supervisor and their children."""
        return processes_about(self.run.path) if any(self.out.glob("*/*/state.json")) else []

    def worker(self) -> psutil.Process:
        """The training process."""
        return without_supervisors(self.children())[0]

    def state(self) -> dict[str, Any]:
        """Return the content of state.json."""
        return rundir.read_json(self.run.state)

    def summary(self) -> dict[str, Any]:
        return rundir.read_json(self.run.summary)

    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        return json.loads(self.stdout)


class Command(Left, Child):
    """One `ftbench run --json` in a separate process.

    `cold` starts it and its training process with a new interpreter. Otherwise `before` may change their imports."""

    def __init__(
        self,
        spec: Path,
        out: Path,
        *arguments: str,
        cold: bool = False,
        cwd: Path | None = None,
        before: Callable[[], None] | None = None,
        **popen: Any,
    ) -> None:
        super().__init__(out)
        words = ["run", str(spec), "--out", str(out), "--json", *arguments]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = (
            subprocess.Popen(
                [sys.executable, "-m", "ftbench", *words], env=env, cwd=cwd, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen,
            )
            if cold
            else Warm(words, env, cwd, before)
        )  # fmt: skip

    def wait_for_run(self) -> RunDir:
        self.until(lambda: any(self.out.glob("*/*/state.json")))
        return self.run

    def wait_for_phase(self, *names: str) -> None:
        """Until the training process is in one of the phases `names`."""
        self.wait_for_run()
        self.until(lambda: self.phase() in names)

    def wait_for_steps(self, count: int) -> None:
        self.wait_for_phase("train")
        self.until(lambda: len(self.steps()) >= count)


def trained_once(
    folder: Path, *arguments: str, cold: bool = False, before: Callable[[], None] | None = None, **spec: Any
) -> Left:
    """Return a successful run in `folder`. The first test process trains it, the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    found, kept = Left(folder / "results"), folder / "command.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with Command(write_spec(folder, **spec), found.out, *arguments, cold=cold, before=before) as command:
                command.finish()
            assert command.code == 0, command.stderr
            kept.write_text(json.dumps({name: getattr(command, name) for name in ("code", "stdout", "stderr")}))
        vars(found).update(json.loads(kept.read_text()))
    return found
