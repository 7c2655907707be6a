"""Record the memory of one step on a GPU by purpose, from the allocator's history."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ftbench.core.allocations import AllocationHistory, Event, by_category
from ftbench.core.rows import OPTIMIZER
from ftbench.core.units import GIB
from ftbench.store.rundir import MEMORY, write_json
from ftbench.worker.measure.effective_config import innermost
from ftbench.worker.model.parts import kept_tensors

SCHEMA = 1
_MOST_EVENTS = 400_000
_KNOWN = ("ftbench", "transformers", "peft", "trl", "unsloth", "unsloth_zoo", "bitsandbytes", "liger_kernel")


class Memory:
    """Records from `start` to `finish`, which writes memory.json."""

    def __init__(self, folder: Path, loop: Any) -> None:
        self._folder, self._loop = folder, loop
        self._marks: list[tuple[float, str]] = []
        self._gradients: set[int] = set()
        self._gradients_at = 0.0

    def start(self) -> None:
        self._marks = []
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=_MOST_EVENTS, clear_history=True
        )

    def enter(self, phase: str) -> None:
        """Note that a part of the step begins."""
        self._marks.append((time.time_ns() / 1e3, phase))
        if phase == OPTIMIZER:
            self._gradients, self._gradients_at = gradients(self._loop), self._marks[-1][0]

    def finish(self) -> None:
        allocated, snapshot = torch.cuda.memory_allocated(), torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        device = torch.cuda.current_device()
        events = from_entries(snapshot["device_traces"][device] if snapshot["device_traces"] else [])
        alive = [
            (block["address"], block["size"]) for segment in snapshot["segments"] if segment["device"] == device
            for block in segment["blocks"] if block["state"] == "active_allocated"
        ]  # fmt: skip
        history = AllocationHistory(events, alive, self._marks, owned(self._loop), self._gradients, self._gradients_at)
        write_json(self._folder / MEMORY, {
            "schema": SCHEMA, "device": "cuda", "allocated_gb": allocated / GIB,
            "complete": len(events) < _MOST_EVENTS, **by_category(history),
        })  # fmt: skip


def owned(loop: Any) -> dict[int, str]:
    """Return the address and category of each permanent storage."""
    storages: dict[int, str] = {}
    for tensor, kind in kept_tensors(loop.model, innermost(loop.optimizer)):
        if tensor.numel():
            storages.setdefault(_of_rank(tensor).untyped_storage().data_ptr(), kind)
    return storages


def gradients(loop: Any) -> set[int]:
    """Return the addresses of the existing gradients."""
    present = (p.grad for p in loop.model.parameters() if p.grad is not None and p.grad.numel())
    return {_of_rank(gradient).untyped_storage().data_ptr() for gradient in present}


def _of_rank(tensor: Any) -> Any:
    """Return this rank's shard of a distributed tensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def from_entries(entries: Iterable[dict[str, Any]]) -> list[Event]:
    """Return the allocator's trace (torch.cuda.memory._snapshot) as events. A block counts as freed when its free is
    requested, which is when `memory_allocated` falls."""
    return [
        Event(
            entry["time_us"], entry["addr"], entry["size"] if entry["action"] == "alloc" else -entry["size"],
            frame_of([(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())]),
        )
        for entry in entries if entry["action"] in ("alloc", "free_requested")
    ]  # fmt: skip


def frame_of(frames: Sequence[tuple[str, int, str]]) -> str:
    """Return the innermost frame of a well-known library; `frames` (file, line, function) start with the innermost."""
    for file, line, name in frames:
        parts = Path(file).parts
        package = next((i for i in reversed(range(len(parts))) if parts[i] in _KNOWN), None)
        if package is not None and parts[-3:-1] != ("worker", "profile"):
            return f"{'/'.join(parts[package:])}:{line} {name}"
    return ""
