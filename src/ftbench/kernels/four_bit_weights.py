"""Dequantize the 4-bit weights of bitsandbytes into the matrix that `adapter_products.Augmented` reads.

bitsandbytes stores a weight (out, in) as blocks of 64 values. A byte has two values, the first in its high bits. A
value is code[index] * scale, where `code` has 16 entries. With double quantization, the scales are 8-bit indexes, too:
scale = code2[index] * scale2 + offset, with one scale2 per 256 scales. Source: `functional.dequantize_4bit` of
bitsandbytes 0.50.

The dequantized matrix exists only during one product. So the backward pass dequantizes it again. bitsandbytes cannot
write into a wider matrix, and it writes the scales to memory first.
"""

from __future__ import annotations

from typing import Any

import torch

from ftbench.kernels.optional_triton import constexpr, jit, tensor, tl, triton

BLOCK, NESTED_BLOCK = 64, 256  # weights per scale, and scales per scale2
_BLOCKS = 128  # blocks per program


def tensors_of(weight: Any) -> list[torch.Tensor] | None:
    """Return the tensors of a bitsandbytes weight: values, scales and code, and with double quantization scale2, code2
    and offset. Return None if the weight is not quantized, or if blocks have another size or end inside a row."""
    state = weight.quant_state
    if state is None or state.blocksize != BLOCK or state.shape[1] % BLOCK:
        return None
    tensors = [weight.data, state.absmax, state.code]
    if not state.nested:
        return tensors
    if state.state2.blocksize != NESTED_BLOCK:
        return None
    return [*tensors, state.state2.absmax, state.state2.code, state.offset]


@jit
def _dequantise(
    packed: tensor, scales: tensor, code: tensor, scales2: tensor, code2: tensor, offset: tensor, wide: tensor,
    blocks: tensor, blocks_per_row: tensor, row_stride: tensor, NESTED: constexpr, BLOCKS: constexpr,
    VALUES: constexpr, PER_SCALE2: constexpr,
) -> None:  # fmt: skip
    """Write BLOCKS blocks of VALUES weights to `wide`."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    scale = tl.load(scales + block, mask=inside, other=0)
    if NESTED:
        second = tl.load(scales2 + block // PER_SCALE2, mask=inside, other=0.0)
        scale = tl.load(code2 + scale.to(tl.int32)) * second + tl.load(offset)
    pair = tl.arange(0, VALUES // 2)
    byte = tl.load(packed + block[:, None] * (VALUES // 2) + pair[None, :], mask=inside[:, None], other=0).to(tl.int32)
    values = tl.interleave(tl.load(code + (byte >> 4)), tl.load(code + (byte & 15))) * scale[:, None]
    to = (block // blocks_per_row).to(tl.int64) * row_stride + block % blocks_per_row * VALUES
    at = wide + to[:, None] + tl.arange(0, VALUES)[None, :]
    tl.store(at, values.to(wide.dtype.element_ty), mask=inside[:, None])


def by_triton(rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, code: torch.Tensor, *nested: Any) -> None:
    """Write a weight to `rows` (out, in) with the kernel. The other arguments are the tensors of `tensors_of`."""
    blocks = rows.numel() // BLOCK
    arguments = (packed, scales, code, *(nested or (scales, code, scales)), rows, blocks, rows.shape[1] // BLOCK)
    _dequantise[(triton.cdiv(blocks, _BLOCKS),)](
        *arguments, rows.stride(0), NESTED=bool(nested), BLOCKS=_BLOCKS, VALUES=BLOCK, PER_SCALE2=NESTED_BLOCK
    )


def by_torch(rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, code: torch.Tensor, *nested: Any) -> None:
    """Do the same without Triton."""
    if nested:
        scales2, code2, offset = nested
        scales = code2[scales.long()] * scales2.repeat_interleave(NESTED_BLOCK)[: len(scales)] + offset
    index = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).long()
    rows.copy_((code[index].view(-1, BLOCK) * scales[:, None]).view(rows.shape))


@torch.library.custom_op("ftbench::augmented_weight", mutates_args=())
def augmented_weight(
    a: torch.Tensor, b: torch.Tensor, layers: list[torch.Tensor], each: int, gradient: torch.Tensor | None
) -> torch.Tensor:
    """Return the matrix [[W, b], [a, 0]] of `Augmented`. The shapes are a: (r, in), b: (out, r). `layers` contains the
    `each` tensors of `tensors_of` for each layer. W (out, in) has the rows of all layers. `gradient` is never read. It
    makes the call depend on the backward pass. Otherwise torch.compile would merge the calls of both passes and keep
    the matrix in memory."""
    (out, columns), width, start = b.shape, a.shape[1], 0
    wide = b.new_empty(out + columns, width + columns)
    wide[out:, :width], wide[:out, width:], wide[out:, width:] = a, b, 0
    for at in range(0, len(layers), each):
        end = start + 2 * layers[at].numel() // width
        write = by_triton if wide.is_cuda else by_torch
        write(wide[start:end, :width], *layers[at : at + each])
        start = end
    return wide


augmented_weight.register_fake(lambda a, b, *_: b.new_empty(b.shape[0] + b.shape[1], a.shape[1] + b.shape[1]))
