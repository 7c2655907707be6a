"""`ftbench ablate`: order of runs, selection and tables, with written runs, mock runs and one real ablation."""

from __future__ import annotations

import json
import math
import os

import pytest

import warm
from ftbench.core.rows import StepRow
from ftbench.spec import ablation
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.load import load
from ftbench.spec.optimizations import Optimizations
from ftbench.store import rundir
from ftbench.store.rundir import create_at, write_json
from ftbench.store.steps import StepsWriter
from ftbench.sweep import ablate
from ftbench.sweep.output.ablation import AblationTables
from ftbench.sweep.plan.ablation import AblationPlan, Start
from ftbench.sweep.plan.base import Options
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

    def run(*only, outcome=lambda each: {}, objective="speed", repeats=2, **sections):
        plan = made(tmp_path, *only, objective=objective, repeats=repeats, **sections)
        started = []
        while (each := plan.next(lambda each: True)) is not None:
            started.append(f"{each.values['variant']} {each.repeat}")
            leave(each, **outcome(each))
            plan.ended(each)
        return plan, started

    return run


def made(folder, *only, objective="speed", repeats=2, **sections):
    start = Start(
        spec(repeats, **sections), ablation.variants("adamw_torch", only), objective,
        lambda found: "; ".join(incompatibilities(found)) or None, Optimizations(**sections.get("optimizations", {})),
    )  # fmt: skip
    return AblationPlan(start, Options(folder / "exp", GPU["name"], ("recipe=plain",)))


def table(plan, folder):
    folder.mkdir(exist_ok=True)
    return AblationTables(plan, list(plan.refused.items()))


# --- order and selection ---------------------------------------------------------------------------------------------


def test_repeats_are_interleaved_and_combinations_come_last(ablated):
    _, started = ablated("compile", "chunked_loss")
    alone = ("plain", "chunked loss", "compile", "compile dynamic")
    assert started[:8] == [f"{name} {repeat}" for repeat in (1, 2) for name in alone]
    assert started[8:] == ["compile + chunked loss 1", "compile + chunked loss 2"]  # dynamic is a value of compile


def test_helpful_variants_are_combined_best_first(ablated):
    plan, _ = ablated("packing", "chunked_loss", "fp8", "liger", "gradient_checkpointing")
    assert ablation.label(plan.best) == "packing + compile + fp8 tensorwise + chunked loss"
    kept = [each.name for each in plan.combinations if each.kept]
    assert kept == [
        "packing", "packing + compile + fp8 tensorwise", "packing + compile + fp8 tensorwise + chunked loss",
    ]  # fmt: skip
    tried = {each.variant.key for each in plan.combinations}
    assert "liger" not in tried  # within noise
    assert "gradient_checkpointing" not in tried  # slower


def test_objective_memory_selects_the_smallest_peak(ablated):
    plan, _ = ablated("packing", "chunked_loss", "liger", "gradient_checkpointing selective", objective="memory")
    assert ablation.label(plan.best) == "gradient checkpointing selective + liger + chunked loss"


def test_single_runs_are_compared_by_their_steps(ablated):
    plan, started = ablated("chunked_loss", "liger", repeats=1)
    assert started == ["plain 1", "chunked loss 1", "liger 1"]
    assert ablation.label(plan.best) == "chunked loss"
    assert plan.pair(plan.best, {}).speed.basis == "steps"


def test_incompatible_combination_is_not_run(ablated):
    plan, started = ablated("packing", "padding_free")
    (skipped,) = [each for each in plan.combinations if each.variant.key == "padding_free"]
    assert "set padding_free to off" in skipped.reason
    assert not [name for name in started if "packing + padding" in name]


def test_variant_is_tested_again_after_later_gains(ablated):
    def outcome(each):
        both = on(each).keys() >= {"packing", "chunked_loss", "compile"}
        bad = {"packing", "compile"} <= on(each).keys() and not both
        return {"step_s": STEP_S | ({"compile": 1.5} if bad else {})}

    plan, _ = ablated("packing", "compile", "chunked_loss", outcome=outcome)
    assert [each.kept for each in plan.combinations if each.variant.name == "compile"] == [False, True]
    assert set(plan.best) == {f"optimizations.{name}" for name in ("packing", "chunked_loss", "compile")}


def test_required_setting_is_kept_without_a_useless_variant(ablated):
    plan, _ = ablated("fixed_shape")
    assert ablation.label(plan.best) == "compile"


def test_failing_variant_is_a_row_and_is_not_retried(ablated, tmp_path):
    plan, started = ablated(
        "liger", "chunked_loss", "fp8", outcome=lambda each: {"state": "error"} if "chunked_loss" in on(each) else {}
    )
    assert [name for name in started if name.startswith("chunked")] == ["chunked loss 1"]
    assert ablation.label(plan.best) == "compile + fp8 tensorwise"
    text = table(plan, tmp_path / "exp").markdown()
    assert "error: the kernel broke" in text
    again = made(tmp_path, "liger", "chunked_loss", "fp8")
    assert again.next(lambda each: pytest.fail(f"{each.what} is run again")) is None


def test_variant_with_another_loss_is_flagged_and_not_kept(ablated, tmp_path):
    def outcome(each):
        return {"loss": lambda step: 2.1} if "chunked_loss" in on(each) else {}

    plan, _ = ablated("liger", "chunked_loss", "fp8", outcome=outcome)
    assert "optimizations.chunked_loss" not in plan.best
    found = table(plan, tmp_path / "exp")
    assert "DOES NOT FOLLOW (+5 %, allowed 1 %)" in found.markdown()
    assert "chunked loss does not learn the same as the plain recipe" in " ".join(found.variants().notes)
    (record,) = [each for each in found.document()["variants"] if each["name"] == "chunked loss"]
    assert (record["learning"], record["loss_tolerance"]) == ("does not follow", 0.01)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            {"loss": lambda step: 2.0 if step == 1 else math.nan},
            "the loss is not a number in 19 steps, first in step 2",
        ),
        ({"loss": lambda step: math.inf if step == 13 else 2.0}, "the loss is not a number in 1 step"),
        ({"norm": math.nan}, "gradient norm is not a number in 20 steps"),
    ],
)
@pytest.mark.parametrize("objective", ["speed", "memory"])
def test_variant_with_nan_is_not_kept(ablated, tmp_path, broken, said, objective):
    plan, _ = ablated("liger", "chunked_loss", outcome=lambda each: broken if "chunked_loss" in on(each) else {},
                      objective=objective)  # fmt: skip
    assert "optimizations.chunked_loss" not in plan.best
    found = table(plan, tmp_path / "exp")
    assert said in found.markdown(), found.markdown()
    (record,) = [each for each in found.document()["variants"] if each["name"] == "chunked loss"]
    assert record["learning"] == "not finite"


def test_plain_recipe_with_nan_gives_no_comparison(ablated, tmp_path):
    plan, _ = ablated("chunked_loss", outcome=lambda each: {} if on(each) else {"loss": lambda step: math.nan})
    assert (plan.best, plan.combinations) == ({}, [])
    assert "not finite" in table(plan, tmp_path / "exp").verdict("{}")[0]


def test_reordered_samples_are_compared_by_their_mean_loss(ablated, tmp_path):
    plan, _ = ablated("packing", outcome=lambda each: {"loss": lambda step: 2.5} if on(each) else {})
    assert plan.best == {}
    assert "packing does not learn the same as the plain recipe" in " ".join(
        table(plan, tmp_path / "exp").variants().notes
    )


@pytest.mark.parametrize("busy", ["plain", "chunked loss"])
def test_contended_run_is_marked_and_not_kept(ablated, tmp_path, busy):
    plan, _ = ablated("chunked_loss", outcome=lambda each: {"others": 0.8} if each.values["variant"] == busy else {})
    assert plan.best == {}
    text = table(plan, tmp_path / "exp").markdown()
    assert f"| {busy} |" in text
    assert ", contended" in next(line for line in text.splitlines() if line.startswith(f"| {busy} |"))
    smallest, _ = ablated("chunked_loss", objective="memory")
    assert smallest.best  # contention does not change a peak


def test_intervals_are_corrected_for_the_number_of_variants(ablated):
    noisy = {"plain": 1.0, "chunked loss": 0.98}

    def outcome(each):
        base = noisy.get(each.values["variant"], 1.0)
        return {"step_s": dict.fromkeys(STEP_S, base * (1 + 0.002 * each.repeat))}

    alone, _ = ablated("chunked_loss", repeats=3, outcome=outcome)
    width = alone.pair({"optimizations.chunked_loss": True}, {}).speed
    many, _ = ablated(repeats=3, outcome=outcome)
    wider = many.pair({"optimizations.chunked_loss": True}, {}).speed
    assert len(many.start.variants) > 15
    assert wider.value == pytest.approx(width.value)
    assert wider.high - wider.low > 1.5 * (width.high - width.low)


def test_gain_of_single_runs_is_likely(ablated, tmp_path):
    plan, _ = ablated("chunked_loss", repeats=1)
    text = table(plan, tmp_path / "exp").markdown()
    assert "likely +11.1 % [" in text
    assert "(likely: one run per side; use --repeats 3)" in text


def test_no_combination_without_a_plain_result(ablated, tmp_path):
    plan, _ = ablated("chunked_loss", outcome=lambda each: {"state": "oom"} if not on(each) else {})
    assert (plan.best, plan.combinations) == ({}, [])
    assert "the kernel broke" in table(plan, tmp_path / "exp").verdict("{}")[0]


def test_resumed_ablation_repeats_no_run(ablated, tmp_path):
    first, _ = ablated("packing", "chunked_loss", "compile")
    again = made(tmp_path, "packing", "chunked_loss", "compile")
    assert again.next(lambda each: pytest.fail(f"{each.what} is run again")) is None
    assert (again.best, again.combinations) == (first.best, first.combinations)


def test_combinations_wait_for_all_variants(tmp_path):
    plan = made(tmp_path, "chunked_loss")
    first = plan.next(lambda each: True)
    leave(first)
    plan.ended(first)
    assert plan.next(lambda each: False) is None  # the time budget is used up
    assert plan.combinations == []
    assert "3 runs left before combinations are tested" in table(plan, tmp_path / "exp").markdown()


def test_impossible_variant_is_listed_and_not_run(ablated, tmp_path):
    plan, started = ablated("fp8", "chunked_loss", method={"name": "qlora"})
    assert not [name for name in started if "fp8" in name]
    assert "use lora" in plan.refused["compile + fp8 tensorwise"]
    assert "- compile + fp8 tensorwise: optimizations.fp8 needs" in table(plan, tmp_path / "exp").markdown()


# --- the table -------------------------------------------------------------------------------------------------------


def test_row_of_a_variant(ablated, tmp_path):
    plan, _ = ablated("compile", "liger")
    rows = {row[0]: dict(zip(found.headings, row, strict=True)) for found in [table(plan, tmp_path / "exp").variants()]
            for row in found.rows}  # fmt: skip
    assert rows["compile"]["Δ speed"].startswith("+42.9 % [")
    assert rows["compile"]["first step (Δ)"] == "5.70 s (+469.3 %)"
    assert rows["compile"]["break-even"] == "after step 17"
    assert rows["liger"]["Δ speed"].startswith("≈ +0.0 %")
    assert rows["liger"]["peak GiB (Δ)"] == "32.0 (-8.00, -20.0 %)"
    assert rows["liger"]["Δ loss"] == "inconclusive (0 %), gradient norm 0 %"


def test_best_combination_is_written_as_a_spec(ablated, tmp_path):
    plan, _ = ablated("packing", "chunked_loss", "optimizer", optimizations={"liger": True})
    source, best = tmp_path / "spec.yaml", tmp_path / "deep" / "best.yaml"
    best.parent.mkdir()
    source.write_text("name: exp\nmodel: {id: tiny/qwen3, weights: random}\noptimizations: {liger: on}\n")
    request = ablate.AblationRequest(source, ["train.precision=bf16"])
    ablate.write_best(request, table(plan, tmp_path / "exp"), best)
    wanted = ablation.with_changes(plan.start.spec, plan.best)
    found = load(best, ["name=exp"])
    assert (found.optimizations, found.train, found.model) == (wanted.optimizations, wanted.train, wanted.model)
    on, off = [f"  {key.partition('.')[2]}: on" for key in plan.best if key != "train.optimizer"], ["  liger: off"]
    said = best.read_text().partition("optimizations:\n")[2].splitlines()
    assert sorted(said) == sorted([*on, *off * ("optimizations.liger" not in plan.best)])


# --- the command -----------------------------------------------------------------------------------------------------


def command(*arguments):
    done = warm.run(["ablate", *arguments], os.environ | ENVIRONMENT)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_command_runs_resumes_and_writes_the_best(tmp_path):
    path, out, best = write_sweep(tmp_path), tmp_path / "out", tmp_path / "best.yaml"
    asked = (path, "--out", out, "--only", "liger,chunked_loss,fp8", "--repeats", 1, "--steps", 8, "-o", best)
    planned = command(*asked, "--dry-run", "--json")
    assert [line["state"] for line in json.loads(planned.stdout)] == ["pending"] * 4 + ["impossible"] * 3
    assert not list(out.glob("*/*/state.json"))
    done = command(*asked, "--json")
    assert done.returncode == 0, done.stderr
    found, folder = json.loads(done.stdout), Folder(out)
    assert found["best"]["changes"] == {
        "optimizations.compile": True, "optimizations.liger": True, "optimizations.chunked_loss": True,
    }  # fmt: skip
    assert (found["plain"]["runs_ok"], found["left"], len(found["variants"])) == (1, 0, 6)
    assert load(best).optimizations.liger
    assert "Best for speed: compile + liger + chunked loss" in (folder.path / "ablation.md").read_text()
    runs = folder.content()
    text = command(*asked[:-2])
    assert (text.returncode, folder.content()) == (0, runs)
    assert "\noptimizations:\n  compile: on\n  liger: on\n  chunked_loss: on\n" in text.stdout
    told = sweep(None, out, "--status", str(folder.path))
    assert told.code == 0
    assert f"{len(runs)} ok" in told.stdout


def test_crash_does_not_stop_the_ablation(tmp_path):
    path, out = write_sweep(tmp_path, launch={"mock": "flaky"}), tmp_path / "out"
    done = command(path, "--out", out, "--only", "liger", "--repeats", 2)
    assert done.returncode == 1
    assert sorted(Folder(out).told()) == ["error", "error"]  # repeat 2 is skipped
    assert "The plain recipe has no result (error" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "complie"], "did you mean compile?"),
        (["--only", ""], "--only : unknown optimization"),
        (["--goal", "cheap"], "'cheap' is not a goal (allowed: speed, memory"),
        (["--repeats", "0"], "--repeats"),
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--time-budget", "soon"], "write it as 8h"),
        (["-o", "."], "-o .: is a directory"),
        (["-o", "nowhere/best.yaml"], "the folder does not exist"),
        (["-o", "SPEC"], "is the spec itself"),
        (["--set", "optimizations.compile=sometimes"], "must be on, off, dynamic or lean"),
        (["--set", "method=unslot"], "did you mean unsloth?"),
    ],
)
def test_invalid_arguments_create_nothing(ftbench, tmp_path, arguments, said):
    path = write_sweep(tmp_path)
    values = (str(path) if value == "SPEC" else value for value in arguments)
    code, _, err = ftbench("ablate", path, "--out", tmp_path / "out", *values)
    assert (code, said in err) == (2, True), err
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@pytest.mark.slow
def test_real_ablation_on_the_cpu(tmp_path, cache):
    path = write_sweep(tmp_path, launch={"mock": "off"})
    done = command(path, "--out", tmp_path / "out", "--only", "chunked_loss", "--repeats", 1, "--steps", 20, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (variant,) = found["variants"]
    assert (variant["loss_tolerance"], variant["runs_ok"]) == (0.01, 1)
    assert variant["learning"] in ("follows", "inconclusive")
    if variant["speed_ratio"] is not None:  # no other process disturbed the runs
        assert variant["speed_low"] < variant["speed_ratio"] < variant["speed_high"]
    assert found["plain"]["runs_ok"] == 1
    orders = {run["dataset"]["order_hash"] for run in found["runs"]}
    assert len(orders) == 1
