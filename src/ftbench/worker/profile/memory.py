"""Record the memory of one step by purpose: from the allocator's history on a GPU, from the profiler on a CPU."""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ftbench.core.allocations import AllocationHistory, Event, by_category
from ftbench.core.rows import OPTIMIZER, PREFIX
from ftbench.core.units import GIB
from ftbench.store.rundir import MEMORY, write_json
from ftbench.worker.measure.effective_config import innermost
from ftbench.worker.model.parts import kept_tensors
from ftbench.worker.profile.ranges import Ranges

SCHEMA = 1
_MOST_EVENTS = 400_000
_KNOWN = ("ftbench", "transformers", "peft", "trl", "unsloth", "unsloth_zoo", "bitsandbytes", "liger_kernel")


class Memory:
    """Records from `start` to `finish`, which writes memory.json."""

    def __init__(self, folder: Path, loop: Any, ranges: Ranges) -> None:
        self._folder, self._loop = folder, loop
        self._on_gpu = next(loop.model.parameters()).device.type == "cuda"
        self._recording = False
        self._marks: list[tuple[float, str]] = []
        self._gradients: set[int] = set()
        self._gradients_at = 0.0
        self._profiler: Any = None
        ranges.listeners.append(self._hear)

    def start(self) -> None:
        self._recording, self._marks = True, []
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=_MOST_EVENTS, clear_history=True
            )
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profiler = torch.profiler.profile(activities=activities, profile_memory=True, with_stack=True)
            self._profiler.start()

    def finish(self) -> None:
        history, allocated = self._on_cuda() if self._on_gpu else self._on_cpu()
        self._recording = False
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(None)
        write_json(self._folder / MEMORY, {
            "schema": SCHEMA, "device": "cuda" if self._on_gpu else "cpu",
            "allocated_gb": None if allocated is None else allocated / GIB,
            "complete": len(history.events) < _MOST_EVENTS, **by_category(history),
        })  # fmt: skip

    # --- inside ------------------------------------------------------------------------------------------------------

    def _hear(self, phase: str) -> None:
        if not self._recording:
            return
        self._marks.append((time.time_ns() / 1e3, phase))
        if phase == OPTIMIZER:
            self._gradients, self._gradients_at = gradients(self._loop), self._marks[-1][0]

    def _on_cuda(self) -> tuple[AllocationHistory, int]:
        allocated = torch.cuda.memory_allocated()
        snapshot = torch.cuda.memory._snapshot()
        device = torch.cuda.current_device()
        entries = snapshot["device_traces"][device] if snapshot["device_traces"] else []
        events = from_entries(entries)
        alive = [
            (block["address"], block["size"]) for segment in snapshot["segments"] if segment["device"] == device
            for block in segment["blocks"] if block["state"] == "active_allocated"
        ]  # fmt: skip
        return self._history(events, alive), allocated

    def _on_cpu(self) -> tuple[AllocationHistory, None]:
        self._profiler.stop()
        path = self._folder / ".memory.json"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        events, self._marks = from_trace(json.loads(path.read_text("utf-8", errors="replace"))["traceEvents"])
        path.unlink()
        self._gradients_at = next((at for at, phase in self._marks if phase == OPTIMIZER), 0.0)
        return self._history(events, [(address, size) for address, (_, size) in owned(self._loop).items()]), None

    def _history(self, events: Sequence[Event], alive: Sequence[tuple[int, int]]) -> AllocationHistory:
        owners = {address: kind for address, (kind, _) in owned(self._loop).items()}
        return AllocationHistory(events, alive, self._marks, owners, self._gradients, self._gradients_at)


def owned(loop: Any) -> dict[int, tuple[str, int]]:
    """Return the address, category and bytes of each permanent storage."""
    storages: dict[int, tuple[str, int]] = {}
    for tensor, kind in kept_tensors(loop.model, innermost(loop.optimizer)):
        if tensor.numel():
            storage = _of_rank(tensor).untyped_storage()
            storages.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
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


def from_trace(entries: Iterable[dict[str, Any]]) -> tuple[list[Event], list[tuple[float, str]]]:
    """Return events from the profiler's trace of a CPU (recorded with memory and stacks), and the start of each
    phase."""
    memory = [entry for entry in entries if entry.get("name") == "[memory]" and entry["args"]["Device Type"] == 0]
    calls = [entry for entry in entries if entry.get("cat") == "python_function"]
    marks = sorted(
        (entry["ts"], entry["name"].removeprefix(PREFIX)) for entry in entries
        if entry.get("cat") == "user_annotation" and entry["name"].startswith(PREFIX)
    )  # fmt: skip
    events = []
    stack: list[dict[str, Any]] = []
    for entry in sorted([*calls, *memory], key=lambda entry: (entry["ts"], -entry.get("dur", 0.0))):
        stack = [call for call in stack if call["ts"] + call["dur"] > entry["ts"] or call["tid"] != entry["tid"]]
        if entry["name"] == "[memory]":
            frames = [_parsed(call["name"]) for call in reversed(stack) if call["tid"] == entry["tid"]]
            events.append(Event(entry["ts"], entry["args"]["Addr"], entry["args"]["Bytes"], frame_of(frames)))
        else:
            stack.append(entry)
    return events, marks


def _parsed(call: str) -> tuple[str, int, str]:
    """Return `a/b.py(12): f` as file, line and function."""
    where, _, name = call.partition(": ")
    file, _, line = where.rstrip(")").rpartition("(")
    return f"/{file}", int(line) if line.isdigit() else 0, name


def frame_of(frames: Sequence[tuple[str, int, str]]) -> str:
    """Return the innermost frame of a well-known library; `frames` (file, line, function) start with the innermost."""
    for file, line, name in frames:
        parts = Path(file).parts
        package = next((i for i in reversed(range(len(parts))) if parts[i] in _KNOWN), None)
        if package is not None and parts[-3:-1] != ("worker", "profile"):
            return f"{'/'.join(parts[package:])}:{line} {name}"
    return ""
