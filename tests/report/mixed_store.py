"""A store of runs that must not be mixed: three machines, four commits, two cards of one kind, disturbed and broken
runs, two sample lengths, and clocks that differ."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ftbench.core import rows
from ftbench.store import rundir, summary
from made_runs import H200, MAX_Q, OOM, REAL, changed, method, steps

RECIPES = {
    "plain": (1.0, 77.0),
    "plain qlora": (1.22, 15.8),
    "plain full": (1.31, 96.0),
    "lora with compile": (0.61, 58.0),
}
MACHINES = (  # GPU, UUID, power limit, clock, share of the runs, seconds relative to the first
    (H200, "GPU-aaaaaaaa", 700.0, "2026-11-20T0", 0.6, 1.0), (H200, "GPU-bbbbbbbb", 700.0, "2026-11-20T0", 0.15, 0.96),
    (MAX_Q, "GPU-cccccccc", 300.0, "2031-01-01T0", 0.15, 1.9),
    ("NVIDIA L40S", "GPU-dddddddd", 350.0, "1970-01-01T0", 0.1, 2.4),
)  # fmt: skip
ENDS = {"ok": 66, "contended": 9, "diverged": 9, "oom": 5, "error": 4, "running": 4, "short": 3}
SPEC, MACHINE, APPLIED, PHASES = (rundir.read_json(getattr(REAL, name))
                                  for name in ("spec_json", "machine", "applied", "phases"))  # fmt: skip


def mixed_store(out: Path, count: int = 300, seed: int = 1) -> Path:
    """Write the runs. The first 40 are valid, on the first card, of the first commit, and of the longer samples."""
    dice = random.Random(seed)
    for number in range(count):
        recipe = list(RECIPES)[number % len(RECIPES)]
        gpu, uuid, limit, clock, _, slower = MACHINES[0]
        commit, length, end = "0000aaaa", 2048, "ok"
        if number >= 40:
            gpu, uuid, limit, clock, _, slower = dice.choices(MACHINES, [machine[4] for machine in MACHINES])[0]
            commit = dice.choices(["0000aaaa", "1111bbbb", "2222cccc", "3333dddd"], [7, 1, 1, 1])[0]
            length, end = dice.choice([2048, 2048, 2048, 512]), dice.choices(list(ENDS), list(ENDS.values()))[0]
        seconds, peak = RECIPES[recipe]
        seconds *= slower * (1 + 0.004 * dice.gauss(0, 1))
        seconds *= 0.2 if end in ("contended", "diverged", "short") else 1
        spec: dict[str, Any] = {
            "dataset.max_length": length,
            "dataset.length": length,
            "measure.warmup": 1,
            "train.max_steps": 12,
        }
        spec |= {"optimizations.compile": True} if recipe == "lora with compile" else {}
        spec |= method(recipe.split()[-1]) if recipe in ("plain qlora", "plain full") else {}
        machine = {
            "gpus": [{"name": gpu, "uuid": uuid, "power_limit_w": limit, "power_limit_max_w": limit, "driver": "580"}],
            "ftbench": {"version": "0.1.0", "commit": commit},
        }
        path = out / f"set-{number % 7}" / f"run-{number:03}-r{number // 4}"
        started = f"{clock}{number % 10}:{dice.randrange(60):02}:00Z"
        _run(path, spec, end, dice, seconds, peak, length, machine, started)
    return out


def _run(
    path: Path, spec: dict[str, Any], end: str, dice: random.Random, seconds: float, peak: float, length: int,
    machine: dict[str, Any], started: str,
) -> None:  # fmt: skip
    path.mkdir(parents=True)
    run = rundir.RunDir(path)
    tokens = {"dataset.tokens.mean": float(length), "dataset.tokens.weighted_mean": float(length),
              "dataset.hash": f"t{length}", "dataset.order_hash": f"o{length}"}  # fmt: skip
    documents = {run.spec_json: changed(SPEC, spec), run.machine: MACHINE | machine, run.phases: PHASES,
                 run.applied: changed(APPLIED, tokens)}  # fmt: skip
    documents[run.machine].pop("gpu", None)
    broken = {"loss": lambda step: 2.0 if step < 9 else float("nan")} if end == "diverged" else {}
    count = {"short": 4, "oom": 1, "error": 3, "running": 6}.get(end, 12)
    others, positions = (0.9 if end == "contended" else 0.05), 4 * length
    made = steps(count, seconds, seed=dice.random(), real_tokens=positions, padded_tokens=positions,
                 label_tokens=positions, longest_sequence=length, peak_memory_gb=peak,
                 host_cpu_by_others=others, **broken)  # fmt: skip
    state = {"oom": OOM, "error": {"state": "error", "reason": "a kernel broke"}, "running": {"state": "running"}}
    documents[run.state] = {"schema": 1, "wall_s": 60.0, "started_at": started, **state.get(end, {"state": "ok"})}
    for file, document in documents.items():
        file.write_text(json.dumps(document))
    run.steps.write_text(rows.header() + "".join(map(rows.to_csv, made)))
    run.summary.write_text(json.dumps(summary.as_dict(summary.summarise(run))))
