import json

import pytest
from gpu_traces import training

from ftbench.errors import SpecError
from ftbench.profile import files
from ftbench.profile.analyse import analyse
from ftbench.profile.diff import as_text, diff
from ftbench.profile.trace import read
from ftbench.profile.work import work_of
from ftbench.report.compare.profiles import compared


def profile(tmp_path, name="trace.json", **made):
    found = read(training(**made).write(tmp_path / name))
    return analyse(found, work_of(found), 0.9e-3)


def group(found, name):
    return next(row for row in found["groups"] if row["group"] == name)


def test_the_difference_is_per_step_whatever_the_number_of_steps(tmp_path):
    found = diff(profile(tmp_path, steps=2), profile(tmp_path, steps=5))
    assert all(row["difference_ms"] == pytest.approx(0, abs=1e-4) for row in found["groups"])
    assert group(found, "loss")["a_calls"] == group(found, "loss")["b_calls"] == 3


def test_the_group_that_differs_has_all_of_the_difference(tmp_path):
    found = diff(profile(tmp_path), profile(tmp_path, matmul_us=150.0))
    row = found["groups"][0]
    assert row["group"] == "matmul"
    assert (row["a_ms"], row["b_ms"]) == pytest.approx((0.3, 0.15), abs=1e-4)
    assert row["difference_ms"] == pytest.approx(-0.15, abs=1e-4)
    assert row["ratio"] == pytest.approx(0.5, abs=1e-3)
    assert row["share_of_difference"] == pytest.approx(1.0, abs=1e-3)
    assert found["idle"]["difference_ms"] == pytest.approx(0.15, abs=1e-3)
    assert found["step"]["difference_ms"] == pytest.approx(0.0, abs=1e-3)


def test_kernels_of_one_side_are_named(tmp_path):
    other = training()
    for event in other.events:
        if event["cat"] == "kernel" and event["name"].startswith("nvjet"):
            event["name"] = "triton_tem_fused_mm_1"
    found = read(other.write(tmp_path / "other.json"))
    compared = diff(profile(tmp_path), analyse(found, work_of(found)))
    assert [kernel["name"][:5] for kernel in compared["only_a"]] == ["nvjet"]
    assert [(kernel["name"], kernel["ms"]) for kernel in compared["only_b"]] == [
        ("triton_tem_fused_mm_1", pytest.approx(0.3, abs=1e-4))
    ]
    assert group(compared, "matmul")["difference_ms"] == pytest.approx(0, abs=1e-4)


def test_a_group_of_one_side_has_no_ratio(tmp_path):
    b = profile(tmp_path)
    b["groups"] = [row for row in b["groups"] if row["group"] != "optimizer"]
    row = group(diff(profile(tmp_path), b), "optimizer")
    assert (row["b_ms"], row["ratio"], row["b_calls"]) == (None, None, None)
    assert row["difference_ms"] == pytest.approx(-0.010, abs=1e-4)


def test_another_gpu_is_said_to_be_another(tmp_path):
    a, b = profile(tmp_path), profile(tmp_path) | {"gpu": "NVIDIA H100 80GB HBM3"}
    assert "not the same GPU: NVIDIA H200 against NVIDIA H100 80GB HBM3" in as_text(diff(a, b), ("x", "y"))
    assert "not the same GPU" not in as_text(diff(a, a), ("x", "y"))


def test_the_table_has_every_group_and_the_rest_of_the_step(tmp_path):
    text = as_text(diff(profile(tmp_path), profile(tmp_path, matmul_us=100.0)), ("plain", "other"))
    named = [line.split()[0] for line in text.splitlines()[5:]]
    assert named[0] == "matmul"
    assert set(named[1:6]) == {"attention", "norm/elementwise", "loss", "optimizer", "memory"}
    assert named[6:] == ["all", "idle", "step"]
    assert "busy 44.0 % (48.9 % without the profiler)" in text


def test_the_table_says_operators_on_a_cpu_folds_its_head_and_knows_no_negative_zero(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    a, b = (profile(tmp_path, matmul_us=us) | {"device": "cpu"} for us in (1000.0, 100.0))
    next(row for row in b["groups"] if row["group"] == "optimizer")["time_ms"] += 1e-3
    text = as_text(diff(a, b), ("the-first-run-of-a-long-name-r1", "the-second-run-of-a-long-name-r1"))
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 80
    assert ["all operators" in text, "all kernels" in text, " -0 %" in text] == [True, False, False]


# --- where profiles are ----------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    """Two runs with profiles, and one without."""
    for name, matmul_us in (("a-r1", 300.0), ("b-r1", 100.0), ("c-r1", None)):
        folder = tmp_path / "exp" / name
        (folder / "profile").mkdir(parents=True)
        (folder / "state.json").write_text('{"state": "ok"}')
        if matmul_us:
            document = profile(tmp_path, matmul_us=matmul_us)
            (folder / "profile" / "kernels.json").write_text(json.dumps(document))
    return tmp_path / "exp"


@pytest.mark.parametrize("place", ["a-r1", "a-r1/profile"])
def test_a_profile_is_found_in_its_run_and_in_its_folder(runs, place):
    assert files.folder_of(runs / place) == runs / "a-r1" / "profile"


def test_two_runs_are_compared_by_name(runs):
    text = compared((runs / "a-r1", runs / "b-r1" / "profile"), None, as_json=False)
    assert text.startswith("A  a-r1: NVIDIA H200, 2 steps of 1.0 ms")
    assert "B  b-r1:" in text
    assert json.loads(compared((runs / "a-r1", runs / "b-r1"), None, as_json=True))["same_gpu"]


def test_what_differs_between_the_runs_is_told(runs):
    """Time that another batch, model or library takes is no gain of what was to be looked at."""
    for name, batch, torch in (("a-r1", 4, "2.9.1"), ("b-r1", 8, "2.10.0")):
        spec = {"model": {"id": "tiny/qwen3"}, "train": {"batch_size": batch}, "dataset": {"name": "sample"}}
        (runs / name / "spec.json").write_text(json.dumps({"method": {"name": "lora"}, **spec}))
        (runs / name / "machine.json").write_text(json.dumps({"versions": {"torch": torch}}))
    both = runs / "a-r1", runs / "b-r1"
    lines = compared(both, None, as_json=False).splitlines()
    assert lines[2:5] == ["differs  train.batch_size: 4 → 8", "differs  versions.torch: 2.9.1 → 2.10.0", ""]
    assert json.loads(compared(both, None, as_json=True))["differences"] == [
        {"key": "train.batch_size", "a": "4", "b": "8"}, {"key": "versions.torch", "a": "2.9.1", "b": "2.10.0"},
    ]  # fmt: skip
    assert "nothing differs" in compared((both[0], both[0]), None, as_json=False)


def test_without_their_specs_nothing_is_said_to_be_the_same(runs):
    both = runs / "a-r1", runs / "b-r1"
    assert "same spec is not known" in compared(both, None, as_json=False)
    assert json.loads(compared(both, None, as_json=True))["differences"] is None


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere", "no such file or directory"),
        ("c-r1", "holds no profile; `ftbench profile SPEC` makes one"),
        ("a-r1/state.json", "name the directory of a run that was profiled"),
        (".", "holds 2 profiles: name one run, for example"),
    ],
)
def test_what_is_no_profile_is_a_sentence(runs, place, said):
    with pytest.raises(SpecError, match=said):
        files.folder_of(runs / place)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "\xff", '{"groups": []}',
     '{"groups": {}, "kernels": [], "steps": 1, "window_ms": 1, "busy_share": 1}',
     '{"groups": [], "kernels": [], "steps": 0, "window_ms": 1, "busy_share": 1}',
     '{"groups": [], "kernels": [], "steps": 1, "window_ms": "1", "busy_share": 1}'],
)  # fmt: skip
def test_a_document_of_another_form_is_a_sentence(runs, text):
    (runs / "a-r1" / "profile" / "kernels.json").write_text(text)
    with pytest.raises(SpecError, match="is no profile that this ftbench can read"):
        files.load(runs / "a-r1" / "profile")
