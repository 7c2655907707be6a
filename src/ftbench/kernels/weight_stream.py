"""Keep weights in pinned host memory, and copy them layer by layer into two buffers on the device.

Even layers share one buffer, and odd layers share the other buffer. Each weight is a view of its layer's buffer, and
the view never changes. If autograd or bitsandbytes saves this view, it is valid whenever the layer is loaded.

When a layer starts (forward or recomputation), the weights of the next layer are copied into the other buffer, on a
separate CUDA stream. The copy waits until the device has finished all queued work, because this work may still read the
buffer. Each layer waits for the copy of its own weights. Only the device waits, and the CPU continues.

The backward pass may update weights in their buffer (`trained`). Before another layer uses the buffer, the new weights
are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from mmap import mmap
from typing import Any, NamedTuple

import torch

ALIGNED = 256  # each weight starts at a multiple of 256 bytes, as in torch's allocator; compiled code needs 16
_MAPPED = 2  # cudaHostRegisterMapped: the device may read the host memory directly


class Weight(NamedTuple):
    """A tensor of the model, and a function `put` that replaces this tensor by another tensor."""

    tensor: torch.Tensor
    put: Callable[[torch.Tensor], None]


class HostMatrix:
    """A matrix in pinned host memory. `view` is a device tensor of the same memory. The GPU reads single rows through
    `view`. `fetch` copies all rows to the device."""

    def __init__(self, matrix: torch.Tensor, copies: Copies) -> None:
        self._copies, self.fetches = copies, 0
        self._coming: tuple[torch.Tensor, Any] | None = None
        self._host = copies.pinned(matrix.nbytes)
        view(self._host, 0, matrix).copy_(matrix)
        self.view = view(copies.as_seen(self._host), 0, matrix)

    def begin(self) -> None:
        """Start to copy the matrix to the device, on a separate stream."""
        copy = torch.empty_like(self._host, device=self._copies.device)
        self._coming = copy, self._copies.start(copy, self._host)

    def fetch(self) -> torch.Tensor:
        """Return a copy of the matrix on the device. The copy's memory is free when the caller deletes the copy."""
        if self._coming is None:
            self.begin()
        assert self._coming is not None
        (copy, ready), self._coming = self._coming, None
        self._copies.wait_for(ready)
        self.fetches += 1
        return view(copy, 0, self.view)


class _LockedPages(mmap):
    """Shared memory pages that are locked for the GPU. When the last tensor in these pages is deleted, they are
    unlocked. Otherwise the driver could not lock new pages at the same address."""

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
    """Copies between host and device on a separate stream. Without a GPU, the copies run immediately. `bytes` counts
    the copied bytes. `held` counts the bytes of allocated host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self.held = device, 0, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, target: torch.Tensor, host: torch.Tensor) -> Any:
        """Start to copy `host` to `target`. The copy waits for all work that is queued on the device. Return an event
        for the end of the copy (None without a GPU)."""
        self.bytes += host.nbytes
        if self._stream is None:
            target.copy_(host)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(host, non_blocking=True)
            return self._stream.record_event()

    def wait_for(self, ready: Any) -> None:
        """Make the device wait for `ready`, the event that `start` returned."""
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)

    def pinned(self, size: int) -> torch.Tensor:
        """Return `size` bytes of locked host memory (ordinary memory without a GPU). Its pages are shared, because the
        operating system would copy private locked pages for each forked process (data loader workers). torch's pinned
        memory is not used, because it rounds sizes up to powers of two."""
        self.held += size
        if self._stream is None or not size:
            return torch.empty(size, dtype=torch.uint8)
        return _LockedPages(-1, size).bytes()

    def as_seen(self, host: torch.Tensor) -> torch.Tensor:
        """Return a device tensor of the pinned memory `host`. The device reads the host memory directly."""
        return host if self._stream is None else torch.as_tensor(_OnDevice(host), device=self.device)


class _OnDevice:
    """Pinned host memory with the attribute `__cuda_array_interface__`, from which torch creates a CUDA tensor."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host  # the CUDA tensor keeps this object, and this object keeps the memory
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip


class WeightStream:
    """Keeps the weights of all layers on the host and copies them to the device. `turns` counts how often each layer
    was used. `head` is the matrix of lm_head, which is copied before the loss is computed."""

    head: HostMatrix | None = None

    def __init__(self, layers: Iterable[Sequence[Weight]], copies: Copies, trained: bool = False) -> None:
        self.copies, self._trained = copies, trained
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
        self._changed = [False, False]  # whether a buffer has weights that are newer than those on the host
        self._ready: list[Any] = [None, None]
        self._last = -1

    def _packed(self, weights: Sequence[Weight]) -> list[tuple[int, torch.Tensor, Callable[[torch.Tensor], None]]]:
        """Copy a layer's weights to one block on the host. Return (byte offset, meta tensor, put) for each weight."""
        sizes = [-(-weight.tensor.nbytes // ALIGNED) * ALIGNED for weight in weights]
        *offsets, size = accumulate(sizes, initial=0)
        host = self.copies.pinned(size)
        shapes = [torch.empty_like(weight.tensor, device="meta") for weight in weights]
        for offset, (tensor, put) in zip(offsets, weights, strict=True):
            view(host, offset, tensor).copy_(tensor)
            put(tensor.new_empty(0))  # frees the device memory of the weight
        self._hosts.append(host)
        return [(offset, shape, weight.put) for offset, shape, weight in zip(offsets, shapes, weights, strict=True)]

    def take(self, index: int) -> None:
        """Load the weights of layer `index`, and start to copy the weights of the layer that is expected next. If a
        different layer starts next, its weights are copied at that time. This is slower, but correct."""
        self.turns[index] += 1
        if self._there[index % 2] != index:
            self._fetch(index)
        self.copies.wait_for(self._ready[index % 2])
        self._changed[index % 2] |= self._trained and torch._C._current_graph_task_id() >= 0  # in a backward pass
        following = self._following(index)
        if following is not None and self._there[following % 2] != following:
            self._fetch(following)
        learning = torch.is_grad_enabled()  # generation and evaluation may not use the chunked loss
        if self.head and learning and self._last < index == len(self.turns) - 2:
            self.head.begin()
        self._last = index

    def _following(self, index: int) -> int | None:
        """Return the index of the layer that is expected after layer `index`. This is the following layer in the
        forward pass, and the previous layer in the backward pass."""
        last = len(self.turns) - 1
        if index in (0, last):
            return None if last == 0 else 1 if index == 0 else last - 1
        return index + 1 if index > self._last else index - 1

    def _fetch(self, index: int) -> None:
        slot, host = index % 2, self._hosts[index]
        if (before := self._there[slot]) is not None and self._changed[slot]:
            self.copies.start(self._hosts[before], self.buffers[slot][: self._hosts[before].nbytes])
            self._changed[slot] = False
        self._ready[slot] = self.copies.start(self.buffers[slot][: host.nbytes], host)
        self._there[slot] = index


def view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a byte buffer that begins at byte `offset` and has the dtype and shape of `like`."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
