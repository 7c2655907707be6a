"""Products of a mixture of experts.

Tokens are sorted by expert and each group of rows is multiplied by its matrix. Adapters of experts are two thin
grouped products, which are added to the product with the frozen matrices. peft adds the adapters' product to a copy of
each expert's matrix and computes gradients as large as the copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.nn import functional as F

ALIGNED = 8  # 16-bit values: grouped products need rows of a multiple of 16 bytes


def grouped(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows by its matrix: rows x in, groups x in x out → rows x out. `ends` (int32) holds the
    end row of each group."""
    return F.grouped_mm(rows, matrices, offs=ends)


@torch.library.custom_op("ftbench::in_rows", mutates_args=())
def in_rows(matrices: torch.Tensor) -> torch.Tensor:
    """Copy to row-major order. The compiler removes a plain `contiguous()` after a pointwise operation, and a grouped
    product rejects the result."""
    return matrices.clone(memory_format=torch.contiguous_format)


in_rows.register_fake(lambda matrices: torch.empty_like(matrices, memory_format=torch.contiguous_format))
in_rows.register_autograd(lambda _, gradient: gradient)


class GroupedExperts:
    """Fused experts with gate and up in one matrix: a mixin for transformers' class or for `nn.Module`."""

    adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]]
    num_experts: int
    has_bias: bool
    is_transposed: bool
    _apply_gate: Any

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return tokens x width from hidden states (tokens x width), chosen experts and their weights (tokens x k
        each)."""
        tokens, k = router_indices.shape
        experts, order = router_indices.reshape(-1).sort(stable=True)
        numbers = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        gated = self._apply_gate(self._product("gate_up_proj", hidden_states[order // k], experts, ends))
        weighted = self._product("down_proj", gated, experts, ends) * routing_weights.reshape(-1)[order, None]
        in_place = torch.empty_like(order)
        in_place[order] = torch.arange(len(order), device=order.device)
        return weighted[in_place].view(tokens, k, -1).sum(dim=1).to(hidden_states.dtype)

    def _product(self, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        dtype = getattr(self, f"{name}_bias" if self.has_bias else name).dtype
        rows = rows.to(dtype)
        result = self.frozen(name, rows, experts, ends)
        if self.has_bias:
            result = result + getattr(self, f"{name}_bias")[experts]
        if name in self.adapters:
            down, up, scaling = self.adapters[name]
            result = result + scaling * grouped(grouped(rows, down.to(dtype), ends), in_rows(up.to(dtype)), ends)
        return result

    def frozen(self, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the product with the frozen matrices. `experts` holds the expert of each row."""
        matrices = getattr(self, name)
        return grouped(rows, matrices if self.is_transposed else matrices.transpose(-2, -1), ends)


class ExpertAdapter(ParamWrapper):
    """peft's adapter of a fused matrix, with peft's names and shapes. It passes its two factors to the experts."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        held = self.get_base_layer().adapters
        for name in active_adapters:
            down = self.lora_A[name].weight.unflatten(0, (self.num_experts, -1)).transpose(-2, -1)
            up = self.lora_B[name].weight.unflatten(1, (-1, self.num_experts)).permute(2, 1, 0)
            if missing := -down.shape[-1] % ALIGNED:
                down, up = F.pad(down, (0, missing)), F.pad(up, (0, 0, 0, missing))
            held[self.parameter_name] = (down, up, self.scaling[name])
        try:
            yield
        finally:
            held.pop(self.parameter_name, None)


@lru_cache
def _grouped_class(kind: Any) -> Any:
    return type(f"Grouped{kind.__name__}", (GroupedExperts, kind), {})


def group_adapters(model: Any) -> int:
    """Compute peft's adapters of fused experts as grouped products. Return the number of adapted matrices."""
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    for wrapper in wrappers:
        experts = wrapper.get_base_layer()
        if not isinstance(experts, GroupedExperts):
            experts.__class__, experts.adapters = _grouped_class(type(experts)), {}  # type: ignore[arg-type]
        wrapper.__class__ = ExpertAdapter
    return len(wrappers)
