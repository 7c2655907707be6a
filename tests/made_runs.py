"""Run directories for reports: the files of a real committed run, with the changes of a test."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.core.rows import StepRow
from ftbench.store import rundir, summary
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter

RESULTS = Path(__file__).resolve().parents[1] / "results" / "h200"
REAL = RunDir(RESULTS / "plain" / "qwen3-8b-lora" / "qwen3-8b-lora-b4-78939b22-r1")
H200, MAX_Q = "NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
OOM = {"state": "oom", "reason": "out of memory (allocator) in forward of step 2, 0.75 GiB requested",
       "oom": {"kind": "allocator", "bytes_requested": 805306368, "phase": "forward", "step": 2}}  # fmt: skip

Changes = dict[str, Any]


def changed(document: dict[str, Any], changes: Changes | None) -> dict[str, Any]:
    """A copy with dotted keys set; None as a value is null, `...` takes the key away."""
    found = copy.deepcopy(document)
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = copy.deepcopy(value)
    return found


def steps(count: int = 30, seconds: float = 1.0, first: float = 3.0, noise: float = 0.01, seed: object = 0,
          **values: Any) -> list[StepRow]:  # fmt: skip
    """Return rows of a run with batch 4 and 2,048 tokens per sample. `values` are numbers or functions of the step."""
    dice = random.Random(str(seed))
    rows, elapsed = [], 0.0
    for step in range(1, count + 1):
        time = first if step == 1 else seconds * (1 + noise * dice.uniform(-1, 1))
        elapsed += time
        own = {name: value(step) if callable(value) else value for name, value in values.items()}
        rows.append(StepRow(**{
            "step": step, "epoch": step / count, "elapsed_time_sec": elapsed, "progress_ratio": step / count,
            "memory_allocated_gb": 15.5, "memory_reserved_gb": 78.0, "peak_memory_gb": 77.0, "peak_reserved_gb": 78.0,
            "phase": "train", "step_time_s": time, "real_tokens": 8192, "padded_tokens": 8192, "label_tokens": 8188,
            "samples": 4, "longest_sequence": 2048, "loss": 2.0 + 1.0 / step, "energy_j": 600.0 * time,
            "power_w": 600.0, "rank": 0, **own,
        }))  # fmt: skip
    return rows


def make_run(out: Path, name: str, rows: Sequence[StepRow] | None = None, *, spec: Changes | None = None,
             machine: Changes | None = None, applied: Changes | None = None,
             state: dict[str, Any] | None = None) -> RunDir:  # fmt: skip
    """A run directory `out/made/<name>` with its summary, as the runner leaves it."""
    run = RunDir(out / "made" / name)
    run.path.mkdir(parents=True)
    for part, changes in (("spec_json", spec), ("machine", machine), ("applied", applied), ("phases", None)):
        rundir.write_json(getattr(run, part), changed(rundir.read_json(getattr(REAL, part)), changes))
    writer = StepsWriter(run.steps)
    writer.append(steps() if rows is None else rows)
    writer.close()
    started = {"schema": 1, "wall_s": 60.0, "started_at": "2026-11-20T01:00:00Z"}
    rundir.write_json(run.state, started | (state or {"state": "ok"}))
    rundir.write_json(run.summary, summary.as_dict(summary.summarise(run)))
    return run


def gpu(name: str, limit: float = 700.0, highest: float = 700.0) -> Changes:
    return {"gpu.name": name, "gpu.power_limit_w": limit, "gpu.power_limit_max_w": highest}


def method(name: str) -> Changes:
    """The method's section as the spec resolves it."""
    adapters = rundir.read_json(REAL.spec_json)["method"]
    more = {"quant_type": "nf4", "double_quant": True, "compute_dtype": "auto"} if name == "qlora" else {}
    return {"method": {"name": "full"} if name == "full" else adapters | {"name": name} | more}
