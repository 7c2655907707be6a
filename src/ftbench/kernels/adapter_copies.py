"""Copy the scaled values of all LoRA adapters to the buffers of fused_lora. One kernel makes all copies, because
separate kernels would take 4 µs each, and Qwen3-8B has 504 adapter matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ftbench.kernels.optional_triton import constexpr, jit, tensor, tl, triton

BLOCK = 4096  # values per program
Copy = tuple[torch.Tensor, torch.Tensor, float]  # target, source, scale; the values in a row of the target are adjacent


@jit
def _copy_scaled(table: tensor, scales: tensor, any_target: tensor, any_source: tensor, BLOCK: constexpr) -> None:
    """Copy BLOCK values of one source. A row of `table` has the addresses of target and source, the row stride of the
    target, the columns and the size. The types of the pointers are those of `any_target` and `any_source`."""
    entry, at = table + tl.program_id(0) * 5, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target, source = tl.load(entry).to(any_target.dtype), tl.load(entry + 1).to(any_source.dtype)
    stride, columns, size = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    values = tl.load(source + at, mask=at < size, other=0.0).to(tl.float32) * tl.load(scales + tl.program_id(0))
    to = at // columns * stride + at % columns
    tl.store(target + to, values.to(any_target.dtype.element_ty), mask=at < size)


@torch.no_grad()
def by_torch(copies: Iterable[Copy]) -> None:
    """Set target = source * scale for each copy, one after the other."""
    for target, source, scale in copies:
        torch.mul(source, scale, out=target)


class AdapterCopies:
    """Makes the copies that `find` returns, and calls `find` again if a source moved. Targets must not move."""

    def __init__(self, find: Callable[[], list[Copy]]) -> None:
        self.find = find
        self.copies: list[Copy] = []
        self.addresses: list[int] = []
        self.table = self.scales = torch.empty(0)

    def __call__(self) -> None:
        if not self.copies or self.addresses != [source.data_ptr() for _, source, _ in self.copies]:
            self._prepare()
        if triton is not None and self.table.is_cuda:
            self.by_triton()
        else:
            by_torch(self.copies)

    def by_triton(self) -> None:
        (target, source, _), most = self.copies[0], max(source.numel() for _, source, _ in self.copies)
        grid = (len(self.copies), triton.cdiv(most, BLOCK))
        _copy_scaled[grid](self.table, self.scales, target, source, BLOCK=BLOCK)

    def _prepare(self) -> None:
        self.copies = self.find()
        self.addresses = [source.data_ptr() for _, source, _ in self.copies]
        rows = [(target.data_ptr(), source.data_ptr(), target.stride(0), source.shape[1], source.numel())
                for target, source, _ in self.copies]  # fmt: skip
        kinds = {(target.dtype, source.dtype) for target, source, _ in self.copies}
        devices = {part.device for copy in self.copies for part in copy[:2]}
        device = devices.pop() if len(kinds) == len(devices) == 1 else "cpu"  # the kernel supports one type of tensors
        self.table = torch.tensor(rows, dtype=torch.int64).to(device)
        self.scales = torch.tensor([scale for *_, scale in self.copies], dtype=torch.float32).to(device)
