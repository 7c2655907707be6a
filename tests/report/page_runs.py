"""Runs for the page's tests: a small study on two GPUs with Japanese, hostile text, failures and long curves."""

from __future__ import annotations

import math
from pathlib import Path

from ftbench.core import rows
from ftbench.store import rundir, summary
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter

HOSTILE = "</script><script>window.stolen=1</script><img src=x onerror=stolen=1>"
JAPANESE = "日本語の微調整"
SECRET = "hf_" + "SecretSecretSecret1234"
REVERSED = "abc\u202egnp.exe"


def made(
    out: Path, method: str, batch: int, *, gpu: str = "NVIDIA H200", steps: int = 40, speed: float = 0.5,
    peak: float = 20.0,
    state: str = "ok", reason: str | None = None, model: str = "Qwen/Qwen3-8B", name: str = "study",
) -> RunDir:  # fmt: skip
    """The files of one run, written by the code that writes them in a real one."""
    run = rundir.create(out, name, f"{method}-b{batch}-{gpu.split()[-1].lower()}")
    rundir.write_json(run.spec_json, {
        "name": name, "model": {"id": model, "weights": "random"}, "method": {"name": method, "rank": 8},
        "optimizations": {}, "train": {"batch_size": batch, "gradient_accumulation_steps": 1},
        "dataset": {"name": "synthetic"}, "measure": {"warmup": 1},
    })  # fmt: skip
    rundir.write_json(run.machine, {
        "gpu": {"name": gpu, "driver": "580.1"}, "environment": {"SECRET_TOKEN": SECRET},
        "versions": {"torch": "2.11.0"},
    })  # fmt: skip
    rundir.write_json(run.applied, {"model": {"class": "Qwen3ForCausalLM", "attention": "sdpa"}, "warnings": []})
    writer = StepsWriter(run.steps)
    writer.append(
        rows.StepRow(
            step=i, elapsed_time_sec=speed * i, progress_ratio=i / steps, phase="train", rank=0,
            memory_allocated_gb=peak / 2,
            memory_reserved_gb=peak + 1, peak_memory_gb=peak + (1 if i == steps // 2 else 0), samples=batch,
            step_time_s=speed * (1 + 0.05 * math.sin(i)), real_tokens=1000 * batch, padded_tokens=1200 * batch,
            label_tokens=700 * batch, loss=2.0 - i / steps, energy_j=100.0,
        )
        for i in range(1, (steps if state == "ok" else 1) + 1)
    )  # fmt: skip
    writer.close()
    oom = {"kind": "allocator", "bytes_requested": 2**30, "phase": "forward", "step": 2} if state == "oom" else None
    rundir.write_json(
        run.state, {"schema": 1, "state": state, "reason": reason, "oom": oom, "wall_s": speed * steps + 9}
    )
    rundir.write_json(run.summary, summary.as_dict(summary.summarise(run)))
    return run


def study(out: Path) -> Path:
    """Nine runs: methods and batches on two GPUs, one out of memory, one with a hostile reason."""
    for gpu, factor in (("NVIDIA H200", 1.0), ("NVIDIA H100", 1.3)):
        made(out, "lora", 1, gpu=gpu, speed=0.2 * factor, peak=20)
        made(out, "lora", 4, gpu=gpu, speed=0.6 * factor, peak=60)
        made(out, "qlora", 4, gpu=gpu, speed=0.8 * factor, peak=15)
    made(out, "full", 8, state="oom", reason="out of memory (allocator) in forward of step 2, 1.00 GiB requested")
    made(out, "lora", 8, state="error", reason=f"{HOSTILE} {JAPANESE} {REVERSED} token={SECRET}")
    made(out, "full", 1, speed=0.9, peak=75, name=JAPANESE, steps=3000)
    return out
