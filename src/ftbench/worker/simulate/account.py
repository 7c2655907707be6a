"""The log of a simulated run → what simulation.json says: peaks by step and phase, what was alive at the highest."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ftbench.core.units import GIB
from ftbench.worker.simulate.tracker import Storage, Tracker

BLOCK = 512  # what torch's allocator rounds up to, in bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize)
PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss", "workspace", "inputs", "temporary")
MOST_TENSORS = 40


def account(tracker: Tracker, backbone: str, vocabulary: int) -> dict[str, Any]:
    """Return the sections `steps`, `phases` and `peak` of simulation.json; sizes in GiB. `backbone` is the name of the
    module whose layers make the hidden states: what the forward pass makes outside of it is the loss."""
    storages = _in_place(tracker.storages)
    curve = _curve(storages, tracker.events)
    ends = [*tracker.steps[1:], tracker.events]
    steps = [
        {"peak_gb": max(curve[begin:end]) / GIB, "end_gb": curve[end - 1] / GIB}
        for begin, end in zip(tracker.steps, ends, strict=True)
    ]
    top = max(range(len(curve)), key=curve.__getitem__)
    alive = [s for s in storages if s.born <= top and (s.freed is None or s.freed > top)]
    parts: Counter[str] = Counter()
    for storage in alive:
        parts[part(storage, backbone, vocabulary)] += rounded(storage.bytes)
    return {
        "steps": steps,
        "phases": _phases(tracker, curve),
        "peak": {
            "gb": curve[top] / GIB,
            "step": sum(begin <= top for begin in tracker.steps),
            "phase": [name for begin, name in tracker.phases if begin <= top][-1],
            "parts_gb": {name: parts[name] / GIB for name in PARTS},
            "tensors": _tensors(alive, backbone, vocabulary),
        },
    }


def rounded(size: int) -> int:
    """Return the bytes that the allocator hands out for `size`."""
    return -(-size // BLOCK) * BLOCK


def part(storage: Storage, backbone: str, vocabulary: int) -> str:
    """Return which of PARTS a storage belongs to. What the forward pass made and freed itself is temporary; logits are
    known by their width wherever they are made again."""
    if storage.kind:
        return storage.kind
    if storage.phase == "data":
        return "inputs"
    if storage.phase in ("forward", "backward") and vocabulary in storage.shape:
        return "loss"
    if storage.phase == storage.freed_in or storage.phase not in ("forward", "backward"):
        return "temporary"
    if storage.phase == "backward" and not storage.module:
        return "temporary"
    return "activations" if storage.module.startswith(backbone) else "loss"


def _in_place(storages: Sequence[Storage]) -> list[Storage]:
    """Return the storages as on a GPU, whose engine adds a gradient in place to one nobody else holds, but not where
    tensors are of a class of their own, as fake ones are (torch/csrc/autograd/input_buffer.cpp,
    can_accumulate_inplace). A sum after which one of its terms is freed at once begins with that term's end."""
    freed = {s.freed: s for s in storages if s.freed is not None}
    for storage in storages:
        if storage.in_place:
            for event in (storage.born + 1, storage.born + 2):
                if (term := freed.get(event)) and term.bytes == storage.bytes:
                    storage.born = event
                    break
    return list(storages)


def _curve(storages: Sequence[Storage], events: int) -> list[int]:
    """Return the bytes allocated after each event."""
    changes = [0] * events
    for storage in storages:
        changes[storage.born] += rounded(storage.bytes)
        if storage.freed is not None:
            changes[storage.freed] -= rounded(storage.bytes)
    return list(accumulate(changes))


def _phases(tracker: Tracker, curve: Sequence[int]) -> dict[str, float]:
    """Return the highest of each phase over the whole run, in GiB."""
    peaks: dict[str, float] = {}
    ends = [begin for begin, _ in tracker.phases[1:]] + [tracker.events]
    for (begin, name), end in zip(tracker.phases, ends, strict=True):
        peaks[name] = max(peaks.get(name, 0.0), max(curve[begin:end], default=0) / GIB)
    return peaks


def _tensors(alive: Sequence[Storage], backbone: str, vocabulary: int) -> list[dict[str, Any]]:
    """Return the largest groups of like tensors; layers are one group each kind of module."""
    groups: Counter[tuple[Any, ...]] = Counter()
    counts: Counter[tuple[Any, ...]] = Counter()
    for s in alive:
        module = re.sub(r"\.\d+\.", ".*.", s.module)
        key = (part(s, backbone, vocabulary), module, s.operation, s.shape, s.dtype)
        groups[key] += rounded(s.bytes)
        counts[key] += 1
    names = ("part", "module", "operation", "shape", "dtype")
    return [
        dict(zip(names, key, strict=True)) | {"count": counts[key], "gb": size / GIB}
        for key, size in groups.most_common(MOST_TENSORS)
    ]
