"""`ftbench report NEW --against OLD`: exit code 1 for a regression, 0 otherwise, 2 for invalid options."""

from __future__ import annotations

import json

import pytest

from ftbench.report.compare.gate import gate, limit_of
from ftbench.report.data.collect import collect
from made_runs import H200, MAX_Q, OOM, RESULTS, make_run, method, steps


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Use a wide terminal."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def against(tmp_path, ftbench):
    """Return a function that runs the gate on two lists of make_run arguments, and returns exit code and output."""

    def call(old, new, *options):
        for side, runs in (("old", old), ("new", new)):
            for number, (rows, more) in enumerate(runs):
                make_run(tmp_path / side, f"r{number}", rows, **more)
        code, out, err = ftbench("report", tmp_path / "new", "--against", tmp_path / "old", *options)
        assert err == ""
        return code, out

    return call


def run(seconds=1.0, seed=0, count=30, state=None, **more):
    peak = more.pop("peak", 77.0)
    return steps(count, seconds, seed=seed, peak_memory_gb=peak), {"state": state, **more}


def test_contended_run_is_not_judged(against):
    busy = steps(30, 2.0, seed=2, host_cpu_by_others=0.8), {}
    code, out = against([run(seed=1)], [busy])
    assert code == 0
    assert "it shared the machine with other work (contended)" in out
    assert "0 of 1 regressed by more than 5.0 %; the speed of 1 was not compared\n" in out


def test_earlier_run_with_the_same_power_limit_is_preferred(against):
    held = {"machine": {"gpu.power_limit_w": 500.0}}
    code, out = against([run(1.0, seed=1, **held), run(0.7, seed=2)], [run(1.01, seed=3, **held)])
    assert (code, "power limit:" in out) == (0, False)


def test_another_power_limit_is_used_and_listed(against):
    code, out = against([run(1.0, seed=1)], [run(1.2, seed=3, machine={"gpu.power_limit_w": 500.0})])
    assert code == 1
    assert "power limit: 700 W of 700 W → 500 W of 700 W" in out


@pytest.mark.parametrize(("seconds", "code"), [(1.03, 0), (1.08, 1), (0.5, 0)])
def test_slower_than_the_limit_fails(against, seconds, code):
    found, out = against([run(seed=1)], [run(seconds, seed=2)])
    assert found == code
    assert ("slower: likely -7" in out) is bool(code)
    assert out.startswith(f"against earlier runs: {code} of 1 regressed by more than 5.0 %\n")


def test_limit_can_be_set(against):
    assert against([run(seed=1)], [run(1.08, seed=2)], "--fail-above", "10%")[0] == 0


def test_the_page_of_a_comparison_has_no_title_about_speed(tmp_path, against):
    against([run()], [run(seed=1)], "--format", "html", "-o", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "Against earlier runs" in text
    assert "without a valid speed" not in text


def test_slower_within_the_noise_of_the_repeats_passes(against):
    old = [run(seconds, seed=i) for i, seconds in enumerate((1.0, 1.2, 0.9))]
    new = [run(seconds, seed=i) for i, seconds in enumerate((1.1, 1.3, 1.0))]
    code, out = against(old, new)
    assert code == 0
    assert "≈" in out


def test_slower_with_unknown_noise_fails(against):
    code, out = against([run(count=4)], [run(1.5, count=4)])
    assert code == 1
    assert "the noise is unknown" in " ".join(out.split())


@pytest.mark.parametrize(("peak", "code"), [(79.0, 0), (82.0, 1), (40.0, 0)])
def test_more_memory_fails(against, peak, code):
    found, out = against([run(seed=1)], [run(seed=2, peak=peak)])
    assert found == code
    assert ("more memory: 77.0 → 82.0 GiB" in " ".join(out.split())) is bool(code)


def test_new_out_of_memory_is_a_regression(against):
    old = [run(), run(spec=method("full"), state=OOM)]
    new = [run(state=OOM, count=1), run(spec=method("full"), state=OOM, count=1)]
    code, out = against(old, new)
    assert code == 1
    assert "1 of 2 regressed" in out
    assert "succeeded before, now oom" in " ".join(out.split())


def test_unpaired_cells_are_listed(against):
    old = [run(), run(spec={"train.batch_size": 8})]
    new = [run(), run(spec={"train.batch_size": 16})]
    code, out = against(old, new)
    text = " ".join(out.split())
    assert code == 0
    assert "no earlier run: r1 (plain at batch 16" in text
    assert "not run again: r1 (plain at batch 8" in text


def test_another_gpu_is_not_paired(against, tmp_path, ftbench):
    make_run(tmp_path / "old", "a", machine={"gpu.name": H200})
    make_run(tmp_path / "new", "a", machine={"gpu.name": MAX_Q})
    code, out, err = ftbench("report", tmp_path / "new", "--against", tmp_path / "old")
    assert (code, out) == (2, "")
    assert "no spec and GPU in common" in err


def test_changes_are_listed(against):
    _, out = against([run(seed=1)], [run(seed=2, machine={"versions.torch": "2.12.0"})])
    assert "#1 differs: versions.torch: 2.11.0 → 2.12.0" in " ".join(out.split())


def of_tokens(tokens, seconds, seed):
    return run(seconds, seed, applied={"dataset.hash": tokens})


def test_run_is_paired_by_its_tokens(against):
    """Runs before and after an edit of the data file are both paired."""
    code, out = against([of_tokens("one", 1.0, 1), of_tokens("another", 2.0, 2)], [of_tokens("one", 2.0, 3)])
    assert (code, "slower" in out, "not run again: r1" in out) == (1, True, True)


def test_other_tokens_are_paired_by_spec(against):
    code, out = against([of_tokens("one", 1.0, 1)], [of_tokens("third", 2.0, 2)])
    assert (code, "the tokens of the data set" in out) == (1, True)


def test_json_contains_the_rows(against):
    code, out = against([run(seed=1)], [run(2.0, seed=2)], "--format", "json")
    _, row = json.loads(out)["gate"]["records"]
    assert (code, row["value"]) == (1, "new")
    assert row["speed_ratio"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("text", "limit"), [("5 %", 0.05), ("0.05", 0.05), ("0", 0.0)])
def test_limit_is_a_share(text, limit):
    assert limit_of(text) == pytest.approx(limit)


@pytest.mark.parametrize("text", ["five", "-5%", "5", "nan"])
def test_invalid_limits_are_errors(tmp_path, ftbench, text):
    make_run(tmp_path, "a")
    code, out, err = ftbench("report", tmp_path, "--against", tmp_path, "--fail-above", text)
    assert (code, out) == (2, "")
    assert "write a share below 100 %" in err


@pytest.mark.parametrize("options", [["--compare", "method"], ["--against", "nowhere"]])
def test_invalid_options_are_errors(tmp_path, ftbench, options):
    make_run(tmp_path, "a")
    code, out, err = ftbench("report", tmp_path, "--against", tmp_path, *options)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_committed_runs_pass_against_themselves():
    records = collect([RESULTS / "grid"])
    section, regressed = gate(records, records, 0.05)
    assert (regressed, section.records[1]["value"]) == ({}, "new")
    assert len(section.records) > 40
    assert not any("no earlier run" in note or "not run again" in note for note in section.table.notes)


@pytest.mark.parametrize("before", [lambda step: 2.0 + 1.0 / step, float("nan")])
def test_nan_loss_fails_at_any_speed(against, before):
    old = steps(seed=1, loss=before), {}
    new = steps(seconds=0.5, seed=2, loss=lambda step: float("nan") if step > 1 else 3.0), {}
    code, out = against([old], [new])
    assert code == 1
    assert "not finite" in " ".join(out.split())


@pytest.mark.parametrize(("before", "code"), [(None, 1), (OOM, 0)])
def test_failed_repeat_fails_if_no_earlier_repeat_failed(against, before, code):
    broken = {"state": "error", "reason": "a kernel broke"}
    old = [run(seed=1), run(seed=2, state=before)]
    assert against(old, [run(seed=3), run(seed=4, state=broken)])[0] == code


def test_gate_shows_the_number_of_runs_and_the_side(ftbench, tmp_path):
    for side, count in (("old", 2), ("new", 3)):
        for repeat in range(count):
            make_run(tmp_path / side, f"a-r{repeat}", steps(seed=f"{side}{repeat}"))
    out = ftbench("report", tmp_path / "new", "--against", tmp_path / "old")[1]
    heading = next(line for line in out.splitlines() if line.startswith("#"))
    assert {"runs", "side"} <= set(heading.split())
