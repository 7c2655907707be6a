"""Train gpt-oss with frozen experts in MXFP4, the published 4-bit format. Only one matrix at a time is dequantised.

The kernel of transformers' own MXFP4 experts has no backward pass. Here the backward pass dequantises each matrix
again. So no 16-bit copy stays in memory, and frozen matrices get no gradient. An expert's adapter is computed as two
low-rank products. peft would create the full update matrix and its gradient.

Format (OCP Microscaling Formats 1.0): 32 values share one scale 2^(byte - 127), which is stored in one byte (E8M0). A
value has 4 bits (E2M1). A byte contains two values, and the first value is in the lower 4 bits.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import initialization
from transformers.models.gpt_oss import modeling_gpt_oss

from ftbench.kernels.expert_adapters import grouped
from ftbench.kernels.expert_products import ExpertAdapter, GroupedExperts

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # absolute values of E2M1
BLOCK = 32  # values that share a scale


def scale_for(std: float) -> int:
    """Return the scale byte that gives uniformly random 4-bit codes a standard deviation close to `std`."""
    spread = math.sqrt(sum(size * size for size in SIZES) / len(SIZES))
    return 127 + round(math.log2(std / spread))


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return expert matrices (experts, out, in). `blocks` are 4-bit codes, uint8 (experts, out, in / 32, 16), and
    `scales` are uint8 (experts, out, in / 32)."""
    rows, powers = blocks.view(-1, BLOCK // 2), scales.view(-1)
    decode = fused() if blocks.is_cuda else decoded
    for tensor in (rows, powers):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)  # compile one kernel for all numbers of rows
    return decode(rows, powers, dtype).view(*blocks.shape[:-2], -1)


def decoded(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return (rows, 32) values. Each row is decoded from 16 bytes of `blocks` and one byte of `scales`. Values and
    scales are exact, because they are built from the bits of a float32: the exponent in bits 23 to 30 (127 means 2^0),
    and the first binary digit of the fraction in bit 22. A scale byte of 0 (2^-127) gives zeros."""
    places = 4 * torch.arange(2, dtype=torch.int32, device=blocks.device)
    codes = (blocks.to(torch.int32).unsqueeze(-1) >> places) & 15
    size = codes & 7  # two bits of exponent, one digit after the point
    normal = ((((size >> 1) + 126) << 23) | ((size & 1) << 22)).view(torch.float32)
    values = torch.where(size < 2, 0.5 * size, normal) * (1 - 2 * (codes >> 3))
    powers = (scales.to(torch.int32) << 23).view(torch.float32)
    return (values.flatten(1) * powers.unsqueeze(-1)).to(dtype)


@cache
def fused() -> Any:
    """Return `decoded`, compiled into one kernel. It reads and writes 20 times fewer bytes than separate operations."""
    return torch.compile(decoded)


class _FrozenProduct(torch.autograd.Function):
    """Return `grouped(rows, matrices, ends)` for MXFP4 matrices. The backward pass only saves codes and scales."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, ends: torch.Tensor) -> Any:
        ctx.save_for_backward(blocks, scales, ends)
        return grouped(rows, dequantise(blocks, scales, rows.dtype).transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        blocks, scales, ends = ctx.saved_tensors
        (gradient,) = gradients
        return grouped(gradient.contiguous(), dequantise(blocks, scales, gradient.dtype), ends), None, None, None


class Mxfp4Experts(GroupedExperts, nn.Module):
    """The experts of gpt-oss in MXFP4. They replace transformers' GptOssExperts and have the published weight names."""

    has_bias = is_clamped = True
    is_transposed = True  # for peft: the placeholders of `declared` are (experts, in, out)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.limit, self.alpha = config.num_local_experts, 7.0, 1.702
        wide, narrow = config.hidden_size, config.intermediate_size
        self.shapes = {"gate_up_proj": (wide, 2 * narrow), "down_proj": (narrow, wide)}  # in, out
        self.adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        for name, (into, out) in self.shapes.items():
            groups = (self.num_experts, out, into // BLOCK)
            for suffix, shape in (("blocks", (*groups, BLOCK // 2)), ("scales", groups)):
                codes = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
                self.register_parameter(f"{name}_{suffix}", codes)
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(self.num_experts, out)))

    _apply_gate = modeling_gpt_oss.GptOssExperts._apply_gate

    def frozen(self, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        if 2 * len(rows) <= self.num_experts:  # few rows, as in generation: dequantise only the chosen experts
            blocks, scales = blocks[experts], scales[experts]
            ends = torch.arange(1, len(rows) + 1, dtype=torch.int32, device=rows.device)
        product: torch.Tensor = _FrozenProduct.apply(rows, blocks, scales, ends)
        return product


@contextmanager
def declared(model: Any) -> Iterator[None]:
    """Give the experts placeholder matrices inside the `with` block, because peft only adds adapters to existing
    matrices. A placeholder is one scalar, expanded to the shape of the matrix. After the block, ftbench's
    `ExpertAdapter` replaces peft's wrappers."""
    experts = [module for module in model.modules() if isinstance(module, Mxfp4Experts)]
    for module in experts:
        for name, (into, out) in module.shapes.items():
            zero = torch.zeros((), dtype=module.gate_up_proj_bias.dtype, device=module.gate_up_proj_bias.device)
            placeholder = nn.Parameter(zero.expand(module.num_experts, into, out), requires_grad=False)
            module.register_parameter(name, placeholder)
    try:
        yield
    finally:
        for module in experts:
            for name in module.shapes:
                delattr(module, name)
    for module in model.modules():
        if type(module) is ParamWrapper and isinstance(module.get_base_layer(), Mxfp4Experts):
            module.__class__ = ExpertAdapter


class _Factory:
    """Replaces the class GptOssExperts, and creates Mxfp4Experts. transformers does not initialize them, because they
    are not instances of GptOssExperts."""

    def __new__(cls, config: Any) -> Any:
        return Mxfp4Experts(config)


@contextmanager
def as_experts() -> Iterator[None]:
    """Inside the `with` block, create gpt-oss models with MXFP4 experts and uninitialized weights."""
    with mock.patch.object(modeling_gpt_oss, "GptOssExperts", _Factory), initialization.no_init_weights():
        yield


def problems(model: Any) -> list[str]:
    """Return an error message if the experts are not in 4 bits, otherwise []."""
    wide = [name for name, p in model.named_parameters()
            if ".experts." in name and "lora_" not in name and p.ndim > 2 and p.dtype != torch.uint8]  # fmt: skip
    if not any(isinstance(module, Mxfp4Experts) for module in model.modules()):
        return ["method qlora: the model lacks MXFP4 experts"]
    return [f"method qlora: {wide[0]} and {len(wide) - 1} other expert matrices are in 16 bits"] if wide else []
