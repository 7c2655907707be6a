"""Apply RMSNorm (optional) and rotary embedding to the heads of query and key. Write query, key and value in the layout
of attention: (tokens, heads, head_dim). One kernel computes the forward pass, and one kernel the backward pass.

The forward kernel reads and writes each value once. The backward kernel reads and writes each gradient once. With
norms, it also reads the original query and key. It writes the three gradients side by side, because one matrix product
reads them together. torch.compile needs more passes: it reads each head twice (for the mean square and for the norm),
writes query and key twice, and joins the gradients separately. `pairs` is the number of key/value heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor


@triton.jit
def _load_cos_sin(cos: tensor, sin: tensor, row: tensor, half: tensor, HALF: constexpr) -> tensor:
    """Return cos[row, :HALF], cos[row, HALF:], sin[row, :HALF], sin[row, HALF:]. `row` is a token's position."""
    at, mask = row * 2 * HALF + half, half < HALF
    return (
        tl.load(cos + at, mask=mask, other=0.0).to(tl.float32),
        tl.load(cos + at + HALF, mask=mask, other=0.0).to(tl.float32),
        tl.load(sin + at, mask=mask, other=0.0).to(tl.float32),
        tl.load(sin + at + HALF, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def _load(heads: tensor, head_stride: tensor, head: tensor, half: tensor, mask: tensor, HALF: constexpr) -> tensor:
    """Return x[:, :HALF] and x[:, HALF:] for one token's heads x: (heads, 2 * HALF)."""
    at = heads + head * head_stride + half
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(
    heads: tensor, first: tensor, second: tensor, head: tensor, half: tensor, mask: tensor, HALF: constexpr,
) -> None:  # fmt: skip
    at = heads + head * 2 * HALF + half
    tl.store(at, first.to(heads.dtype.element_ty), mask=mask)
    tl.store(at + HALF, second.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def _scale(first: tensor, second: tensor, eps: tensor, HALF: constexpr) -> tensor:
    """Return 1 / sqrt(mean(x²) + eps) for each head x. `first` and `second` are the two halves of the heads."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]


@triton.jit
def _rotate(
    heads: tensor, out: tensor, weight: tensor, count: tensor, c1: tensor, c2: tensor, s1: tensor, s2: tensor,
    eps: tensor, NORM: constexpr, HALF: constexpr, BLOCK_HEADS: constexpr, BLOCK_HALF: constexpr,
) -> None:  # fmt: skip
    """Write [x1 * c1 - x2 * s1, x2 * c2 + x1 * s2] for each head [x1, x2] of a token to `out`. c1, c2, s1 and s2 are
    cosines and sines. If NORM, apply RMSNorm to the heads first."""
    head, half = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < count) & (half < HALF)
    first, second = _load(heads, 2 * HALF, head, half, mask, HALF)
    if NORM:
        scale = _scale(first, second, eps, HALF)
        first *= scale * tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
    _store(out, first * c1 - second * s1, second * c2 + first * s2, head, half, mask, HALF)


@triton.jit
def _rotate_back(
    dout: tensor, head_stride: tensor, heads: tensor, out: tensor, weight: tensor, count: tensor, c1: tensor,
    c2: tensor, s1: tensor, s2: tensor, eps: tensor, NORM: constexpr, HALF: constexpr, BLOCK_HEADS: constexpr,
    BLOCK_HALF: constexpr,
) -> None:  # fmt: skip
    """Write the gradients of one token's `heads` to `out`. `dout` is the gradient of the rotated heads."""
    head, half = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < count) & (half < HALF)
    d1, d2 = _load(dout, head_stride, head, half, mask, HALF)
    first, second = d1 * c1 + d2 * s2, d2 * c2 - d1 * s1
    if NORM:
        first *= tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)
        second *= tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
        x1, x2 = _load(heads, 2 * HALF, head, half, mask, HALF)
        scale = _scale(x1, x2, eps, HALF)
        x1 *= scale
        x2 *= scale
        mean = ((tl.sum(first * x1, 1) + tl.sum(second * x2, 1)) / (2 * HALF))[:, None]
        first = scale * (first - x1 * mean)
        second = scale * (second - x2 * mean)
    _store(out, first, second, head, half, mask, HALF)


@triton.jit
def _copy(
    heads: tensor, head_stride: tensor, out: tensor, count: tensor, HALF: constexpr, BLOCK_HEADS: constexpr,
    BLOCK_HALF: constexpr,
) -> None:  # fmt: skip
    head, half = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < count) & (half < HALF)
    first, second = _load(heads, head_stride, head, half, mask, HALF)
    _store(out, first, second, head, half, mask, HALF)


@triton.jit
def _rotary_forward(
    query: tensor, key: tensor, value: tensor, query_out: tensor, key_out: tensor, value_out: tensor,
    query_weight: tensor, key_weight: tensor, cos: tensor, sin: tensor, query_row: tensor, key_row: tensor,
    value_row: tensor, positions: tensor, heads: tensor, pairs: tensor, eps: tensor, NORM: constexpr, HALF: constexpr,
    BLOCK_HALF: constexpr, BLOCK_HEADS: constexpr, BLOCK_PAIRS: constexpr,
) -> None:  # fmt: skip
    """Write a token's rotated query and key, and its unchanged value. Cosines and sines are loaded once per token."""
    row = tl.program_id(0).to(tl.int64)
    c1, c2, s1, s2 = _load_cos_sin(cos, sin, row % positions, tl.arange(0, BLOCK_HALF)[None, :], HALF)
    q, k, v = query + row * query_row, key + row * key_row, value + row * value_row
    to_q, to_k, to_v = (
        query_out + row * heads * 2 * HALF, key_out + row * pairs * 2 * HALF, value_out + row * pairs * 2 * HALF
    )  # fmt: skip
    _rotate(q, to_q, query_weight, heads, c1, c2, s1, s2, eps, NORM, HALF, BLOCK_HEADS, BLOCK_HALF)
    _rotate(k, to_k, key_weight, pairs, c1, c2, s1, s2, eps, NORM, HALF, BLOCK_PAIRS, BLOCK_HALF)
    _copy(v, 2 * HALF, to_v, pairs, HALF, BLOCK_PAIRS, BLOCK_HALF)


@triton.jit
def _rotary_backward(
    dquery: tensor, dkey: tensor, dvalue: tensor, query: tensor, key: tensor, all_out: tensor, query_weight: tensor,
    key_weight: tensor, cos: tensor, sin: tensor, dquery_row: tensor, dquery_head: tensor, dkey_row: tensor,
    dkey_head: tensor, dvalue_row: tensor, dvalue_head: tensor, query_row: tensor, key_row: tensor, out_row: tensor,
    positions: tensor, heads: tensor, pairs: tensor, eps: tensor, NORM: constexpr, HALF: constexpr,
    BLOCK_HALF: constexpr, BLOCK_HEADS: constexpr, BLOCK_PAIRS: constexpr,
) -> None:  # fmt: skip
    """Write the gradients of a token's query, key and value side by side. One program handles one token."""
    row = tl.program_id(0).to(tl.int64)
    c1, c2, s1, s2 = _load_cos_sin(cos, sin, row % positions, tl.arange(0, BLOCK_HALF)[None, :], HALF)
    dq, dk, dv = dquery + row * dquery_row, dkey + row * dkey_row, dvalue + row * dvalue_row
    q, k, to = query + row * query_row, key + row * key_row, all_out + row * out_row
    to_k = to + heads * 2 * HALF
    _rotate_back(dq, dquery_head, q, to, query_weight, heads, c1, c2, s1, s2, eps, NORM, HALF, BLOCK_HEADS, BLOCK_HALF)
    _rotate_back(dk, dkey_head, k, to_k, key_weight, pairs, c1, c2, s1, s2, eps, NORM, HALF, BLOCK_PAIRS, BLOCK_HALF)
    _copy(dv, dvalue_head, to_k + pairs * 2 * HALF, pairs, HALF, BLOCK_PAIRS, BLOCK_HALF)


def _blocks(heads: int, pairs: int, width: int) -> dict[str, int]:
    half, most = triton.next_power_of_2(width // 2), triton.next_power_of_2(heads)
    return {"HALF": width // 2, "BLOCK_HALF": half, "BLOCK_HEADS": most, "BLOCK_PAIRS": triton.next_power_of_2(pairs),
            "num_warps": 4 if most * half <= 2048 else 8}  # fmt: skip


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor) -> Any:
    """Return three uninitialized tensors for query, key and value, each (tokens, heads, head_dim)."""
    width = cos.shape[1]
    return tuple(part.new_empty(part.shape[0], part.shape[1] // width, width) for part in (query, key, value))


@torch.library.custom_op("ftbench::rotary_forward", mutates_args=())
def rotary_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return query, key and value, each (tokens, heads, head_dim), after norm and rotation of query and key. The
    arguments query, key and value are outputs of linear layers: (tokens, heads * head_dim). cos and sin are (positions,
    head_dim). Token t has position t % positions. Without query_weight and key_weight, there is no norm."""
    width, made = cos.shape[1], _heads(query, key, value, cos)
    heads, pairs = made[0].shape[1], made[1].shape[1]
    weights = (cos, cos) if query_weight is None else (query_weight, key_weight)
    rows = (query.stride(0), key.stride(0), value.stride(0), len(cos), heads, pairs, eps)
    given = (query, key, value, *made, *weights, cos.contiguous(), sin.contiguous(), *rows)
    _rotary_forward[(len(query),)](*given, NORM=query_weight is not None, **_blocks(heads, pairs, width))
    return made


rotary_forward.register_fake(lambda query, key, value, q_weight, k_weight, cos, *_: _heads(query, key, value, cos))


@torch.library.custom_op("ftbench::rotary_backward", mutates_args=())
def rotary_backward(
    dquery: torch.Tensor, dkey: torch.Tensor, dvalue: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
    query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor,
    eps: float, room: int,
) -> torch.Tensor:  # fmt: skip
    """Return the gradients of rotary_forward's query, key and value side by side: (tokens, sum of widths + room). The
    last `room` columns are not initialized. dquery, dkey and dvalue are (tokens, heads, head_dim), with any strides."""
    tokens, heads, width = dquery.shape
    pairs = dkey.shape[1]
    given = [part if part.stride(2) == 1 else part.contiguous() for part in (dquery, dkey, dvalue)]
    out = query.new_empty(tokens, (heads + 2 * pairs) * width + room)
    weights = (cos, cos) if query_weight is None else (query_weight, key_weight)
    strides = [stride for part in given for stride in part.stride()[:2]]
    sizes = (query.stride(0), key.stride(0), out.stride(0), len(cos), heads, pairs, eps)
    _rotary_backward[(tokens,)](
        *given, query, key, out, *weights, cos.contiguous(), sin.contiguous(), *strides, *sizes,
        NORM=query_weight is not None, **_blocks(heads, pairs, width),
    )  # fmt: skip
    return out


rotary_backward.register_fake(
    lambda dquery, dkey, dvalue, query, key, query_weight, key_weight, cos, sin, eps, room: query.new_empty(
        dquery.shape[0], (dquery.shape[1] + 2 * dkey.shape[1]) * dquery.shape[2] + room
    )
)  # fmt: skip


class RotaryHeads(torch.autograd.Function):
    """Return query, key and value, each (tokens, heads, head_dim), from inputs (tokens, heads * head_dim). Query and
    key get a norm (optional, frozen weight) and the rotary embedding. If `key` and `value` are None, `query` contains
    all three side by side and may have extra columns. `sizes` are the widths of the three parts."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: Any, value: Any, sizes: Any, query_weight: Any, key_weight: Any,
        cos: torch.Tensor, sin: torch.Tensor, eps: float,
    ) -> Any:  # fmt: skip
        ctx.sizes, ctx.eps = sizes, eps
        ctx.room = None if key is not None else query.shape[1] - sum(sizes)
        if key is None:
            query, key, value = query[:, : sum(sizes)].split(sizes, 1)
        ctx.save_for_backward(query, key, query_weight, key_weight, cos, sin)
        return rotary_forward(query, key, value, query_weight, key_weight, cos, sin, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        out = rotary_backward(*gradients, *ctx.saved_tensors, ctx.eps, ctx.room or 0)
        parts = out.split(ctx.sizes, 1) if ctx.room is None else (out, None, None)
        return *parts, None, None, None, None, None, None
