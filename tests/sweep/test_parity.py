"""`ftbench parity`: a recipe that learns the same follows, one that does not is named, and what must not pass fails."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

import warm
from ftbench.core.learning import CANNOT_TELL, DIFFERS, FOLLOWS, NOT_FINITE, Learning
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.identity import fingerprint
from ftbench.store import machine, rundir
from ftbench.sweep import gradients
from ftbench.sweep.output.parity import ParityTables
from ftbench.sweep.plan.base import Options
from ftbench.sweep.plan.parity import CONTROLS, FAILED, PENDING, Contender, Judgement, ParityPlan, SeedSpread, _together
from waiting import eventually

SPEC = {
    "name": "learning",
    "model": {"id": "tiny/qwen3", "weights": "random"},
    "method": "full",
    "dataset": {"name": "synthetic", "structure": "markov", "length": 24, "samples": 128, "eval_samples": 16},
    "train": {"batch_size": 4, "learning_rate": 2e-3, "max_steps": 24},
}


def spec_of(**sections) -> Experiment:
    values = {**SPEC, **{key: {**SPEC.get(key, {}), **value} for key, value in sections.items()}}
    return resolve(Experiment.model_validate(values | {"method": {"name": "full"}}), None)


def recipe(name="recipe", **sections) -> Contender:
    return Contender(name, spec_of(**sections), ())


def plan_of(folder: Path, *recipes: Contender, seeds=2, **sections) -> ParityPlan:
    return ParityPlan(recipe("plain", **sections), recipes, seeds, 2, Options(folder, None))


def train_all(plan: ParityPlan, spoil=None) -> ParityPlan:
    """Trains what the plan has still to run, in this process; `spoil` is told of each spec before it trains."""
    training = pytest.importorskip("ftbench.worker.train", reason="training libraries are not installed")
    from ftbench.worker.measure.phases import Phases
    from ftbench.worker.training_run import TrainingRun

    while (job := plan.next(lambda job: True)) is not None:
        directory = rundir.create_at(job.run.path)
        rundir.write_json(directory.spec_json, job.spec.model_dump(mode="json"))
        rundir.write_json(directory.machine, {})
        phases = Phases(directory, "import")
        with pytest.MonkeyPatch.context() as patch:
            if spoil:
                spoil(job, patch)
            training.train(TrainingRun(job.spec, directory, phases))
        phases.close()
        rundir.write_json(directory.state, rundir.running() | {"state": "ok"})
        plan.ended(job)
    return plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache) -> Path:
    """One folder for all plans: the reference and the controls train once, and the next plan finds them."""
    return tmp_path_factory.mktemp("parity")


CHECKPOINTING = {"optimizations": {"gradient_checkpointing": True}}


@pytest.mark.torch
def test_a_recipe_that_computes_the_same_follows_and_every_control_is_caught(folder):
    plan = train_all(plan_of(folder, recipe(**CHECKPOINTING)))
    (found,) = plan.judgements()
    assert (found.verdict, found.reason) == (FOLLOWS, "")
    assert found.tolerance == 0.001
    assert len(found.seeds) == len(found.held_out) == 2
    assert abs(found.record()["change"]) < 1e-3 < plan.spread().train
    assert [control.verdict for control in plan.controls()] == [DIFFERS] * 3
    assert plan.passed()
    resumed = plan_of(folder, recipe(**CHECKPOINTING))
    assert (resumed.left(), resumed.judgements(), resumed.passed()) == (0, [found], True)
    tables = ParityTables(resumed, [])
    assert json.loads(json.dumps(tables.document(), allow_nan=False))["recipes"][0]["verdict"] == FOLLOWS
    assert "Every control was caught" in tables.terminal()
    assert "NOT CAUGHT" not in tables.markdown()
    reference, candidate = (plan.job(each, 0).run for each in (plan.reference, plan.recipes[0]))
    rows, reason = gradients.agreement(reference, candidate)
    assert not reason
    assert {row.module for row in rows} > {"q_proj", "down_proj", "embed_tokens", "norm"}
    assert min(row.lowest for row in rows) > 0.9999


@pytest.mark.torch
def test_an_optimization_that_scales_wrongly_does_not_follow_and_its_gradients_show_where(folder):
    from ftbench.worker import optimizations

    def halved(job, patch):
        apply = optimizations.apply

        def wrong(model, spec):
            apply(model, spec)
            model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: 0.2 * output)
            model.model.norm.register_forward_hook(lambda module, inputs, output: 0.3 * output)

        if job.values["recipe"] == "wrong":
            patch.setattr(optimizations, "apply", wrong)

    wrong = recipe("wrong", optimizations={"gradient_checkpointing": "selective"})
    plan = train_all(plan_of(folder, wrong), halved)
    (found,) = plan.judgements()
    assert found.verdict == DIFFERS, (found, plan.spread())
    assert not plan.passed()
    rows, _ = gradients.agreement(plan.job(plan.reference, 0).run, plan.job(wrong, 0).run)
    down = next(row for row in rows if row.module == "down_proj")
    assert down.norm_ratio < 0.7


@pytest.mark.torch
def test_on_data_that_nothing_can_learn_it_cannot_tell_and_the_controls_give_it_away(tmp_path, cache):
    random = {"dataset": {"structure": "random"}, "train": {"max_steps": 12}}
    plan = train_all(plan_of(tmp_path, recipe(**CHECKPOINTING, **random), seeds=1, **random))
    (found,) = plan.judgements()
    assert found.verdict == CANNOT_TELL
    assert "learned" in found.reason
    assert CANNOT_TELL in [control.verdict for control in plan.controls()]
    assert not plan.passed()
    text = ParityTables(plan, []).terminal()
    assert "The check could not have failed" in text


def test_a_plan_goes_on_where_it_stopped_and_says_what_is_left(tmp_path, cache):
    plan = plan_of(tmp_path, recipe(**CHECKPOINTING), seeds=1)
    order = [job.values["recipe"] for job in plan.standings]
    assert order == ["plain", "recipe", *(f"control: {name.replace('_', ' ')}" for name in CONTROLS)]
    first = plan.next(lambda job: True)
    rundir.create_at(first.run.path)
    rundir.write_json(first.run.state, {"state": "ok"})
    again = plan_of(tmp_path, recipe(**CHECKPOINTING), seeds=1)
    assert [job.values["recipe"] for job in again.pending()] == order[1:]
    assert [found.verdict for found in (*again.judgements(), *again.controls())] == [PENDING] * 4
    assert not again.passed()
    tables = ParityTables(again, [])
    tables.write()
    document = json.loads((tmp_path / "parity.json").read_text())
    assert document["left"] == 4
    assert document["passed"] is False
    assert "4 runs still to come" in (tmp_path / "parity.md").read_text()


def test_a_control_waits_for_every_seed_of_the_reference(tmp_path):
    """Nothing is held against a reference whose later seeds have not been trained yet."""
    plan = plan_of(tmp_path, recipe(**CHECKPOINTING), seeds=2)
    for job in plan.standings:
        if job.values["seed"] == 1:
            rundir.create_at(job.run.path)
            rundir.write_json(job.run.state, {"state": "ok"})
            plan.ended(job)
    assert {found.verdict for found in plan.controls()} == {PENDING}


def test_a_run_that_failed_and_a_recipe_that_cannot_run_are_no_pass(tmp_path):
    refused = Contender("fp8", spec_of(), (), "needs a GPU")
    plan = plan_of(tmp_path, recipe(**CHECKPOINTING), refused, seeds=1)
    for job in plan.standings:
        rundir.create_at(job.run.path)
        state = "oom" if job.values["recipe"] == "recipe" else "ok"
        rundir.write_json(
            job.run.state, {"state": state, "reason": "out of memory"} if state == "oom" else {"state": state}
        )
        plan.ended(job)
    failed, cannot_run = plan.judgements()
    assert (failed.verdict, failed.reason) == (FAILED, "recipe=recipe seed=1: out of memory")
    assert (cannot_run.verdict, cannot_run.reason) == (FAILED, "needs a GPU")
    assert not plan.passed()


def test_the_runs_of_a_check_are_experiments_of_their_own(tmp_path):
    plan = plan_of(tmp_path, recipe(**CHECKPOINTING), seeds=2)
    names = {job.run.run_id for job in plan.standings}
    assert len(names) == 7
    assert fingerprint(spec_of()) not in "".join(names - {plan.job(plan.reference, 1).run.run_id})
    assert {job.spec.dataset.seed for job in plan.standings} == {42, 43}
    assert {job.spec.train.seed for job in plan.standings} == {42, 43}
    assert [job.spec.measure.control for job in plan.standings][2:5] == [*CONTROLS]


@dataclass
class _Case:
    """Seeds' verdicts and held-out differences, by a tolerance of 1 % and bands, and what they make together."""

    seeds: list[Learning]
    held_out: list[float]
    spread: SeedSpread
    verdict: str


FOLLOWING = Learning(FOLLOWS, change=0.001, learned=0.2)
DIFFERING = Learning(DIFFERS, "differs", change=0.03, learned=0.2)
NARROW, WIDE = SeedSpread(0.01, 0.01), SeedSpread(0.05, 0.05)


@pytest.mark.parametrize(
    "case",
    [
        _Case([FOLLOWING, FOLLOWING], [0.001, -0.002], NARROW, FOLLOWS),
        _Case([FOLLOWING, DIFFERING], [0.001, 0.001], NARROW, DIFFERS),
        _Case([FOLLOWING, DIFFERING], [0.001, 0.001], WIDE, CANNOT_TELL),
        _Case([FOLLOWING], [0.02], NARROW, DIFFERS),
        _Case([FOLLOWING], [math.nan], NARROW, NOT_FINITE),
        _Case([FOLLOWING, Learning(NOT_FINITE, "NaN")], [0.0], WIDE, NOT_FINITE),
        _Case([FOLLOWING], [0.001], SeedSpread(0.3, 0.3), CANNOT_TELL),
        _Case([FOLLOWING, Learning(CANNOT_TELL, "learned nothing")], [0.0, 0.0], NARROW, CANNOT_TELL),
        _Case([FOLLOWING], [], NARROW, CANNOT_TELL),
    ],
    ids=lambda case: case.verdict,
)
def test_seeds_together(case):
    assert _together(case.seeds, case.held_out, 0.01, case.spread)[0] == case.verdict


@pytest.mark.torch
def test_the_command_refuses_what_it_cannot_judge(ftbench, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(SPEC | CHECKPOINTING))
    out = ["--out", str(tmp_path / "out")]
    code, _, stderr = ftbench("parity", path, "--recipe", "fastet", *out)
    assert code == 2
    assert "fastest" in stderr
    code, _, stderr = ftbench("parity", path, "--set", "measure.control=random_labels", *out)
    assert code == 2
    assert "`ftbench parity` makes its controls itself" in stderr
    code, _, stderr = ftbench("parity", path, "--recipe", "small", "--dry-run", *out)
    if machine.gpu() is None:  # nothing is trained for a check that can have no verdict
        assert code == 3
        assert stderr.count("\n") == 1
        assert "no recipe can be judged here: small: " in stderr
    code, stdout, _ = ftbench("parity", path, "--dry-run", "--seeds", "2", "--steps", "9", *out)
    assert code == 0
    assert stdout.count("pending") == 7
    assert "measure.control=reversed_gradient" in stdout
    assert stdout.count("train.max_steps=9") == 7


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.exhaustive  # a sweep is killed in the gate, and this is one
def test_a_killed_check_keeps_what_has_ended_and_the_same_command_goes_on(tmp_path, cache):
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(SPEC | CHECKPOINTING))
    command = ["parity", str(path), "--seeds", "1", "--out", str(tmp_path / "out")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    folder = tmp_path / "out" / "learning"

    def ended() -> list[rundir.RunDir]:
        assert begun.poll() is None
        return [run for run in rundir.find_runs(folder) if rundir.read_json(run.state)["state"] == "ok"]

    begun = warm.Warm(command, environment)
    first = eventually(ended)[0]
    begun.kill()
    begun.communicate()
    steps = first.steps.read_bytes()
    done = warm.run([*command, "--json"], environment)
    document = json.loads(done.stdout)
    assert (done.returncode, document["passed"]) == (0, True), document
    assert first.steps.read_bytes() == steps
    assert [control["caught"] for control in document["controls"]] == [True] * 3
    assert {row["module"] for row in document["gradients"]["learning"]["modules"]} > {"q_proj", "norm"}
    assert (folder / "parity.json").exists()


def test_a_document_of_broken_runs_is_json():
    judgement = Judgement("fp8", NOT_FINITE, "NaN", 0.05, [Learning(NOT_FINITE, "NaN", change=math.nan)], [math.inf])
    record = json.loads(json.dumps(judgement.record(), allow_nan=False))
    assert (record["change"], record["held_out_change"], record["held_out_changes"]) == (None, None, [None])
