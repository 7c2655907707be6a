"""Find the group, the operator and the phase of each kernel in a trace or, without a GPU, of each CPU operator.

The name of a kernel determines its group. If the name is ambiguous, the operator that launched the kernel decides. The
patterns match kernel names of these libraries: cuBLAS (`nvjet_*`, `sm80_xmma_gemm_*`, `ampere_*gemm*`), CUTLASS, cuDNN,
PyTorch (`at::native::…`), Inductor (`triton_poi_*` pointwise, `triton_red_*` and `triton_per_*` reductions,
`triton_tem_*` templates), flash-attention, xformers (`fmha_cutlass*`), bitsandbytes (`kDequantizeBlockwise`), Liger,
unsloth, NCCL.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ftbench.core import rows
from ftbench.profile.trace import Span, Trace

MATMUL, ATTENTION, NORM, QUANTISE = "matmul", "attention", "norm/elementwise", "quantise/dequantise"
OPTIMIZER, LOSS, COMMUNICATION, COPY, OTHER = "optimizer", "loss", "communication", "memory copy", "other"
GROUPS = (MATMUL, ATTENTION, NORM, QUANTISE, OPTIMIZER, LOSS, COMMUNICATION, COPY, OTHER)

_ONE_OPERATOR = r"^(?!triton_(poi|red|per|for)_).*"  # Inductor names those also after the operators before and after
# Unambiguous names. Attention comes before matmul, because attention kernels use CUTLASS too. The loss comes before
# quantization, because compiled loss kernels clamp and copy.
_UNAMBIGUOUS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl|all_?reduce_kernel|one_shot_all|two_shot_all|symm_mem"),
    (COPY, r"^Mem(cpy|set)\b"),
    (
        ATTENTION,
        rf"{_ONE_OPERATOR}(flash_(fwd|bwd)|flash_?attn|FlashAttn|fmha|sdpa|mem_eff|attention|_attn_(fwd|bwd)|"
        r"AttentionKernel|AttentionBackwardKernel|softmax_dropout|varlen_(fwd|bwd)|\b_lh_(fwd|bwd))",
    ),
    (
        LOSS,
        r"cross_?entropy|nll_?loss|LogSoftMax|log_softmax|liger_fused_linear|element_mul_kernel|entropy_from_logits|"
        r"^_fl_[a-z]|_cce_|vocab_parallel_ce|grpo_loss|kl_?div_kernel",
    ),
    (
        QUANTISE,
        r"k(Deq|Q)uantize(Blockwise)?\b|(de)?quantize_(blockwise|4bit|nf4)|quantize_\w*kernel|kgetColRowStats|kInt8VectorQuant|"
        r"per_?token_(group_)?quant|fp8_quant|cast_to_fp8|scale_transpose|_cast_layouts|dequant(_|ise)|act_quant|"
        r"triton_\w*_fused\w*(_scaled_mm|float8|fp8|_abs_\w*max|_to_copy\w*_clamp)",
    ),
    (
        OPTIMIZER,
        r"multi_tensor_apply|kOptimizer|kPreconditionOptimizer|kPercentileClipping|[Aa]dam|foreach|"
        r"_optimizer_(update|precondition)",
    ),
    (
        MATMUL,
        rf"{_ONE_OPERATOR}(nvjet|gemm(?!a)|gemv|cutlass|xmma|splitKreduce|cublas|wgmma|matmul|_mm_|_mm\b|"
        r"_bmm|_addmm|mmt?_kernel|grouped_mm|\bmarlin|conv(olve|2d|1d)|dot_kernel|triton_tem_fused|w8a8_block|_routed_|"
        r"grouped_(wgrad|kernel))",
    ),
)  # fmt: skip
# Kernels that any part of a step may launch. Their group depends on the caller.
_PLAIN = (
    r"elementwise|vectorized|unrolled|reduce|softmax|SoftMax|norm|rms|rope|rotary|silu|gelu|swiglu|geglu|_fg_kernel|"
    r"DWf_DW|dropout|copy|cat|Cat|fill|Fill|index|gather|scatter|embedding|where|mask|cumsum|scan|sort|topk|arange|"
    r"triton_(poi|red|per|for)|transpose|tril|triu|distribution|compare|(exact|approx)_(forward|backward)|_route|"
    r"_combine_(fwd|bwd)|_clamped_gate|_add_products"
)
# The groups of operators, for ambiguous kernels and for CPU profiles.
_OPERATORS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"^(c10d|nccl|gloo)\b|all_reduce|reduce_scatter|all_gather"),
    (ATTENTION, r"scaled_dot_product|flash_attn|flex_attention|varlen_attn|_efficient_attention"),
    (QUANTISE, r"bitsandbytes::|augmented_weight|dequantize|quantize_|torchao::|_scaled_cast|choose_qparams"),
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
_CALLERS = (ATTENTION, QUANTISE, LOSS, OPTIMIZER)  # operators of these groups include the plain kernels they launch


def group_of_kernel(name: str, operators: Iterable[str] = (), phase: str | None = None, in_loss: bool = False) -> str:
    """Return the group of a GPU kernel. `operators` were running at its launch, innermost first. `phase` is the phase
    of the step. `in_loss` means that the kernel computes the loss or its gradient."""
    return _first(_UNAMBIGUOUS, name) or _by_caller(operators, phase, in_loss, _first(((NORM, _PLAIN),), name))


def group_of_operator(name: str, operators: Iterable[str] = (), phase: str | None = None, in_loss: bool = False) -> str:
    """Return the group of an operator on a CPU. `operators` are the enclosing operators, innermost first."""
    group = _first(_OPERATORS, name)
    if group not in (None, NORM):
        return str(group)
    return _by_caller(operators, phase, in_loss, group or OTHER)


def _by_caller(operators: Iterable[str], phase: str | None, in_loss: bool, otherwise: str | None) -> str:
    """Return the group of ambiguous work. If its caller does not decide, return `otherwise` or, for None, the group of
    the innermost operator."""
    if phase in _BY_PHASE:
        return _BY_PHASE[phase]
    if in_loss:
        return LOSS
    callers = [group for operator in operators if (group := _first(_OPERATORS, operator)) is not None]
    return next((caller for caller in callers if caller in _CALLERS), otherwise) or next(iter(callers), OTHER)


@lru_cache(maxsize=65536)
def _first(rules: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((group for group, pattern in rules if re.search(pattern, name)), None)


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


# --- work of a trace ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A kernel on the GPU. If there is no GPU, it is a time interval in which a CPU operator ran its own code.

    `call` is 1 for a kernel and for the first interval of an operator call, otherwise 0: the sum is the number of
    calls. `begin` and `end` are in ms.
    """

    name: str
    group: str
    begin: float
    end: float
    phase: str
    call: int = 1


class PhaseSpans:
    """The phases of a step over time. Work of all threads belongs to the phase in which the work starts."""

    def __init__(self, phases: list[tuple[float, float, str]]) -> None:
        self._phases = phases
        self._begins = [begin for begin, _, _ in phases]

    def at(self, time: float) -> str:
        index = bisect_right(self._begins, time) - 1
        if index >= 0 and time <= self._phases[index][1]:
            return self._phases[index][2]
        return rows.OTHER

    def within(self, begin: float, end: float) -> Iterator[tuple[str, float]]:
        """Yield (phase, duration) for each phase that overlaps the interval. The duration is the overlap in ms."""
        for index in range(max(0, bisect_right(self._begins, begin) - 1), len(self._phases)):
            start, stop, name = self._phases[index]
            if start >= end:
                return
            if (length := min(stop, end) - max(start, begin)) > 0:
                yield name, length


def work_of(trace: Trace) -> list[DeviceWork]:
    """Return the work of a trace, sorted by start time: kernels and copies on a GPU, or operators on a CPU."""
    phases = PhaseSpans(trace.phases)
    loss = _loss_sequences(trace, phases)
    if trace.kernels:
        return list(_on_gpu(trace, phases, loss))
    operators = ([span for span in spans if span.kind == "op"] for spans in trace.threads.values())
    return sorted((work for spans in operators for work in _own_time(spans, phases, loss)), key=lambda work: work.begin)


def _on_gpu(trace: Trace, phases: PhaseSpans, loss: set[int]) -> Iterator[DeviceWork]:
    calls = {
        span.correlation: span for spans in trace.threads.values() for span in spans
        if span.kind == "call" and span.correlation
    }  # fmt: skip
    for kernel in trace.kernels:
        call = calls.get(kernel.correlation or 0)
        around = list(enclosing(call))
        phase = phases.at(call.begin) if call else rows.OTHER
        in_loss = any(span.backward and span.sequence in loss for span in around)
        group = group_of_kernel(kernel.name, (span.name for span in around), phase, in_loss)
        yield DeviceWork(kernel.name, group, kernel.begin, kernel.end, phase)


def _own_time(spans: list[Span], phases: PhaseSpans, loss: set[int]) -> Iterator[DeviceWork]:
    """Yield the intervals in which each operator ran. Leave out the time of the operators that it calls."""
    stack: list[Span] = []
    begun: set[int] = set()
    begin = 0.0

    def interval(until: float) -> Iterator[DeviceWork]:
        if stack and until > begin:
            span = stack[-1]
            around = list(enclosing(span))
            phase, first = phases.at(span.begin), id(span) not in begun
            begun.add(id(span))
            in_loss = any(each.backward and each.sequence in loss for each in (span, *around))
            group = group_of_operator(span.name, (each.name for each in around), phase, in_loss)
            yield DeviceWork(span.name, group, begin, until, phase, int(first))

    for span in spans:
        while stack and stack[-1].end <= span.begin:
            yield from interval(stack[-1].end)
            begin = max(begin, stack.pop().end)
        yield from interval(span.begin)
        stack.append(span)
        begin = span.begin
    while stack:
        yield from interval(stack[-1].end)
        begin = max(begin, stack.pop().end)


def enclosing(span: Span | None) -> Iterator[Span]:
    """Yield the spans that contain the given span, innermost first. Leave out driver calls."""
    while span is not None and (span := span.parent) is not None:
        if span.kind != "call":
            yield span


def _loss_sequences(trace: Trace, phases: PhaseSpans) -> set[int]:
    """Return the sequence numbers of the operators of the loss. Their backward operators have the same numbers."""
    return {
        span.sequence for spans in trace.threads.values() for span in spans
        if span.sequence is not None and not span.backward and phases.at(span.begin) == rows.LOSS
    }  # fmt: skip


def union(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the sorted union of intervals: merge overlapping ones, and cut them to the window `begin` to `end`."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        start, stop = max(start, begin), min(stop, end)
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def complement(busy: list[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the gaps between the sorted intervals `busy` in the window from `begin` to `end`."""
    edges = [begin, *(edge for interval in busy for edge in interval), end]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]
