"""What a kernel does, told by its name, and where the name says too little by who launched it.

The names are those that the libraries give their kernels: cuBLAS (`nvjet_*`, `sm80_xmma_gemm_*`, `ampere_*gemm*`),
CUTLASS, cuDNN, PyTorch's own (`at::native::…`), Inductor's (`triton_poi_*` pointwise, `triton_red_*` and
`triton_per_*` reductions, `triton_tem_*` templates), flash-attention, xformers (`fmha_cutlass*`), bitsandbytes
(`kDequantizeBlockwise`), Liger, unsloth, NCCL.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from ftbench.core import phases

MATMUL, ATTENTION, NORM, QUANTISE = "matmul", "attention", "norm/elementwise", "quantise/dequantise"
OPTIMIZER, LOSS, COMMUNICATION, COPY, OTHER = "optimizer", "loss", "communication", "memory copy", "other"
GROUPS = (MATMUL, ATTENTION, NORM, QUANTISE, OPTIMIZER, LOSS, COMMUNICATION, COPY, OTHER)

# What no context changes, in this order: attention before matmul, because its kernels are built from CUTLASS too; the
# loss before casts, because its compiled kernels clamp and copy.
_SURE: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl|all_?reduce_kernel|one_shot_all|two_shot_all|symm_mem"),
    (COPY, r"^Mem(cpy|set)\b"),
    (
        ATTENTION,
        r"flash_(fwd|bwd)|flash_?attn|FlashAttn|fmha|sdpa|mem_eff|attention|_attn_(fwd|bwd)|AttentionKernel|"
        r"AttentionBackwardKernel|softmax_dropout|varlen_(fwd|bwd)|^_lh_(fwd|bwd)",
    ),
    (
        LOSS,
        r"cross_?entropy|nll_?loss|LogSoftMax|log_softmax|liger_fused_linear|element_mul_kernel|entropy_from_logits|"
        r"^_fl_[a-z]|_cce_|vocab_parallel_ce|grpo_loss|kl_?div_kernel",
    ),
    (
        QUANTISE,
        r"k(Deq|Q)uantize(Blockwise)?\b|(de)?quantize_(blockwise|4bit|nf4)|quantize_\w*kernel|kgetColRowStats|kInt8VectorQuant|"
        r"per_?token_(group_)?quant|fp8_quant|cast_to_fp8|scale_transpose|dequant_|act_quant|"
        r"triton_\w*_fused\w*(_scaled_mm|float8|fp8|_abs_\w*max|_to_copy\w*_clamp)",
    ),
    (
        OPTIMIZER,
        r"multi_tensor_apply|kOptimizer|kPreconditionOptimizer|kPercentileClipping|[Aa]dam|foreach|"
        r"_optimizer_(update|precondition)",
    ),
    (
        MATMUL,
        r"nvjet|gemm(?!a)|gemv|cutlass|xmma|splitKreduce|cublas|wgmma|matmul|_mm_|_mm\b|_bmm|_addmm|mmt?_kernel|"
        r"grouped_mm|\bmarlin|conv(olve|2d|1d)|dot_kernel|triton_tem_fused|w8a8_block|_routed_|grouped_(wgrad|kernel)",
    ),
)  # fmt: skip
# Kernels that any part of a step may launch: what they belong to is told by their caller.
_PLAIN = (
    r"elementwise|vectorized|unrolled|reduce|softmax|SoftMax|norm|rms|rope|rotary|silu|gelu|swiglu|geglu|_fg_kernel|"
    r"DWf_DW|dropout|copy|cat|Cat|fill|Fill|index|gather|scatter|embedding|where|mask|cumsum|scan|sort|topk|arange|"
    r"triton_(poi|red|per|for)|transpose|tril|triu|distribution|compare|(exact|approx)_(forward|backward)|_route|"
    r"_combine_(fwd|bwd)"
)
# What an operator is where it launches a kernel without a telling name, and on a machine that has no kernels.
_OPERATORS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"^(c10d|nccl|gloo)\b|all_reduce|reduce_scatter|all_gather"),
    (ATTENTION, r"scaled_dot_product|flash_attn|flex_attention|varlen_attn|_efficient_attention"),
    (QUANTISE, r"bitsandbytes::|dequantize|quantize_|torchao::|_scaled_cast|choose_qparams"),
    (OPTIMIZER, r"_foreach_|_fused_adam|Optimizer\.step"),
    (LOSS, r"cross_?entropy|nll_loss|log_?softmax|LogSoftmax|NllLoss|CrossEntropy|fused_ce_loss|LMLoss"),
    (
        MATMUL,
        r"^aten::(_?scaled_)?(mm|addmm|bmm|baddbmm|matmul|linear|mv|addmv|dot|einsum|_?grouped_mm|_scaled_mm|"
        r"mkldnn_linear|_mkl_linear|addbmm)$|mkldnn_|onednn|_weight_int4pack_mm|gemm",
    ),
    (COPY, r"^Mem(cpy|set)\b|pin_memory"),
    (NORM, r"^aten::|^triton_|^prims::|^liger|Backward\d*$|AccumulateGrad"),
)  # fmt: skip
_BY_PHASE = {phases.OPTIMIZER: OPTIMIZER, phases.CLIP: OPTIMIZER, phases.LOSS: LOSS, phases.METRICS: LOSS}
_CALLERS = (ATTENTION, QUANTISE, LOSS, OPTIMIZER)  # whose plain kernels are part of them


def group_of_kernel(name: str, operators: Iterable[str] = (), phase: str | None = None, in_loss: bool = False) -> str:
    """Return the group of a GPU kernel. `operators` are those that were running when it was launched, innermost first;
    `phase` is the part of the step; `in_loss` says that it computes the loss or a gradient of it."""
    if (sure := _first(_SURE, name)) is not None:
        return sure
    callers = _groups(operators)
    own = NORM if _search(_PLAIN, name) else next(iter(callers), OTHER)
    return _part(callers, phase, in_loss) or own


def group_of_operator(name: str, operators: Iterable[str] = (), phase: str | None = None, in_loss: bool = False) -> str:
    """Return the group of an operator's own time on a CPU; `operators` are those around it, innermost first."""
    own = _first(_OPERATORS, name)
    if own not in (None, NORM):
        return str(own)
    return _part(_groups(operators), phase, in_loss) or own or OTHER


def _groups(operators: Iterable[str]) -> list[str]:
    return [group for operator in operators if (group := _first(_OPERATORS, operator)) is not None]


def _part(callers: list[str], phase: str | None, in_loss: bool) -> str | None:
    if phase in _BY_PHASE:
        return _BY_PHASE[phase]
    if in_loss:
        return LOSS
    return next((caller for caller in callers if caller in _CALLERS), None)


@lru_cache(maxsize=65536)
def _first(rules: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((group for group, pattern in rules if _search(pattern, name)), None)


@lru_cache(maxsize=65536)
def _search(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None
