"""A mock run: `python -m ftbench.launch.mock RUN_DIRECTORY` writes the files of a worker without training.

Use mock runs to try a sweep without a GPU. Their step time and memory are invented, and grow with the batch size.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.core.rows import StepRow
from ftbench.errors import MissingError
from ftbench.store.rundir import ARCHIVED, SCHEMA, RunDir, read_json, write_json
from ftbench.store.steps import StepsWriter

if TYPE_CHECKING:  # not imported at run time, to start fast
    from ftbench.spec.experiment import Experiment

GPU = "mock (no GPU)"
STEPS = 10  # number of steps without train.max_steps
TOKENS = 100  # tokens per sample
PAUSE_S = 0.01  # real duration of a step; `slow` takes a second
HANGS_AFTER = 3
_FIXED_GB, _PER_SAMPLE_GB = 2.0, 1.0
_FACTOR = {"full": 2.0, "lora": 1.0, "qlora": 1.3, "unsloth": 0.8}  # factor of the step time


def problems(spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
    """Return an empty list, because a mock run works on any machine."""
    return []


def check_installed(spec: Experiment) -> None:
    """Do nothing, because a mock run needs only ftbench."""


def devices(spec: Experiment, visible: str | None) -> list[dict[str, Any]]:
    """Return invented GPUs with memory for a batch of `launch.mock_fits` samples."""
    return [{"name": GPU, "memory_gb": _FIXED_GB + _PER_SAMPLE_GB * (spec.launch.mock_fits + 0.5)}] * spec.launch.gpus


def command(spec: Experiment, run: RunDir) -> list[str]:
    """Return the command of a mock run."""
    return [sys.executable, "-P", "-m", "ftbench.launch.mock", str(run.path.resolve())]


def environment(inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
    """Return the inherited environment variables."""
    return dict(inherited)


def main(path: str) -> int:
    run = RunDir(Path(path))
    spec = read_json(run.spec_json)
    train, pretend = spec["train"], spec["launch"]["mock"]
    batch, steps = train["batch_size"], train["max_steps"] or STEPS
    write_json(run.phases, {"schema": 1, "phases": [{"name": "train", "start_s": 0.0}]})
    described = {"name": spec["dataset"]["name"], "samples": spec["dataset"]["samples"], "tokens": {"mean": TOKENS},
                 "hash": "mock", "order_hash": "mock"}  # fmt: skip
    write_json(run.applied, {"dataset": described, "warnings": ["mock: nothing was trained, the figures are invented"]})
    if pretend == "oom" and batch > spec["launch"]["mock_fits"]:
        reason = f"out of memory (allocator) in forward of step 1, {batch / 4:.2f} GiB requested"
        oom = {"kind": "allocator", "bytes_requested": batch << 28, "phase": "forward", "step": 1}
        return _end(run, {"state": "oom", "reason": reason, "oom": oom})
    replaced = (run.path.parent / ARCHIVED).glob(f"{run.run_id}.*")
    if pretend == "crash" or (pretend == "flaky" and not any(replaced)):
        raise RuntimeError(f"mock: {pretend}")
    try:
        _steps(run, spec, steps)
    except MissingError as error:
        return _end(run, {"state": "error", "reason": str(error), "exit_code": error.exit_code})
    return _end(run, {"state": "ok"})


def _steps(run: RunDir, spec: dict[str, Any], steps: int) -> None:
    pretend = spec["launch"]["mock"]
    writer = StepsWriter(run.steps)
    for step in range(1, steps + 1):
        if pretend == "hang" and step > HANGS_AFTER:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # imitates a process that hangs in the driver
            time.sleep(1e6)
        time.sleep(1.0 if pretend == "slow" else PAUSE_S)
        writer.append([_row(spec, step, steps)])
    writer.close()


def _row(spec: dict[str, Any], step: int, steps: int) -> StepRow:
    train = spec["train"]
    batch, micro_steps = train["batch_size"], train["gradient_accumulation_steps"]
    seconds = 0.05 * (4 + batch) * micro_steps * _FACTOR.get(spec["method"]["name"], 1.0) * (1 + 0.001 * (step % 3))
    peak = _FIXED_GB + _PER_SAMPLE_GB * batch
    return StepRow(
        step=step, elapsed_time_sec=step * seconds, progress_ratio=step / steps, phase="train",
        memory_allocated_gb=_FIXED_GB, memory_reserved_gb=peak, peak_memory_gb=peak, peak_reserved_gb=peak,
        device_memory_gb=peak, step_time_s=seconds, data_time_s=0.0, samples=batch * micro_steps,
        real_tokens=TOKENS * batch * micro_steps, padded_tokens=TOKENS * batch * micro_steps, loss=2.0 / step,
        label_tokens=TOKENS * batch * micro_steps,
    )  # fmt: skip


def _end(run: RunDir, outcome: dict[str, Any]) -> int:
    write_json(run.state, read_json(run.state) | {"schema": SCHEMA} | outcome)
    return 0 if outcome["state"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
