"""`ftbench parity`: correct recipes pass, damaged ones fail at a level that names the cause, and a check whose controls
pass gives no verdict."""

from __future__ import annotations

import json
import math

import pytest

import parity_runs
from ftbench.report.data import facts
from ftbench.spec.batches import packed as rows_of
from ftbench.spec.batches import synthetic_lengths
from ftbench.spec.experiment import GRADED, Experiment, resolve
from ftbench.store import rundir
from ftbench.sweep import verdict
from ftbench.sweep.parity import ParityRequest, ParityTables, prepare
from ftbench.sweep.parity_records import FAIL, INCONCLUSIVE, PASS, Training
from ftbench.sweep.plan import parity as plan_module
from ftbench.sweep.plan.base import FAILED, JobStatus
from ftbench.sweep.plan.parity import PENDING, UNPROVEN, Contender, _is_refused
from parity_runs import contender, plan_of


@pytest.fixture(scope="module")
def processes(cache):
    """The processes that train."""
    pytest.importorskip("torch", reason="training libraries are not installed")
    with parity_runs.pool(2) as pool:
        yield pool
    parity_runs.pool.cache_clear()


@pytest.fixture(scope="module")
def learned(processes, tmp_path_factory):
    """A tiny trained model."""
    return processes.submit(parity_runs.learn, tmp_path_factory.mktemp("learned")).result()


# One control for each way to damage a run (worker/measure/controls.py).
SOME = ("projection_frozen", "learning_rate_x1.5", "frozen_weights_noise", "positions_zero", "attention_off",
        "loss_over_padding", "packed_samples_see_each_other", "accumulation_divisor")  # fmt: skip


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("graded", [SOME, pytest.param(GRADED, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_honest_variants_pass_and_all_controls_are_caught(processes, learned, tmp_path, monkeypatch, graded):
    monkeypatch.setattr(plan_module, "GRADED", graded)
    (padded, packed), damages = parity_runs.honest(learned, variants=parity_runs.COMBINED)
    plan = plan_of(tmp_path, packed, every_control=True)
    parity_runs.run_all(plan, damages)
    results = {each.name: each for each in plan.controls(packed)}
    assert {*results} == {*graded, "lora_scale_x1.05", "gradient_entries_lost", "layer_gradient_reversed"}
    assert [each for each in results.values() if each.state != "caught"] == []
    tables = ParityTables(plan, [])
    tables.write()
    document = json.loads((tmp_path / "parity.json").read_text())
    assert document["recipes"][0]["levels"]["training"]["state"] == PASS
    assert "| packing, compile, chunked loss, checkpointing" in (tmp_path / "summary.md").read_text()
    again = plan_of(tmp_path, packed, every_control=True)  # the verdict comes from files
    assert (again.left(), again.judgements()) == (0, plan.judgements())
    short = plan_of(tmp_path, padded, seeds=0)  # its training would be another three runs
    (job,) = short.pending()
    run = (job.spec.model_dump_json(), job.run.path, damages[padded.name])
    processes.submit(parity_runs.train, *run).result()
    short.ended(job)
    assert [each for each in (*plan.judgements(), *short.judgements()) if each.verdict != PASS] == []
    dead = plan.record_of(plan.plain(packed), packed, "projection_frozen")
    recorded = plan._recorded
    monkeypatch.setattr(plan, "_recorded", lambda recipe, record: recorded(recipe, dead))
    assert next(tables.lines()).startswith("packing, compile, chunked loss, checkpointing: fail: v_proj (")


def only(plan, wanted):
    """Skip the other runs."""
    plan.statuses |= {each: JobStatus("skipped") for each in plan.pending() if each not in wanted}


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_other_bugs_are_caught(learned, tmp_path):
    bugs = [contender(learned, name, 50 + at) for at, name in enumerate(parity_runs.BUGS)]
    plan = plan_of(tmp_path, *bugs)
    wanted = {plan.train(bugs[0].reference, 0), plan.record_of(bugs[0].reference, bugs[0])}
    wanted |= {plan.record_of(each.spec, each) for each in bugs}
    only(plan, wanted)
    parity_runs.run_all(plan, {name: name for name in parity_runs.BUGS})
    found = {each.name: plan._recorded(each, plan.record_of(each.spec, each)) for each in bugs}
    assert {name: levels for name, levels in found.items() if FAIL not in [level.state for level in levels]} == {}


@pytest.mark.torch
def test_broken_images_are_caught(processes, tmp_path):
    """Packed rows of generated pictures pass; pictures of another sample and a dead projector do not."""
    on = {"packing": True, "fixed_shape": True, "chunked_loss": True, "fused_lora": True}
    bugs = ["", "pictures_of_another_sample", "projector_frozen"]
    recipes = [
        tiny(name or "packed", base=PICTURES, train=PICTURES["train"] | {"seed": at}, optimizations=on)
        for at, name in enumerate(bugs)
    ]
    plan = plan_of(tmp_path, *recipes)
    records = [plan.record_of(each.spec, each) for each in recipes]
    wanted = [plan.train(recipes[0].reference, 0), plan.record_of(recipes[0].reference, recipes[0]), *records]
    only(plan, wanted)
    parity_runs.run_all(plan, dict(zip(bugs, bugs, strict=True)))
    found = [[level.state for level in plan._recorded(*each)] for each in zip(recipes, records, strict=True)]
    assert found == [[PASS, PASS], [FAIL, FAIL], [FAIL, FAIL]]
    assert "multi_modal_projector.linear_1.lora_B" in plan._recorded(recipes[2], records[2])[1].sentence


@pytest.mark.torch
@pytest.mark.exhaustive
def test_fp8_is_compared_with_products_that_are_rounded_without_its_kernels(processes, tmp_path):
    short = {"batch_size": 4, "max_steps": 8, "learning_rate": 4e-3}
    recipe, half = (
        tiny(
            name, base={"train": short}, train=short | {"precision": "bf16", "seed": seed},
            model={"id": "tiny/qwen3", "weights": "random", "dtype": "bfloat16"}, optimizations={"fp8": "tensorwise"},
        )
        for seed, name in enumerate(("fp8", "half"))
    )  # fmt: skip
    plan = plan_of(tmp_path, recipe, half, seeds=0)
    parity_runs.run_all(plan, {"half": "half_the_gradient_of_one_layer"})
    plain = [plan.record_of(each, recipe) for each in plan.plains(recipe)]
    assert [each.spec.measure.round_products for each in plain] == [True] * 3
    losses = [plan.agreement(recipe, each)["losses"]["initial before"][1] for each in plain]
    assert min(map(math.dist, losses, losses[1:])) > 0  # each scale rounds in another way
    assert [each.verdict for each in plan.judgements()] == [PASS, FAIL], plan.judgements()
    assert "not training" in plan.judgements()[0].reason
    assert [each.state for each in plan.controls(recipe)] == ["caught", "caught"]
    assert "layer 1" in plan.judgements()[1].reason


@pytest.mark.parametrize(
    ("model", "others"),
    [
        ("tiny/qwen3", [("auto", False)]),
        ("tiny/qwen3-moe", [("auto", False), ("auto", True), ("eager", False)]),
        ("tiny/gpt-oss", [("auto", False), ("auto", True)]),
    ],
)
def test_experts_are_compared_with_plain_runs_that_round_in_other_ways(tmp_path, model, others):
    about, train = {"id": model, "weights": "random"}, {"batch_size": 8, "precision": "bf16"}
    recipe = tiny(base={"model": about}, model=about | {"dtype": "bfloat16"}, train=train)
    plan = plan_of(tmp_path, recipe, seeds=0)
    plain = [plan.record_of(each, recipe).spec for each in plan.plains(recipe)]
    assert [(each.optimizations.attention, each.optimizations.compile) for each in plain] == others
    assert {each.train.precision for each in plain} == {"bf16"}
    assert plan.controls_of(recipe)[0][0] == ("lora_scale_x1.5" if others[1:] else "lora_scale_x1.05")
    exact = tiny(base={"model": about}, model=about | {"dtype": "float32"}, train=train | {"precision": "fp32"})
    assert plan.plains(exact) == []
    assert plan.controls_of(exact)[0][0] == "lora_scale_x1.05"


def test_with_a_graph_plain_training_rounds_the_same_micro_batches_to_8_bits(tmp_path):
    shapes = []
    for graph in (True, False):
        on = {"fp8": "tensorwise", "cuda_graph": graph, "packing": True, "fixed_shape": True, "chunked_loss": True}
        model = {"id": "tiny/qwen3", "weights": "random", "dtype": "bfloat16"}
        train = {"batch_size": 4, "max_steps": 8}
        recipe = tiny("fp8", base={"train": train}, model=model, optimizations=on, train=train | {"precision": "bf16"})
        plan = plan_of(tmp_path, recipe, seeds=0)
        spec = plan.record_of(plan.plain(recipe), recipe).spec
        shapes.append((spec.train.batch_size, spec.train.gradient_accumulation_steps, spec.dataset.samples))
    assert shapes == [(9, 1, 9), (4, 9, 9)]


# --- the levels, on numbers -------------------------------------------------------------------------------------------


def spec_in(precision: str, **sections) -> Experiment:
    values = {"name": "a", "model": {"id": "tiny/qwen3", "weights": "random"}, "dataset": {"name": "sample"}}
    capability = None if precision == "fp32" else (9, 0)
    return resolve(Experiment.model_validate({**values, **sections}), capability)


def record(loss=0.0, direction=0.0, norm=0.0, problems=(), **tensors):
    """An agreement.json of four layers with two projections, all with the same errors but for those named."""
    names = [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in range(4) for name in ("up", "down")]
    rows = [["trained", change, name, *tensors.get(name.split(".")[-2] + name.split(".")[2], (direction, norm))]
            for change in ("gradient", "step", "steps") for name in names]  # fmt: skip
    losses = {"initial before": [[1.0, 2.0], [1.0 + loss, 2.0 - loss]]}
    return {"problems": list(problems), "losses": losses, "tensors": rows}


BF16 = record(loss=0.01, direction=0.02, norm=0.001)


@pytest.mark.parametrize(
    ("mine", "states"),
    [
        (record(loss=0.019, direction=0.039, norm=0.002), (PASS, PASS)),
        (record(loss=0.021), (FAIL, PASS)),
        (record(direction=0.041), (PASS, FAIL)),
        (record(up_proj2=(0.07, 0.0)), (PASS, PASS)),  # a single tensor may have four times the error
        (record(up_proj2=(0.081, 0.0)), (PASS, FAIL)),
        (record(norm=0.05), (PASS, FAIL)),
        (record(problems=["v_proj has no gradient at trained weights"]), (PASS, FAIL)),
        (record(problems=["its tokens or labels differ"]), (FAIL, FAIL)),
    ],
)
def test_rounding_recipe_may_have_twice_the_error_of_plain_bfloat16(mine, states):
    spec = spec_in("bf16")
    assert verdict.kinds(spec) == ("16 bits",)
    found = verdict.forward(mine, [BF16], spec), verdict.gradient(mine, [BF16], spec)
    assert tuple(level.state for level in found) == states


def test_a_scaled_weight_change_fails_even_if_rounding_changes_its_direction():
    adam, scaled = (record(direction=0.3, norm=norm) for norm in (0.001, 0.03))
    assert verdict.gradient(adam, [adam], spec_in("bf16")).state == PASS
    assert verdict.gradient(scaled, [adam], spec_in("bf16")).state == FAIL


@pytest.mark.parametrize(("norm", "state"), [(0.025, PASS), (0.029, FAIL)])
def test_limit_of_a_module_depends_on_the_norm_errors_of_this_module(norm, state):
    """The root mean square of plain bfloat16 is 0.014 in up_proj, and 0.01 over all tensors."""
    plain = record(up_proj2=(0.0, 0.02), up_proj3=(0.0, -0.02))
    mine = record(**{f"up_proj{layer}": (0.0, norm) for layer in range(4)})
    assert verdict.gradient(mine, [plain], spec_in("bf16")).state == state


def test_the_errors_of_three_plain_runs_are_combined():
    """The root mean square is 0.058 for losses and 0.012 for norms. The median direction error is that of BF16."""
    plain, spec = [BF16, record(loss=0.1, direction=0.2, norm=0.02), BF16], spec_in("bf16")
    for passes, loss, direction, norm in [(True, 0.115, 0.039, 0.023), (False, 0.118, 0.041, 0.025)]:
        assert (verdict.forward(record(loss=loss), plain, spec).state == PASS) is passes
        assert (verdict.gradient(record(direction=direction), plain, spec).state == PASS) is passes
        assert (verdict.gradient(record(norm=norm), plain, spec).state == PASS) is passes


def test_weights_that_plain_bfloat16_does_not_change_either_may_stay_the_same():
    still = BF16 | {"problems": ["norm has no weight change at initial weights"]}
    assert verdict.gradient(still, [still], spec_in("bf16")).state == PASS
    assert verdict.gradient(still, [BF16], spec_in("bf16")).state == FAIL
    assert verdict.gradient(still, [BF16, still], spec_in("bf16")).state == FAIL


def test_yardstick_without_finite_numbers_is_inconclusive():
    empty = record() | {"tensors": [], "losses": {}}
    assert verdict.gradient(record() | {"tensors": []}, [empty], spec_in("fp32")).state == INCONCLUSIVE
    for level in (verdict.forward, verdict.gradient):
        assert level(BF16, [BF16, empty], spec_in("bf16")).state == INCONCLUSIVE
        found = level(BF16, [empty], spec_in("bf16"))
        assert (found.state, "plain bfloat16 has no finite" in found.sentence) == (INCONCLUSIVE, True)


def test_each_kind_of_number_has_its_budget():
    assert verdict.kinds(spec_in("fp32")) == ("float32",)
    assert verdict.kinds(spec_in("bf16", method={"name": "qlora"})) == ("4-bit weights",)
    eight = spec_in("bf16", optimizations={"fp8": "tensorwise"}, train={"optimizer": "paged_adamw_8bit"})
    assert verdict.kinds(eight) == ("8-bit products", "8-bit optimizer states")
    rounded = [record(loss=0.1, direction=0.1, norm=0.05)]
    assert verdict.gradient(record(direction=0.19, norm=0.09), rounded, eight).state == PASS
    assert verdict.gradient(record(direction=0.21), rounded, eight).state == FAIL
    assert verdict.forward(record(loss=0.21), rounded, eight).state == FAIL
    assert verdict.forward(record(loss=1e-3), [], spec_in("fp32")).state == FAIL
    assert all(budget.source for budget in verdict.BUDGETS.values())


@pytest.mark.parametrize(
    ("rounding", "error", "state"), [(0.02, 0.24, PASS), (0.02, 0.26, FAIL), (0.3, 0.59, PASS), (0.3, 0.61, FAIL)]
)
def test_weight_changes_with_8_bit_states_have_a_budget_or_twice_the_error_of_plain(rounding, error, state):
    spec = spec_in("bf16", train={"optimizer": "paged_adamw_8bit"})
    mine = record()
    mine["tensors"] = [[*row[:3], error, 0.0] for row in mine["tensors"] if row[1] == "step"]
    assert verdict.gradient(mine, [record(direction=rounding)], spec).state == state


@pytest.mark.parametrize(
    ("candidate", "untrained", "state"),
    [
        ([2.01, 2.02, 2.00], 4.0, PASS),
        ([2.2, 2.21, 2.19], 4.0, FAIL),
        ([1.8, 1.81, 1.79], 4.0, FAIL),  # better is different too
        ([2.0, 2.3, 1.9], 4.0, INCONCLUSIVE),
        ([2.0, float("nan"), 2.0], 4.0, FAIL),
        ([2.0, 2.01, 1.99], 2.01, INCONCLUSIVE),  # nothing was learned
        ([2.0, 2.01, 1.99], None, INCONCLUSIVE),
        ([2.0, 2.01, 1.99], 2.07, INCONCLUSIVE),  # a margin of 29 % of what was learned
    ],
)
def test_held_out_losses_are_equivalent_within_the_margin(candidate, untrained, state):
    result = verdict.training([2.0, 2.01, 1.99], candidate, untrained, 100)
    assert result.state == state, result
    if state == PASS:
        assert result.limit == pytest.approx(0.05 * (4.0 - 2.0))


@pytest.mark.parametrize(("candidate", "caught"), [([2.0, 2.3, 1.9], False), ([2.6, 3.9, 2.1], True)])
def test_wide_interval_does_not_catch_a_control(candidate, caught):
    found = verdict.training([2.0, 2.01, 1.99], candidate, 4.0, 100)
    assert (found.state, _is_refused(found)) == (INCONCLUSIVE, caught)


# --- the plan ---------------------------------------------------------------------------------------------------------


PICTURES = {
    "model": {"id": "tiny/llava-next", "weights": "random"},
    "method": {"name": "lora", "projector": "lora"}, "train": {"batch_size": 4, "max_steps": 12, "learning_rate": 4e-3},
    "dataset": {"name": "images", "structure": "tasks", "image_size": [56, 56], "image_sizes": "photographs",
                "samples": 48, "mean_length": 12, "max_length": 160, "eval_samples": 8},
}  # fmt: skip


def tiny(name="recipe", refused=None, base=None, **sections) -> Contender:
    values = {
        "name": "learning", "model": {"id": "tiny/qwen3", "weights": "random"}, "method": {"name": "lora"},
        "dataset": {**parity_runs.TASKS, "samples": 480, "eval_samples": 16},
        "train": {"batch_size": 8, "max_steps": 60},
    }  # fmt: skip
    values |= base or {}
    spec = resolve(Experiment.model_validate({**values, **sections}), None)
    plain = resolve(Experiment.model_validate(values), None)
    return Contender(name, spec, parity_runs._reference(plain, spec), (), refused)


def test_plan_resumes_and_shares_the_runs_of_the_reference(tmp_path):
    chunked = tiny("chunked", optimizations={"chunked_loss": True})
    first = plan_of(tmp_path, chunked)
    assert first.left() == 14
    assert plan_of(tmp_path, chunked, seeds=0).left() == 5
    both = plan_of(tmp_path, chunked, tiny("packed", optimizations={"packing": True}))
    assert both.left() == 14 + 1 + 3
    job = first.next(lambda job: True)
    assert job.spec.measure.keep_weights
    rundir.create_at(job.run.path)
    rundir.write_json(job.run.state, {"state": "ok"})
    again = plan_of(tmp_path, chunked)
    assert again.left() == 13
    assert [each.verdict for each in again.judgements()] == [PENDING]
    tables = ParityTables(again, [])
    tables.write()
    assert json.loads((tmp_path / "parity.json").read_text())["passed"] is False


def test_runs_that_record_gradients_of_many_samples_fit_into_the_time_of_a_short_training(tmp_path):
    """In a time budget of 60 s, after a training of 40 s: most of this time was the start."""
    short = {**BF16_CHUNKED, "train": {"batch_size": 8, "max_steps": 10, "precision": "bf16"}}
    plan = plan_of(tmp_path, tiny("chunked", **short, base={"train": short["train"]}))
    plan.record(plan.next(lambda _: True), JobStatus("ok", wall_s=40.0))
    assert plan.next(lambda each: plan.wall_times.at_most_s(each) < 60).values["run"] == "gradients"


def test_packed_rows_train_as_many_samples_as_padded_ones(tmp_path):
    packed = tiny("packed", optimizations={"packing": True})
    plan = plan_of(tmp_path, packed)
    spec = plan.train(packed.spec, 0, packed).spec
    lengths = synthetic_lengths(spec.dataset, 480)
    assert lengths == synthetic_lengths(packed.spec.dataset, 480)
    assert abs(len(rows_of(lengths, spec.dataset.max_length)) / spec.train.batch_size - 60) < 3
    long = packed.spec.model_copy(update={"dataset": packed.spec.dataset.model_copy(update={"max_length": 2048})})
    spec = plan.train(long, 0, packed).spec
    assert spec.train.batch_size == 1
    assert 75 < spec.dataset.max_length < 125


def ended(folder, monkeypatch, *recipes, failed=(), same=True):
    """A plan whose runs are all over, those of the recipes named in `failed` without memory, and all alike."""
    plan = plan_of(folder, *recipes)
    for job in plan.statuses:
        rundir.create_at(job.run.path)
        broken = job.values["recipe"].partition(":")[0] in failed
        rundir.write_json(job.run.state, {"state": "oom", "reason": "out of memory"} if broken else {"state": "ok"})
        plan.ended(job)
    if same:
        monkeypatch.setattr(plan, "agreement", lambda *_: record())
        monkeypatch.setattr(Training, "read", classmethod(lambda cls, run: Training(2.0, 240.0, ())))
    return plan


CHUNKED = {"optimizations": {"chunked_loss": True}}
BF16_CHUNKED = {**CHUNKED, "train": {"batch_size": 8, "max_steps": 60, "precision": "bf16"}}


@pytest.mark.parametrize(
    ("sections", "failed", "found", "cause"),
    [
        (CHUNKED, "chunked", FAIL, "chunked, gradients: out of memory"),
        (CHUNKED, "reference", INCONCLUSIVE, "reference, gradients: out of memory"),
        (BF16_CHUNKED, "plain", INCONCLUSIVE, "plain, gradients: out of memory"),
        (BF16_CHUNKED, "", INCONCLUSIVE, "the reference learned 0 nats"),
    ],
)
def test_run_that_failed_decides_by_its_role(tmp_path, monkeypatch, sections, failed, found, cause):
    plan = ended(tmp_path, monkeypatch, tiny("chunked", **sections), tiny("fp8", "needs a GPU"), failed=[failed])
    judged, refused = plan.judgements()
    assert (judged.verdict, cause in judged.reason) == (found, True), judged
    assert (refused.verdict, refused.reason) == (FAIL, "needs a GPU")
    assert not plan.passed()


@pytest.mark.parametrize(
    ("failed", "cause"), [((), "lora_scale_x1.05, gradient_entries_lost"), (["control"], "without this control")]
)
def test_control_that_passes_or_does_not_end_means_no_verdict(tmp_path, monkeypatch, failed, cause):
    recipe = tiny("chunked", **CHUNKED)
    plan = ended(tmp_path, monkeypatch, recipe, failed=failed)
    monkeypatch.setattr(plan, "_trained", lambda *_: verdict.LevelResult("training", PASS, ""))
    (found,) = plan.judgements()
    assert (found.verdict, cause in found.reason) == (UNPROVEN, True), found
    assert not any(each.state == "caught" for each in plan.controls(recipe))


@pytest.mark.parametrize("state", ["ok", "not finite"])
def test_exit_code_is_that_of_the_recipes_and_not_of_the_controls(tmp_path, monkeypatch, state):
    recipe = tiny("chunked", **CHUNKED)
    plan = ended(tmp_path, monkeypatch, recipe)
    monkeypatch.setattr(plan, "agreement", lambda _, job: record(loss=float("control" in job.values["recipe"])))
    for job in plan.statuses:
        if job.values["recipe"].startswith("control"):
            rundir.write_json(job.run.state, {"state": state})
            plan.ended(job)
    monkeypatch.setattr(plan, "controls_of", lambda _: [("lora_scale_x1.05", "forward")])
    monkeypatch.setattr(plan, "_trained", lambda *_: verdict.LevelResult("training", PASS, ""))
    failed = any(status.state in FAILED for status in plan.statuses.values())
    assert (failed, plan.passed()) == (state != "ok", True)
    assert [ParityTables(plan, []).exit_code(code) for code in (int(failed), 130)] == [0, 130]


def test_training_control_is_not_caught_by_its_learning_rate(tmp_path, monkeypatch):
    """The held-out losses of a control must show its damage. Those of a control with the same losses do not."""
    base = {"method": {"name": "full"}, "train": {"batch_size": 8, "max_steps": 60}}
    recipe = tiny("chunked", base=base, **CHUNKED)
    plan = ended(tmp_path, monkeypatch, recipe)
    controls = {job.run.run_id: job.spec.measure.control for job in plan.statuses}

    def read(cls, run):
        control = controls[run.run_id]
        loss = 4.0 if control == "learning_rate_0" else 2.0
        return Training(loss, 240.0, (1.1e-3 if control.startswith("learning_rate_x") else 1e-3,))

    monkeypatch.setattr(Training, "read", classmethod(read))
    assert [each.state for each in plan.controls(recipe) if each.level == "training"] == ["missed"]


def test_agreement_is_read_again_after_a_new_run(tmp_path, monkeypatch):
    recipe = tiny("chunked", **CHUNKED)
    plan = ended(tmp_path, monkeypatch, recipe, same=False)
    job = plan.record_of(recipe.spec, recipe)
    assert plan.agreement(recipe, job)["problems"] == ["the run recorded no gradients"]
    rundir.write_json(job.run.agreement, plan.agreement(recipe, job) | {"problems": ["kept"]})
    assert plan_of(tmp_path, recipe).agreement(recipe, job)["problems"] == ["kept"]
    for run in (job.run, plan.record_of(recipe.reference, recipe).run):
        rundir.write_json(job.run.agreement, plan.agreement(recipe, job) | {"problems": ["kept"]})
        rundir.write_json(run.state, {"state": "ok", "ended_at": "2026-01-01T00:00:00Z"})
        assert plan_of(tmp_path, recipe).agreement(recipe, job)["problems"] == ["the run recorded no gradients"]


def test_runs_of_another_commit_or_of_modified_files_are_named(tmp_path, monkeypatch):
    recipe = tiny("chunked", **CHUNKED)
    plan = ended(tmp_path, monkeypatch, recipe)
    for number, job in enumerate(plan.statuses):
        rundir.write_json(job.run.machine, {"ftbench": {"commit": "a" * 40 + ("-dirty" if number else "")}})
        rundir.write_json(job.run.applied, {"optimizer": {}})
    monkeypatch.setenv("FTBENCH_COMMIT", "b" * 40)
    said = [*ParityTables(plan, []).lines()]
    assert "commit aaaaaaaaaaaa and aaaaaaaaaaaa-dirty," in said[1]
    assert said[2].startswith("the source is now bbbbbbbbbbbb,")
    assert facts.machine_facts(plan.record_of(recipe.spec, recipe).run)["commit"] == "aaaaaaaaaaaa-dirty"


def test_training_with_another_schedule_or_size_is_not_compared():
    plain = Training(2.0, 240.0, (1e-3, 5e-4))
    assert plain.difference(Training(2.0, 230.0, (1e-3, 5e-4))) is None
    state, sentence = plain.difference(Training(2.0, 240.0, (1e-3, 1e-3)))
    assert (state, sentence) == (FAIL, "its learning rate in step 2 is 0.001, and plain's is 0.0005")
    assert plain.difference(Training(2.0, 100.0, (1e-3, 5e-4)))[0] == INCONCLUSIVE


# --- the command ------------------------------------------------------------------------------------------------------

SPEC = {
    "name": "learning", "model": {"id": "tiny/qwen3", "weights": "random"}, "method": "lora",
    "dataset": {**parity_runs.TASKS, "samples": 480, "eval_samples": 16}, "train": {"batch_size": 8, "max_steps": 60},
    "optimizations": {"chunked_loss": True},
}  # fmt: skip


@pytest.mark.torch
def test_command_lists_its_runs_and_refuses_what_it_cannot_judge(ftbench, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(SPEC))
    out = ["--out", str(tmp_path / "out")]
    code, stdout, _ = ftbench("parity", path, "--dry-run", "--steps", "9", *out)
    assert code == 0
    assert stdout.count("pending") == 14
    for sets, said in (
        ("dataset.eval_samples=0", "no held-out data: set dataset.eval_samples"),
        ("objective=dpo", "objective dpo"),
        ("objective=grpo", "objective grpo"),
        ("measure.control=reversed_gradient", "leave it off"),
    ):
        code, _, stderr = ftbench("parity", path, "--set", sets, "--dry-run", *out)
        assert (code, said in stderr) == (2, True), stderr
    code, _, stderr = ftbench("parity", path, "--recipe", "fastet", *out)
    assert code == 2
    assert "fastest" in stderr
    for sets, expected in (
        ((), 3), (("--set", "optimizations.attention=sdpa"), 0), (("--set", "recipe=small"), 2),
    ):  # fmt: skip
        code, _, stderr = ftbench("parity", path, "--recipe", "fastest", *sets, "--dry-run", *out)
        assert code == expected, stderr
    for option in (("--controls", "some"), ("--seeds", "1")):
        code, _, stderr = ftbench("parity", path, *option, *out)
        assert (code, option[0] in stderr) == (2, True), stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@pytest.mark.parametrize("steps", [10, 60])
def test_packed_training_has_the_samples_of_the_reference_in_its_steps(cache, tmp_path, steps):
    """Rows are packed from all samples, and the first rows would have other numbers of samples than the last ones."""
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(SPEC | {"optimizations": {"packing": True}}))
    request = ParityRequest(path, sets=[], out=tmp_path / "out", steps=steps)
    plan = prepare(request).plan
    (packed,) = plan.recipes
    reference, spec = (plan.train(*each).spec for each in ((packed.reference, 0), (packed.spec, 0, packed)))
    assert reference.dataset.samples == spec.dataset.samples == 8 * steps
    rows = rows_of(synthetic_lengths(spec.dataset, 8 * steps), spec.dataset.max_length)
    trained = sum(map(len, rows[: steps * spec.train.batch_size]))
    assert trained == pytest.approx(8 * steps, rel=0.03)


def test_plan_goes_on_if_another_process_has_trained_the_reference(tmp_path):
    plan = plan_of(tmp_path, tiny("chunked", **BF16_CHUNKED), seeds=0)
    first = plan.train(plan.recipes[0].reference, 0)
    directory = rundir.create_at(first.run.path)
    rundir.write_json(directory.state, {"state": "ok", "wall_s": 1.0})
    assert plan.next(lambda _: True).values["run"] == "gradients"
