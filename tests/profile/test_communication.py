"""What ranks send each other, against stretches laid by hand."""

import pytest
from gpu_traces import GEMM, GpuTrace

from ftbench.profile.communication import communication
from ftbench.profile.trace import read
from ftbench.profile.work import work_of

REDUCE, GATHER = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "ncclDevKernel_AllGather_RING_LL(...)"


def nccl(trace, name, begin, length, **args):
    trace.add("kernel", name, begin, length, 9, device=0, stream=9, correlation=0, **args)


@pytest.fixture
def two_steps(tmp_path):
    """Return two steps of 1 ms: a matmul from 100 to 500 µs, an all-reduce from 400 to 700, an all-gather from 650 to
    750. So 350 µs of communication, 100 µs of them during the matmul. Each kernel has the operator that started it.
    """
    trace = GpuTrace()
    for number, at in enumerate((0, 1000)):
        trace.step(number, at, 1000)
        trace.launch(GEMM, at + 90, at + 100, 400)
        trace.add("cpu_op", "c10d::allreduce_", at + 395, 4, 1)
        trace.add("cpu_op", "c10d::_allgather_base_", at + 645, 4, 1)
        nccl(trace, REDUCE, at + 400, 300, **{"Collective name": "allreduce", "In msg nelems": 250_000,
             "Out msg nelems": 250_000, "dtype": "Float"})  # fmt: skip
        nccl(trace, GATHER, at + 650, 100, **{"Collective name": "_allgather_base", "In msg nelems": 100_000,
             "Out msg nelems": 400_000, "dtype": "BFloat16"})  # fmt: skip
    return read(trace.write(tmp_path / "trace.json"))


def test_exposed_time_excludes_overlap(two_steps):
    found = communication(two_steps, work_of(two_steps), 4, None)
    assert found["total_ms"] == pytest.approx(2 * 0.35, abs=1e-4)
    assert found["exposed_ms"] == pytest.approx(2 * 0.25, abs=1e-4)
    assert found["overlap_share"] == pytest.approx(0.1 / 0.35, abs=1e-3)
    assert found["at_network_ms"] is None


def test_bytes_cross_a_ring_at_the_probed_rate(two_steps):
    """1 MB summed over four crosses each link 1.5 times; 800 kB gathered from four 0.75 times."""
    found = communication(two_steps, work_of(two_steps), 4, 100.0)
    rows = {row["kind"]: row for row in found["collectives"]}
    assert {kind: (row["calls"], row["bytes"]) for kind, row in rows.items()} == {
        "all-reduce": (2, 2_000_000), "all-gather": (2, 1_600_000),
    }  # fmt: skip
    assert rows["all-reduce"]["at_network_ms"] == pytest.approx(2 * 1.5e6 / 100e9 * 1e3)
    assert found["at_network_ms"] == pytest.approx((2 * 1.5e6 + 2 * 0.6e6) / 100e9 * 1e3)


def test_gloo_bytes_use_its_element_types(tmp_path):
    """Operators on lists of tensors lack a dtype, so it comes from gloo, unless gloo has two dtypes of that size."""
    trace = GpuTrace()
    trace.step(0, 0, 1000)
    for at, kind, count in (
        (100, "c10::BFloat16", 1000),
        (200, "float", 500),
        (300, "c10::BFloat16", 7),
        (400, "float", 7),
    ):
        sizes = {"Input Dims": [[[count]], [], []], "Input type": ["TensorList", "", "Scalar"]}
        trace.add("cpu_op", "c10d::allreduce_", at, 5, 1, **sizes)
        trace.add(
            "user_annotation", "gloo:all_reduce", at + 5, 50, 2, **{"Input Dims": [[count]], "Input type": [kind]}
        )
    sizes = {"Input Dims": [[2000], [1000], []], "Input type": ["long int", "long int", "Scalar"]}
    trace.add("cpu_op", "c10d::_allgather_base_", 600, 5, 1, **sizes)
    found = read(trace.write(tmp_path / "trace.json"))
    assert [each.size for each in found.collectives] == [2000, 2000, None, None, 16000]
    assert communication(found, work_of(found), 2, None)["collectives"][0] == {
        "kind": "all-gather", "calls": 1, "bytes": 16000, "at_network_ms": None,
    }  # fmt: skip


def test_single_rank_has_no_communication(tmp_path):
    trace = GpuTrace()
    trace.step(0, 0, 1000)
    trace.launch(GEMM, 90, 100, 400)
    found = read(trace.write(tmp_path / "trace.json"))
    assert communication(found, work_of(found), 1, None) is None
