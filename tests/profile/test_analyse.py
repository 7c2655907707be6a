import pytest
from gpu_traces import ADD, GEMM, GpuTrace, training
from test_trace import RECORDED

from ftbench.profile.analyse import analyse
from ftbench.profile.trace import read
from ftbench.profile.work import complement, union, work_of


@pytest.fixture
def document(tmp_path):
    """Two steps of 1 ms; in each the GPU copies for 10 µs and works from 130 to 550 µs and from 820 to 830."""
    found = read(training().write(tmp_path / "trace.json.gz"))
    return analyse(found, work_of(found), 0.8e-3)


def times(document):
    return {group["group"]: group["time_ms"] for group in document["groups"]}


def test_kernels_are_grouped_by_name_and_caller(document):
    assert times(document) == pytest.approx({
        "matmul": 0.6, "attention": 2 * 0.060, "norm/elementwise": 2 * 0.020, "loss": 2 * 0.040,
        "optimizer": 2 * 0.010, "memory copy": 2 * 0.010,
    }, abs=1e-4)  # fmt: skip
    assert sum(group["share"] for group in document["groups"]) == pytest.approx(1.0)
    assert document["covered_share"] == 1.0


def test_kernel_name_may_be_in_several_groups(document):
    by_group = {kernel["group"]: kernel for kernel in document["kernels"] if kernel["name"] == ADD}
    assert by_group["loss"]["calls"] == 4  # one in its forward pass and one in its backward pass, in each step
    assert by_group["norm/elementwise"]["calls"] == 4
    assert by_group["optimizer"]["calls"] == 2
    assert by_group["loss"]["mean_us"] == pytest.approx(10, abs=0.01)


def test_busy_share_counts_overlaps_once(document):
    assert document["window_ms"] == pytest.approx(2.0, abs=1e-4)
    assert document["busy_ms"] == pytest.approx(2 * 0.440, abs=1e-3)
    assert document["busy_share"] == pytest.approx(0.440, abs=1e-3)
    assert document["idle"]["ms"] == pytest.approx(2.0 - 0.880, abs=1e-3)


def test_busy_share_uses_the_steps_before(document):
    assert document["step_ms"] == {"profiled": pytest.approx(1.0, abs=1e-4), "before": 0.8}
    assert document["busy_share_unprofiled"] == pytest.approx(0.440 / 0.8, abs=1e-3)


def test_host_time_is_left_while_calls_wait_for_the_gpu(document, tmp_path):
    """One call of each step waits for 300 µs, the others take 2 µs. Waits of a thread without launches do not count."""
    assert document["host_waits_ms"] == pytest.approx(2 * 0.298, abs=1e-3)
    trace = training()
    trace.events = [event for event in trace.events if event["name"] != "cudaStreamSynchronize"]
    trace.add("cuda_runtime", "cudaEventSynchronize", 100, 900, 5000, correlation=8)
    found = read(trace.write(tmp_path / "busy.json"))
    assert analyse(found, work_of(found))["host_waits_ms"] == 0


def test_busy_share_is_unknown_without_the_steps_before(tmp_path):
    found = read(training().write(tmp_path / "trace.json.gz"))
    assert analyse(found, work_of(found))["busy_share_unprofiled"] is None


def test_phases_contain_the_work_launched_in_them(document):
    phases = {phase["phase"]: phase for phase in document["phases"]}
    assert phases["backward"]["device_ms"] == pytest.approx(2 * 0.020, abs=1e-4)
    assert phases["forward"]["device_ms"] == pytest.approx(2 * 0.370, abs=1e-3)
    assert phases["optimizer"]["cpu_ms"] == pytest.approx(2 * 0.2, abs=1e-3)
    assert sum(p["idle_ms"] for p in document["phases"]) == pytest.approx(document["idle"]["ms"], abs=1e-3)


def test_work_launched_before_the_trace_counts(tmp_path):
    made = training()
    made.add("kernel", GEMM, 900, 50, 7, correlation=1)
    found = read(made.write(tmp_path / "trace.json.gz"))
    assert {each.phase for each in work_of(found) if each.begin > 0.89 and each.begin < 0.91} == {"other"}


# --- recorded --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    return read(RECORDED)


def test_operators_are_the_work_on_a_cpu(recorded):
    found = analyse(recorded, work_of(recorded))
    assert (found["device"], found["gpu"], found["steps"]) == ("cpu", None, 1)
    assert found["covered_share"] >= 0.95
    assert {"matmul", "attention", "norm/elementwise", "optimizer", "loss"} <= times(found).keys()
    assert found["kernels"][0]["name"] == "aten::mm"


def test_own_times_add_up_to_busy_time(recorded):
    found = analyse(recorded, work_of(recorded))
    assert sum(times(found).values()) == pytest.approx(found["busy_ms"], rel=1e-6)
    assert found["busy_ms"] + found["idle"]["ms"] == pytest.approx(found["window_ms"], rel=1e-6)
    phases = sum(phase["cpu_ms"] for phase in found["phases"])
    assert phases == pytest.approx(found["window_ms"], rel=0.02)  # a step is its phases, end to end


def test_every_call_is_counted_once(recorded):
    work = work_of(recorded)
    ops = sum(span.kind == "op" for spans in recorded.threads.values() for span in spans)
    assert sum(each.call for each in work) == pytest.approx(ops, rel=0.02)  # very short operators are missing


# --- intervals -------------------------------------------------------------------------------------------------------


def test_union_and_complement_fill_the_window():
    busy = union([(3, 5), (-2, 1), (4, 6), (8, 30), (6, 6)], 0, 10)
    assert busy == [(0, 1), (3, 6), (8, 10)]
    assert complement(busy, 0, 10) == [(1, 3), (6, 8)]
    assert complement([], 0, 10) == [(0, 10)]


def test_exposed_communication_excludes_overlap(tmp_path):
    """Two steps of 1 ms: a matmul from 100 to 500 µs, an all-reduce from 400 to 700, an all-gather from 650 to 750."""
    trace = GpuTrace()
    for number, at in enumerate((0, 1000)):
        trace.step(number, at, 1000)
        trace.launch(GEMM, at + 90, at + 100, 400)
        for name, begin, length in (("AllReduce_Sum_f32", 400, 300), ("AllGather", 650, 100)):
            trace.add("kernel", f"ncclDevKernel_{name}_RING_LL(...)", at + begin, length, 9, device=0, correlation=0)
    found = read(trace.write(tmp_path / "trace.json.gz"))
    assert analyse(found, work_of(found))["communication"] == pytest.approx(
        {"total_ms": 0.7, "exposed_ms": 0.5, "overlap_share": 0.1 / 0.35}, abs=1e-3
    )


def test_single_rank_has_no_communication(document):
    assert document["communication"] is None
