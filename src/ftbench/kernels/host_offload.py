"""Keep activations for the backward pass in pinned host memory.

The copies run on a separate CUDA stream. A layer's input is copied to the host while the layer computes. When the
backward pass reads tensor n, the copy of tensor n - 1 to the device starts. The module uses torch's saved-tensor hooks.
With non-reentrant checkpointing, autograd only saves a layer's input (torch.utils.checkpoint, `_NoopSaveInputs`).

The stream that computes also frees each tensor, after it has waited for the copy. With record_stream, memory would be
free too late: when the CPU, which starts kernels several layers ahead, learns that the copy has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_SMALL = 1 << 20  # bytes; smaller tensors stay on the GPU, because copying them costs more than it saves


class Kept:
    """Host copy of a tensor that autograd saved. `before` refers to the GPU tensor that was saved before this tensor.
    In torch 2.11, checkpointing also saves an empty CPU tensor for each layer."""

    __slots__ = ("__weakref__", "back", "before", "device", "fetched", "free", "host")

    def __init__(self, host: torch.Tensor, device: torch.device, before: weakref.ref[Kept] | None) -> None:
        self.host, self.device, self.before = host, device, before
        self.back: Any = None  # copy on the device, or None if it has no memory yet
        self.free: Any = None  # event: the device has finished the earlier work that used the memory of `back`
        self.fetched: Any = None  # event: the copy to the device is complete

    def __del__(self) -> None:
        if self.fetched is not None:  # nothing read the copy, and later work may reuse its memory
            torch.cuda.current_stream(self.device).wait_event(self.fetched)


class HostTensors:
    """Copies saved tensors to the host and back. `moved` and `moved_bytes` count tensors and bytes copied to the host.
    `fetched` counts tensors copied back to the device."""

    def __init__(self) -> None:
        self.moved = self.moved_bytes = self.fetched = 0
        self._stream = cache(torch.cuda.Stream)  # a stream per device
        self._last: weakref.ref[Kept] | None = None
        self._leaving: list[tuple[torch.Tensor, Any]] = []  # (tensor, event: its copy to the host is complete)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapped `function`. The tensors that autograd saves during a call are kept on the host."""

        def keeping(*args: Any, **kwargs: Any) -> Any:
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    return function(*args, **kwargs)
            finally:
                while self._leaving:
                    tensor, copied = self._leaving.pop()
                    torch.cuda.current_stream(tensor.device).wait_event(copied)

        return keeping

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        on_gpu = tensor.device.type == "cuda"
        if not tensor.is_floating_point() or (on_gpu and tensor.nbytes < _SMALL):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        kept = Kept(host, tensor.device, self._last)
        if on_gpu:
            stream = self._stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                host.copy_(tensor, non_blocking=True)
                self._leaving.append((tensor, stream.record_event()))
            self._last = weakref.ref(kept)
        else:
            host.copy_(tensor)
        self.moved += 1
        self.moved_bytes += tensor.nbytes
        return kept

    def _unpack(self, kept: torch.Tensor | Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self.fetched += 1
        if kept.device.type != "cuda":
            return kept.host.clone()
        self._fetch(kept)
        torch.cuda.current_stream(kept.device).wait_event(kept.fetched)
        tensor, kept.back, kept.fetched = kept.back, None, None
        if before := kept.before and kept.before():
            self._fetch(before)
            if earliest := before.before and before.before():
                self._fetch(earliest, start=False)
        return tensor

    def _fetch(self, kept: Kept, start: bool = True) -> None:
        """Allocate memory for the copy (earlier work may use it until the event `kept.free`), and `start` to copy."""
        if kept.back is None:
            kept.back = torch.empty_like(kept.host, device=kept.device)
            kept.free = torch.cuda.current_stream(kept.device).record_event()
        if start and kept.fetched is None:
            stream = self._stream(kept.device)
            stream.wait_event(kept.free)
            with torch.cuda.stream(stream):
                kept.back.copy_(kept.host, non_blocking=True)
                kept.fetched = stream.record_event()
