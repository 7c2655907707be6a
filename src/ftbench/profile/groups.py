"""Classify kernels by name and, if the name is ambiguous, by the operator that launched them.

The patterns match the kernel names of libraries: cuBLAS (`nvjet_*`, `sm80_xmma_gemm_*`, `ampere_*gemm*`),
CUTLASS, cuDNN, PyTorch's own (`at::native::…`), Inductor's (`triton_poi_*` pointwise, `triton_red_*` and
`triton_per_*` reductions, `triton_tem_*` templates), flash-attention, xformers (`fmha_cutlass*`), bitsandbytes
(`kDequantizeBlockwise`), Liger, unsloth, NCCL.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from ftbench.core import rows

MATMUL, ATTENTION, NORM, QUANTISE = "matmul", "attention", "norm/elementwise", "quantise/dequantise"
OPTIMIZER, LOSS, COMMUNICATION, COPY, OTHER = "optimizer", "loss", "communication", "memory copy", "other"
GROUPS = (MATMUL, ATTENTION, NORM, QUANTISE, OPTIMIZER, LOSS, COMMUNICATION, COPY, OTHER)

# Names that are unambiguous. Attention comes before matmul because its kernels use CUTLASS too. The loss comes before
# quantization because its compiled kernels clamp and copy.
_UNAMBIGUOUS: tuple[tuple[str, str], ...] = (
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
# Kernels that any part of a step may launch. Their group depends on the caller.
_PLAIN = (
    r"elementwise|vectorized|unrolled|reduce|softmax|SoftMax|norm|rms|rope|rotary|silu|gelu|swiglu|geglu|_fg_kernel|"
    r"DWf_DW|dropout|copy|cat|Cat|fill|Fill|index|gather|scatter|embedding|where|mask|cumsum|scan|sort|topk|arange|"
    r"triton_(poi|red|per|for)|transpose|tril|triu|distribution|compare|(exact|approx)_(forward|backward)|_route|"
    r"_combine_(fwd|bwd)"
)
# The groups of operators, for ambiguous kernels and for CPU profiles.
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
_BY_PHASE = {rows.OPTIMIZER: OPTIMIZER, rows.CLIP: OPTIMIZER, rows.LOSS: LOSS, rows.METRICS: LOSS}
_CALLERS = (ATTENTION, QUANTISE, LOSS, OPTIMIZER)  # groups that include the plain kernels they launch


def group_of_kernel(name: str, operators: Iterable[str] = (), phase: str | None = None, in_loss: bool = False) -> str:
    """Return the group of a GPU kernel.

    Args:
        name: name of the kernel.
        operators: operators that were running at the launch, innermost first.
        phase: phase of the step.
        in_loss: whether the kernel computes the loss or its gradient.
    """
    if (group := _first(_UNAMBIGUOUS, name)) is not None:
        return group
    callers = _groups(operators)
    own = NORM if _search(_PLAIN, name) else next(iter(callers), OTHER)
    return _part(callers, phase, in_loss) or own


def group_of_operator(name: str, operators: Iterable[str] = (), phase: str | None = None, in_loss: bool = False) -> str:
    """Return the group of an operator's own time on a CPU. `operators` enclose it, innermost first."""
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


# --- short names -----------------------------------------------------------------------------------------------------

_FUNCTOR = re.compile(r"\b(?:\w*Functor\w*|\w+_kernel_cuda|\w+_kernel_impl|\w*Ops?\b(?=<)|direct_copy\w*|\w+Epilogue)")
_MAX_LETTERS = 72


def short(name: str) -> str:
    """Return a short kernel name, for example `vectorized_elementwise_kernel (CUDAFunctor_add)`.

    Long names without template arguments are cut in the middle.
    """
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    if "<" not in text:
        return _cut(text if text.startswith("Mem") else text.partition("(")[0])
    head = text.partition("<")[0].split("(")[0].rsplit("::", 1)[-1]
    inner = [functor for functor in dict.fromkeys(_FUNCTOR.findall(text.partition("<")[2])) if functor not in head]
    if head in ("Kernel", "Kernel2", "device_kernel", "kernel"):  # CUTLASS: only the template is informative
        inner = re.findall(r"cutlass\w*|flash\w*|Flash\w*|\w*[Gg]emm\w*|enable_\w+|f8f8\w*", text)[:2]
    return _cut(f"{head} ({inner[0]})" if inner else head)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 20]}…{text[-19:]}"
