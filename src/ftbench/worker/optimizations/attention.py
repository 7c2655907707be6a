"""Register `varlen` with transformers: torch's attention for samples of different lengths in one row, without padding.
transformers selects the attention implementation when it loads the model."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from ftbench.errors import SpecError
from ftbench.kernels.sink_attention import BatchedSinkAttention, SinkAttention
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations.compute import MEASURED

VARLEN = "varlen"


def register() -> None:
    """Register `varlen` as an attention implementation of from_pretrained."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface

    # cu_seq_lens contains the sample boundaries, so no mask is needed. Because no mask function is registered,
    # transformers makes no mask. The CPU would have to wait for the device to make a mask.
    cudnn = torch.cuda.is_available() and torch.cuda.get_device_capability() == MEASURED
    AttentionInterface.register(VARLEN, attention(varlen_attn, cudnn))


def attention(kernel: Any, cudnn: bool = False) -> Any:
    """Return an attention function for transformers that calls `kernel` (torch's varlen_attn). If `cudnn`, it computes
    sinks with cuDNN where possible. The kernel's parameters depend on the torch version. Read their names here, because
    compiled code cannot read them."""
    takes = frozenset(inspect.signature(kernel).parameters)

    def varlen(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, cu_seq_lens_q: Any = None, max_length_q: Any = None, sliding_window: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Return causal attention within each sample of a row: (1, heads, tokens, head_dim) → (1, tokens, heads,
        head_dim). Samples of equal length are computed as a batch, because torch's batch kernels are faster. Raise
        SpecError for a padded batch, and for features that torch's kernel does not support."""
        if cu_seq_lens_q is None or query.shape[0] != 1:
            raise SpecError("optimizations.attention varlen does not support padding: turn on packing or padding_free")
        for name, feature in (("softcap", "softcapping"), ("dropout", "the model's attention dropout")):
            if kwargs.get(name):
                raise SpecError(f"optimizations.attention varlen does not support {feature}: use sdpa or eager")
        samples, sinks = cu_seq_lens_q.shape[0] - 1, kwargs.get("s_aux")
        whole = samples * max_length_q == query.shape[2]  # all samples have the maximum length
        if whole and not (sliding_window and sliding_window < max_length_q) and (cudnn or sinks is None):
            return _by_rows(samples, query, key, value, sinks, scaling), None
        if sinks is not None:
            window = sliding_window - 1 if sliding_window else -1
            given = (sinks, cu_seq_lens_q, max_length_q, scaling, window)
            return SinkAttention.apply(*_rows(query, key, value), *given)[None].to(query.dtype), None
        options: dict[str, Any] = {}
        if "window_size" in takes:
            options["window_size"] = (sliding_window - 1 if sliding_window else -1, 0)
        elif sliding_window:
            raise SpecError("optimizations.attention varlen: this torch version has no sliding window: use sdpa")
        else:
            options["is_causal"] = True
        groups = query.shape[1] // key.shape[1]
        if "enable_gqa" in takes:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if "scale" in takes:
            options["scale"] = scaling
        elif scaling is not None:  # this kernel always scales by 1 / sqrt(width)
            query = query * (scaling * query.shape[-1] ** 0.5)
        rows = _rows(query, key, value)
        out = kernel(*rows, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options)
        return out[None].to(query.dtype), None

    return varlen


def _half(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Convert float32 to bfloat16."""
    return [part.to(torch.bfloat16) if part.dtype == torch.float32 else part for part in parts]


def _rows(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Return each tensor (1, heads, tokens, head_dim) as (tokens, heads, head_dim), in 16 bits."""
    return [part.squeeze(0).transpose(0, 1) for part in _half(*parts)]  # part[0] would copy the gradient


def _by_rows(
    samples: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, scaling: float | None
) -> torch.Tensor:
    """Return the attention of `samples` samples of one length."""
    q, k, v = (part.squeeze(0).unflatten(1, (samples, -1)).transpose(0, 1) for part in (query, key, value))
    if sinks is not None:
        out = BatchedSinkAttention.apply(*_half(q, k, v), sinks, scaling).to(query.dtype)
    else:
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).reshape(1, query.shape[2], query.shape[1], -1)


def verify(model: Any, spec: Experiment) -> list[str]:
    kernel, used = spec.optimizations.attention, model.config.get_text_config()._attn_implementation
    if kernel in ("auto", used):
        return []
    return [f"optimizations.attention is {kernel} and {type(model).__name__} uses {used}"]
