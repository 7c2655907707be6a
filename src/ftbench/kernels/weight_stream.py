"""Frozen weights that wait in pinned host memory: layers take turns in two buffers on the device.

Layers of even and of odd number have a buffer each, and a weight is for good a view of its layer's buffer: whatever a
library keeps of it for the backward pass (torch a view of its memory, bitsandbytes the tensor itself) is right whenever
the layer is there. As a layer's turn begins, forward or as a checkpoint makes it again, the weights of the next one are
copied into the other buffer, on a stream of their own. All that reads the other buffer has been asked for by then: the
backward pass enters a layer when the one behind it is through. So the copies wait for what the device has been asked
for so far, and a layer waits for its copy; nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from mmap import mmap
from typing import Any, NamedTuple

import torch

ALIGNED = 256  # bytes, as torch's allocator does; compiled layers read 16 at a time
_MAPPED = 2  # cudaHostRegisterMapped: the device may read it where it is


class Weight(NamedTuple):
    """A tensor in host memory, and what puts another in its place."""

    tensor: torch.Tensor
    put: Callable[[torch.Tensor], None]


class HostMatrix:
    """A matrix in pinned host memory. `view` is the same memory as the device sees it, to read a few rows of;
    `fetch` copies all of it."""

    def __init__(self, matrix: torch.Tensor, copies: Copies) -> None:
        self._copies, self.fetches = copies, 0
        self._coming: tuple[torch.Tensor, Any] | None = None
        self._host = copies.pinned(matrix.nbytes)
        view(self._host, 0, matrix).copy_(matrix)
        self.view = view(copies.as_seen(self._host), 0, matrix)

    def begin(self) -> None:
        """Begin to copy, beside what the device does meanwhile."""
        there = torch.empty_like(self._host, device=self._copies.device)
        self._coming = there, self._copies.start(there, self._host)

    def fetch(self) -> torch.Tensor:
        """Return a copy on the device, of which nothing is kept here."""
        if self._coming is None:
            self.begin()
        assert self._coming is not None
        (there, ready), self._coming = self._coming, None
        self._copies.wait_for(ready)
        self.fetches += 1
        return view(there, 0, self.view)


class _LockedPages(mmap):
    """Shared pages, locked in place as long as a tensor is in them: the driver would refuse what it is given at the
    same addresses later."""

    _address = 0

    def bytes(self) -> torch.Tensor:
        host = torch.frombuffer(self, dtype=torch.uint8)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), len(self), _MAPPED))
        self._address = host.data_ptr()
        return host

    def __del__(self) -> None:
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)


class Copies:
    """Copies to the device, in a stream of their own; without a GPU they are done at once. Counts the `bytes` copied,
    and those of host memory that it was asked for, which is `held` as long as what is in it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self.held = device, 0, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, there: torch.Tensor, host: torch.Tensor) -> Any:
        """Copy when all is done that the device has been asked for so far; return what says that it is there."""
        self.bytes += host.nbytes
        if self._stream is None:
            there.copy_(host)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            there.copy_(host, non_blocking=True)
            return self._stream.record_event()

    def wait_for(self, ready: Any) -> None:
        """Let the device go on only when a copy is there."""
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)

    def pinned(self, size: int) -> torch.Tensor:
        """Return so many bytes of host memory, locked in place; without a GPU as they are. Pages are locked, so it has
        some of its own, shared ones: of others a process that is forked (a loader's) would be given copies at once.
        torch's own pinned memory comes in powers of two, half of which might lie idle."""
        self.held += size
        if self._stream is None or not size:
            return torch.empty(size, dtype=torch.uint8)
        return _LockedPages(-1, size).bytes()

    def as_seen(self, host: torch.Tensor) -> torch.Tensor:
        """Return bytes of pinned memory as a tensor of the device, which reads them over the link."""
        return host if self._stream is None else torch.as_tensor(_OnDevice(host), device=self.device)


class _OnDevice:
    """Host memory, described to torch as memory that a GPU can read."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host  # is kept as long as the tensor made of this
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip


class WeightStream:
    """The layers' weights. `turns` counts how often each layer had its own; `head` is fetched for the loss."""

    head: HostMatrix | None = None

    def __init__(self, layers: Iterable[Sequence[Weight]], copies: Copies) -> None:
        self.copies = copies
        self._hosts: list[torch.Tensor] = []
        packed = [self._packed(weights) for weights in layers]
        sizes = [host.nbytes for host in self._hosts]
        self.buffers = [
            torch.empty(max(sizes[parity::2], default=0), dtype=torch.uint8, device=copies.device) for parity in (0, 1)
        ]
        for index, weights in enumerate(packed):
            for offset, shape, put in weights:
                put(view(self.buffers[index % 2], offset, shape))
        self.turns = [0] * len(sizes)
        self._there: list[int | None] = [None, None]
        self._ready: list[Any] = [None, None]
        self._last = -1

    def _packed(self, weights: Sequence[Weight]) -> list[tuple[int, torch.Tensor, Callable[[torch.Tensor], None]]]:
        """Lay a layer's weights end to end in host memory; return where, of what shape, and what puts them in place."""
        sizes = [-(-weight.tensor.nbytes // ALIGNED) * ALIGNED for weight in weights]
        *offsets, size = accumulate(sizes, initial=0)
        host = self.copies.pinned(size)
        shapes = [torch.empty_like(weight.tensor, device="meta") for weight in weights]
        for offset, (tensor, put) in zip(offsets, weights, strict=True):
            view(host, offset, tensor).copy_(tensor)
            put(tensor.new_empty(0))  # its own memory is free now
        self._hosts.append(host)
        return [(offset, shape, weight.put) for offset, shape, weight in zip(offsets, shapes, weights, strict=True)]

    def take(self, index: int) -> None:
        """Put a layer's weights in place, and begin to copy those of the layer whose turn is expected next. A turn
        that nobody expected waits for its copy, and is right."""
        self.turns[index] += 1
        if self._there[index % 2] != index:
            self._fetch(index)
        self.copies.wait_for(self._ready[index % 2])
        following = self._following(index)
        if following is not None and self._there[following % 2] != following:
            self._fetch(following)
        learning = torch.is_grad_enabled()  # answers and evaluations may end without a loss over chunks
        if self.head and learning and self._last < index == len(self.turns) - 2:
            self.head.begin()
        self._last = index

    def _following(self, index: int) -> int | None:
        """Return the layer expected next: from the first on and from the last back, else as it went so far."""
        last = len(self.turns) - 1
        if index in (0, last):
            return None if last == 0 else 1 if index == 0 else last - 1
        return index + 1 if index > self._last else index - 1

    def _fetch(self, index: int) -> None:
        slot, host = index % 2, self._hosts[index]
        self._ready[slot] = self.copies.start(self.buffers[slot][: host.nbytes], host)
        self._there[slot] = index


def view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a buffer of bytes that begins at `offset` as a tensor like another."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
