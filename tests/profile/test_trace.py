import gzip
from pathlib import Path

import pytest
from gpu_traces import GEMM, training

from ftbench.profile import trace
from ftbench.profile.trace import TraceError, read

# One step of tiny/qwen3 with LoRA on a CPU, recorded by `ftbench profile --steps 1` with torch 2.13.
RECORDED = Path(__file__).parent / "traces" / "tiny-qwen3-lora-cpu.json.gz"


@pytest.fixture
def path(tmp_path):
    return training().write(tmp_path / "trace.json.gz")


def test_times_are_milliseconds_since_the_first_step(path):
    found = read(path)
    assert found.gpu == "NVIDIA H200"
    assert found.steps == [pytest.approx((0.0, 1.0), abs=1e-5), pytest.approx((1.0, 2.0), abs=1e-5)]
    gemm = next(kernel for kernel in found.kernels if kernel.name == GEMM)
    assert (gemm.begin, gemm.end) == pytest.approx((0.130, 0.430), abs=1e-5)
    assert [name for _, _, name in found.phases][:4] == ["data", "forward", "loss", "forward"]


def test_spans_of_a_thread_nest(path):
    (inner,) = [s for s in read(path).threads[4711] if s.name == "aten::mm" and s.begin < 1]
    assert inner.parent.name == "aten::linear"


def test_a_recorded_trace_is_read():
    found = read(RECORDED)
    assert len(found.steps) == 1
    assert not found.kernels
    assert [name for _, _, name in found.phases] == [
        "data", "forward", "loss", "forward", "metrics", "backward", "data", "clip", "data", "optimizer"
    ]  # fmt: skip
    assert any(span.backward and span.sequence for spans in found.threads.values() for span in spans)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"traceEvents": [', '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}',
     '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon"}]}'],
)  # fmt: skip
def test_invalid_trace_is_an_error(tmp_path, text):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(TraceError, match=r"trace\.json\.gz: .*profile again"):
        read(path)


def test_truncated_or_damaged_trace_is_an_error(path):
    packed = path.read_bytes()
    whole = gzip.decompress(packed)
    texts = (gzip.compress(whole[:length], 1) for length in range(0, len(whole) - 60, 3989))
    damaged = packed[:500] + b"\xff" * 100 + packed[600:]
    for content in (b"", packed[: len(packed) // 2], damaged, whole, *texts):
        path.write_bytes(content)
        with pytest.raises(TraceError):
            read(path)


def test_too_large_trace_is_an_error(path, monkeypatch):
    monkeypatch.setattr(trace, "MOST_BYTES", 1000)
    with pytest.raises(TraceError, match="--steps 1"):
        read(path)


def test_lost_kernels_are_an_error(tmp_path):
    path = tmp_path / "trace.json.gz"
    assert read(training(steps=120).without_kernels(0.001).write(path)).kernels
    for lost in (0.05, 1.0):
        with pytest.raises(TraceError, match=r"lost GPU work: [\d,]+ of 1,080 launches have a kernel; .*--steps 1"):
            read(training(steps=120).without_kernels(lost).write(path))
