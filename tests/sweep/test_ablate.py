"""`ftbench ablate`: order of runs and tables, with written runs, mock runs and one real ablation."""

from __future__ import annotations

import json
import math
import os

import pytest

import warm
from ftbench.core.rows import StepRow
from ftbench.report.data.collect import collect
from ftbench.spec import ablation
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.store import rundir
from ftbench.store.rundir import create_at, write_json
from ftbench.store.steps import StepsWriter
from ftbench.sweep.ablate import AblationPlan, AblationTables, _compared
from ftbench.sweep.plan.base import Options
from made_runs import make_run, steps
from sweeps import ENVIRONMENT, Folder, sweep, write_sweep

GPU = {"name": "a GPU", "memory_gb": 80.0, "memory_used_before_gb": 0.4, "foreign_processes": 0}
STEP_S = {"compile": 0.7, "chunked_loss": 0.9, "packing": 0.5, "padding_free": 0.8, "gradient_checkpointing": 1.3,
          "fp8": 0.8, "liger": 1.0, "fixed_shape": 1.1, "attention": 0.9}  # fmt: skip
PEAK = {"gradient_checkpointing": 0.5, "chunked_loss": 0.9, "liger": 0.8}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rundir.os, "fsync", lambda file: None)


def spec(repeats=2, **sections):
    values = {"name": "exp", "model": {"id": "tiny/qwen3", "weights": "random"}, "train": {"precision": "bf16"},
              "measure": {"repeats": repeats}}  # fmt: skip
    return ablation.plain_spec(Experiment.model_validate(values | sections))


def on(each):
    found = {name: value for name, value in each.spec.optimizations.model_dump().items()
             if value not in (False, "off", "auto")}  # fmt: skip
    return found | ({"fused": True} if each.spec.train.optimizer != "adamw_torch" else {})


def leave(each, loss=lambda step: 2.0, state="ok", step_s=STEP_S, norm=1.0, others=0.0):
    """Write a run whose speed and peak follow from its optimizations. Repeats differ by 0.1 %.

    `others` is the share of the host used by other processes.
    """
    run = create_at(each.run.path)
    write_json(run.spec_json, each.spec.model_dump(mode="json"))
    write_json(run.machine, {"gpu": GPU})
    order = "packed" if each.spec.optimizations.packing else "in order"
    write_json(run.applied, {"dataset": {"hash": order, "order_hash": order}})
    if state == "ok":
        seconds = math.prod(step_s.get(name, 1.0) for name in on(each)) * (1 + 0.001 * each.repeat)
        peak = 40 * math.prod(PEAK.get(name, 1.0) for name in on(each))
        writer = StepsWriter(run.steps)
        writer.append([
            StepRow(step=i, phase="train", elapsed_time_sec=i * seconds, real_tokens=400, label_tokens=400, samples=4,
                    step_time_s=seconds + (5.0 if i == 1 and "compile" in on(each) else 0.0), loss=loss(i),
                    grad_norm=norm, peak_memory_gb=peak, peak_reserved_gb=peak, host_cpu_by_others=others)
            for i in range(1, 21)
        ])  # fmt: skip
        writer.close()
    reason = {} if state == "ok" else {"reason": "the kernel broke"}
    write_json(run.state, {"schema": 1, "state": state, "wall_s": 60.0, **reason})


@pytest.fixture
def ablated(tmp_path):
    """Run an ablation to its end. Return the plan and the started runs."""

    def run(*only, outcome=lambda each: {}, repeats=2, **sections):
        plan = made(tmp_path, *only, repeats=repeats, **sections)
        started = []
        while (each := plan.next(lambda each: True)) is not None:
            started.append(f"{each.values['variant']} {each.repeat}")
            leave(each, **outcome(each))
            plan.ended(each)
        return plan, started

    return run


def made(folder, *only, repeats=2, **sections):
    return AblationPlan(
        spec(repeats, **sections), ablation.variants("adamw_torch", only),
        lambda found: "; ".join(incompatibilities(found)) or None,
        Options(folder / "exp", GPU["name"], ("recipe=plain",)),
    )  # fmt: skip


def table(plan, folder):
    """Return summary.md and the records of the variants by recipe."""
    folder.mkdir(exist_ok=True)
    tables = AblationTables(plan, list(plan.refused.items()))
    tables.write()
    return (folder / "summary.md").read_text(), {each["value"]: each for each in tables.document()["variants"]}


# --- order and comparison --------------------------------------------------------------------------------------------


def test_repeats_are_interleaved(ablated):
    _, started = ablated("compile", "chunked_loss")
    alone = ("plain", "chunked loss", "compile", "compile dynamic")
    assert started == [f"{name} {repeat}" for repeat in (1, 2) for name in alone]


def test_failing_variant_is_a_row_and_is_not_retried(ablated, tmp_path):
    plan, started = ablated(
        "liger", "chunked_loss", "fp8", outcome=lambda each: {"state": "error"} if "chunked_loss" in on(each) else {}
    )
    assert [name for name in started if name.startswith("chunked")] == ["chunked loss 1"]
    assert "error: the kernel broke" in table(plan, tmp_path / "exp")[0]
    again = made(tmp_path, "liger", "chunked_loss", "fp8")
    assert again.next(lambda each: pytest.fail(f"{each.what} is run again")) is None


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            {"loss": lambda step: 2.0 if step == 1 else math.nan},
            "not finite: the loss is not a number in 19 steps",
        ),
        ({"norm": math.nan}, "not finite: the gradient norm is not a number in 20 steps"),
    ],
)
def test_variant_with_nan_is_named(ablated, tmp_path, broken, said):
    plan, _ = ablated("liger", "chunked_loss", outcome=lambda each: broken if "chunked_loss" in on(each) else {})
    text, records = table(plan, tmp_path / "exp")
    assert said in text, text
    assert records["chunked loss"]["state"].startswith("not finite")


@pytest.mark.parametrize(
    ("outcome", "said"), [({"loss": lambda step: math.nan}, "not finite"), ({"state": "oom"}, "oom: the kernel broke")]
)
def test_plain_recipe_without_a_result_gives_no_comparison(ablated, tmp_path, outcome, said):
    plan, _ = ablated("chunked_loss", outcome=lambda each: {} if on(each) else outcome)
    text, records = table(plan, tmp_path / "exp")
    assert "the baseline failed" in text
    assert said in text
    assert records["chunked loss"]["speed_ratio"] is None


@pytest.mark.parametrize("busy", ["plain", "chunked loss"])
def test_contended_run_is_marked(ablated, tmp_path, busy):
    plan, _ = ablated("chunked_loss", outcome=lambda each: {"others": 0.8} if each.values["variant"] == busy else {})
    assert table(plan, tmp_path / "exp")[1][busy]["state"] == "ok, contended"


def test_intervals_are_corrected_for_the_number_of_variants(ablated, tmp_path):
    noisy = {"plain": 1.0, "chunked loss": 0.98}

    def outcome(each):
        base = noisy.get(each.values["variant"], 1.0)
        return {"step_s": dict.fromkeys(STEP_S, base * (1 + 0.002 * each.repeat))}

    def speed(plan):
        record = table(plan, tmp_path / "exp")[1]["chunked loss"]
        return record["speed_ratio"], record["speed_high"] - record["speed_low"]

    ratio, width = speed(ablated("chunked_loss", repeats=3, outcome=outcome)[0])
    many, _ = ablated("chunked_loss", "compile", "liger", "packing", "fp8", repeats=3, outcome=outcome)
    assert speed(many)[0] == pytest.approx(ratio)
    assert speed(many)[1] > 1.3 * width


def test_gain_of_single_runs_is_likely(ablated, tmp_path):
    plan, _ = ablated("chunked_loss", repeats=1)
    text, records = table(plan, tmp_path / "exp")
    assert records["chunked loss"]["speed_basis"] == "steps"
    assert "likely +11.1 %" in text


def test_impossible_variant_is_listed_and_not_run(ablated, tmp_path):
    plan, started = ablated("fp8", "chunked_loss", method={"name": "qlora"})
    assert not [name for name in started if "fp8" in name]
    assert "use lora" in plan.refused["compile + fp8 tensorwise"]
    assert "- compile + fp8 tensorwise: optimizations.fp8 needs" in table(plan, tmp_path / "exp")[0]


# --- the table -------------------------------------------------------------------------------------------------------


def test_row_of_a_variant(ablated, tmp_path):
    text, records = table(ablated("compile", "liger")[0], tmp_path / "exp")
    rows = {name: next(line for line in text.splitlines() if f"| {name} |" in line) for name in ("compile", "liger")}
    assert "| +42.9 % \\[" in rows["compile"]
    assert "| 5.70 s (+469.3 %) |" in rows["compile"]
    assert "| after step 17 |" in rows["compile"]
    assert "| ≈ +0.0 %" in rows["liger"]
    assert "| 32.0 (-20.0 %) |" in rows["liger"]
    assert records["plain"]["runs_ok"] == 2


# --- the command -----------------------------------------------------------------------------------------------------


def command(*arguments):
    done = warm.run(["ablate", *arguments], os.environ | ENVIRONMENT)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_command_runs_and_resumes(tmp_path):
    path, out = write_sweep(tmp_path), tmp_path / "out"
    asked = (path, "--out", out, "--only", "liger,chunked_loss,fp8", "--repeats", 1, "--steps", 8)
    planned = command(*asked, "--dry-run", "--json")
    assert [line["state"] for line in json.loads(planned.stdout)] == ["pending"] * 3 + ["impossible"] * 2
    assert not list(out.glob("*/*/state.json"))
    done = command(*asked, "--json")
    assert done.returncode == 0, done.stderr
    found, folder = json.loads(done.stdout), Folder(out)
    assert ([each["runs_ok"] for each in found["variants"]], found["left"]) == ([1] * 3, 0)
    assert "| chunked loss |" in folder.table()
    runs = folder.content()
    text = command(*asked)
    assert (text.returncode, folder.content()) == (0, runs)
    assert "launch.mock: nothing was trained" in text.stdout
    told = sweep(None, out, "--status", str(folder.path))
    assert told.code == 0
    assert f"{len(runs)} ok" in told.stdout


def test_crash_does_not_stop_the_ablation(tmp_path):
    path, out = write_sweep(tmp_path, launch={"mock": "flaky"}), tmp_path / "out"
    done = command(path, "--out", out, "--only", "liger", "--repeats", 2)
    assert done.returncode == 1
    assert sorted(Folder(out).told()) == ["error", "error"]  # repeat 2 is skipped
    assert "error: exit code 1 without a result" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "complie"], "did you mean compile?"),
        (["--only", ""], "--only : unknown optimization"),
        (["--repeats", "0"], "--repeats"),
        (["--steps", "0"], "--steps"),
        (["--time-budget", "soon"], "write it as 8h"),
        (["--set", "optimizations.compile=sometimes"], "must be on or off, dynamic or lean"),
        (["--set", "method=unslot"], "did you mean unsloth?"),
    ],
)
def test_invalid_arguments_create_nothing(ftbench, tmp_path, arguments, said):
    path = write_sweep(tmp_path)
    code, _, err = ftbench("ablate", path, "--out", tmp_path / "out", *arguments)
    assert (code, said in err) == (2, True), err
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@pytest.mark.slow
def test_real_ablation_on_the_cpu(tmp_path, cache):
    path = write_sweep(tmp_path, launch={"mock": "off"})
    done = command(path, "--out", tmp_path / "out", "--only", "chunked_loss", "--repeats", 1, "--steps", 20, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    plain, variant = found["variants"]
    assert variant["runs_ok"] == 1
    if variant["speed_ratio"] is not None:  # no other process disturbed the runs
        assert variant["speed_low"] < variant["speed_ratio"] < variant["speed_high"]
    assert plain["runs_ok"] == 1
    orders = {run["dataset.order_hash"] for run in found["runs"]}
    assert len(orders) == 1


@pytest.mark.parametrize(("card", "verdict"), [("GPU-aaaaaaaa", "higher"), ("GPU-bbbbbbbb", "not distinguishable")])
def test_gain_on_another_card_includes_the_spread_between_sittings(tmp_path, card, verdict):
    for number in (1, 2):
        make_run(tmp_path, f"a{number}", steps(seed=number), machine={"gpu.uuid": "GPU-aaaaaaaa"})
        rows = steps(seconds=0.985, seed=number + 2)
        make_run(tmp_path, f"b{number}", rows, spec={"optimizations.compile": True}, machine={"gpu.uuid": card})
    assert _compared(collect([tmp_path])).records[1]["speed_verdict"] == verdict
