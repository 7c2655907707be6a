import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ftbench.core.rows import StepRow
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.load import load
from ftbench.spec.sweep import cells
from ftbench.store import rundir
from ftbench.store.rundir import create_at, write_json
from ftbench.store.steps import StepsWriter
from ftbench.sweep.loop import Session
from ftbench.sweep.plan.base import JobStatus, Options
from ftbench.sweep.plan.grid import Grid, first_jobs, with_repeats
from ftbench.sweep.plan.search import Search, SearchCell, next_batch

GPU = {"name": "a GPU", "memory_gb": 80.0, "memory_used_before_gb": 0.4, "foreign_processes": 0}
MODEL = {"id": "tiny/qwen3", "weights": "random"}
ELSEWHERE = "another process"  # state of a run that another process executes


def spec(**sections):
    return resolve(Experiment.model_validate({"name": "exp", "model": MODEL} | sections), None)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rundir.os, "fsync", lambda file: None)


@pytest.fixture
def options(tmp_path):
    return Options(tmp_path / "exp", GPU["name"])


@pytest.fixture
def jobs(tmp_path, options):
    """Return the jobs of a spec. Tests call them `lora1`, and `lora1'` for the second repeat."""

    def read(text="", *axes):
        (tmp_path / "spec.yaml").write_text(f"model: {json.dumps(MODEL)}\n{text}", "utf-8")
        grid = cells(tmp_path / "spec.yaml", (), axes)
        resolved = [replace(cell, spec=cell.spec and resolve(cell.spec, None)) for cell in grid]
        return with_repeats(first_jobs(resolved, options))

    return read


def name(each):
    return f"{each.spec.method.name}{each.spec.train.batch_size}" + "'" * (each.repeat - 1)


def names(found):
    return " ".join(map(name, found))


def leave(each, state="ok", gpu=GPU, samples=200, peak_gb=None, **more):
    """Write the directory of a finished run."""
    if each.run.path.exists():
        rundir.archive(each.run)
    run = create_at(each.run.path)
    write_json(run.spec_json, each.spec.model_dump(mode="json"))
    write_json(run.machine, {"gpu": gpu})
    write_json(run.applied, {"dataset": {"samples": samples}} if samples else {})
    batch = each.spec.train.batch_size
    if state == "ok":
        peak = 2.0 + batch if peak_gb is None else peak_gb
        writer = StepsWriter(run.steps)
        rows = (StepRow(step=i, phase="train", step_time_s=1.0, elapsed_time_sec=float(i), real_tokens=100 * batch,
                        peak_reserved_gb=peak, device_memory_gb=peak + 0.5) for i in range(1, 7))  # fmt: skip
        writer.append(rows)
        writer.close()
    if state == ELSEWHERE:
        write_json(run.state, rundir.running())
    else:
        write_json(run.state, {"state": state, "reason": None if state == "ok" else "why", "wall_s": 60.0} | more)


def drain(plan, outcome=lambda each: "ok", fits=lambda each: True, **more):
    """Run a plan to its end, one job at a time. Return the jobs in the order of their starts."""
    started = []
    while (each := plan.next(fits)) is not None:
        assert plan.statuses[each].state == "running"
        started.append(each)
        leave(each, outcome(each), **more)
        plan.ended(each)
        assert len(started) < 200, "endless plan"
    return started


def skipped(plan):
    return {name(each): found.reason for each, found in plan.statuses.items() if found.state == "skipped"}


# --- the jobs of a grid ----------------------------------------------------------------------------------------------

TWO_METHODS = "measure: {repeats: 2}\nsweep: {axes: {method: [lora, qlora], train.batch_size: [1, 2]}}\n"


def test_repeats_are_interleaved(jobs):
    assert names(jobs(TWO_METHODS)) == "lora1 lora2 qlora1 qlora2 lora1' lora2' qlora1' qlora2'"


@pytest.mark.parametrize("state", ["ok", ELSEWHERE])
def test_run_that_another_process_made_since_the_plan_is_kept(jobs, options, state):
    first, second = jobs("sweep: {axes: {train.batch_size: [1, 2]}}\n")
    plan = Grid([first, second], {}, options)
    leave(first, state)  # `ftbench run` in another terminal
    assert drain(plan) == [second]
    assert (plan.statuses[first].state, plan.left()) == (("ok", 0) if state == "ok" else ("running", 1))


def test_equal_cells_are_one_job(jobs):
    assert names(jobs("", "train.precision=auto,fp32", "method=lora,full")) == "lora4 full4"


def test_sets_of_a_job_reproduce_its_spec(jobs, tmp_path):
    for each in jobs(TWO_METHODS):
        again = resolve(load(tmp_path / "spec.yaml", each.sets), None)
        assert again == each.spec
        assert each.run.run_id == f"{identity.slug(again, GPU['name'])}-r{each.repeat}"


def test_family_differs_only_in_the_batch(jobs):
    found = jobs("", "method=lora,qlora", "train.batch_size=1,2", "train.gradient_accumulation_steps=1,2")
    assert len(found) == 8
    assert len({each.cell for each in found}) == 8
    assert {each.without_batch for each in found if each.spec.method.name == "lora"} == {found[0].without_batch}
    assert len({each.without_batch for each in found}) == 2


# --- a grid: order and resume ----------------------------------------------------------------------------------------


def test_finished_jobs_are_not_repeated(jobs, options):
    found = jobs("", "train.batch_size=1,2,4,8,16,32")
    for each, state in zip(found, ("ok", "timeout", "error", "ok", "ok", "oom"), strict=True):
        leave(each, state)
    plan = Grid(found, {}, options)
    assert drain(plan) == []
    assert [one.state for one in plan.statuses.values()] == ["ok", "timeout", "error", "ok", "ok", "oom"]
    assert plan.wall_times.at_most_s(found[0]) == pytest.approx(66.0)


def test_killed_sweep_resumes(jobs, options):
    found = jobs(TWO_METHODS)
    for cut in range(len(found) + 1):
        for each in found[:cut]:
            leave(each)
        assert names(drain(Grid(found, {}, options), lambda each: "interrupted")) == names(found[cut:])


def test_interrupted_jobs_run_again(jobs, options):
    interrupted, killed, unreadable, ownerless, done = found = jobs("", "train.batch_size=1,2,4,8,16")
    leave(interrupted, "interrupted")
    leave(killed, "running", owner={"pid": 1, "boot": "another boot"})
    create_at(unreadable.run.path).state.write_text("{")
    create_at(ownerless.run.path).state.write_text('{"state": "running", "owner": null}')
    leave(done)
    assert drain(Grid(found, {}, options)) == [interrupted, killed, unreadable, ownerless]


def test_jobs_that_failed_for_a_missing_package_run_again(jobs, options):
    found = jobs("", "train.batch_size=1,2")
    leave(found[0], "error", exit_code=3)
    leave(found[1], "error", exit_code=1)
    assert drain(Grid(found, {}, options)) == found[:1]


def test_retry_failed_runs_failed_jobs_again(jobs, options):
    found = jobs("", "train.batch_size=1,2,4,8")
    for each, state in zip(found, ("error", "timeout", "ok", "oom"), strict=True):
        leave(each, state)
    assert drain(Grid(found, {}, replace(options, retry_failed=True))) == found[:2]


def test_force_runs_all_jobs_again(jobs, options):
    found = jobs("", "train.batch_size=1,2,4,8")
    for each, state in zip(found, ("error", "ok", "oom", "interrupted"), strict=True):
        leave(each, state)
    assert drain(Grid(found, {}, replace(options, force=True))) == found


@pytest.mark.parametrize("asked", [{}, {"retry_failed": True}, {"force": True}], ids=str)
def test_job_of_another_process_is_not_started(jobs, options, asked):
    found = jobs("", "train.batch_size=1,2")
    leave(found[0], ELSEWHERE)
    plan = Grid(found, {}, replace(options, **asked))
    assert drain(plan) == found[1:]
    assert plan.statuses[found[0]].state == "running"


def test_refused_job_is_skipped_with_the_reason(jobs, options):
    found = jobs("", "train.batch_size=1,2")
    plan = Grid(found, {found[0]: "needs a GPU"}, options)
    assert skipped(plan) == {"lora1": "needs a GPU"}
    assert plan.statuses[found[0]].done
    assert drain(plan) == found[1:]


@pytest.mark.parametrize("state", ["oom", "error"])
def test_failed_run_does_not_bound_the_time(jobs, options, state):
    found = jobs("", "train.max_steps=10", "train.batch_size=1,16,12")
    leave(found[0], wall_s=600.0)
    leave(found[1], state, wall_s=5.0)
    assert Grid(found, {}, options).wall_times.at_most_s(found[2]) >= 600.0


# --- a grid: out of memory -------------------------------------------------------------------------------------------

BATCHES = "sweep: {axes: {method: [lora, qlora], train.batch_size: [1, 2, 4, 8]}}\n"


def no_more_than(limits):
    return lambda each: "oom" if each.spec.train.batch_size > limits[each.spec.method.name] else "ok"


def test_oom_skips_larger_batches_of_the_family(jobs, options):
    plan = Grid(jobs(BATCHES), {}, options)
    assert names(drain(plan, no_more_than({"lora": 1, "qlora": 4}))) == "lora1 lora2 qlora1 qlora2 qlora4 qlora8"
    assert skipped(plan) == {"lora4": "oom at batch 2", "lora8": "oom at batch 2"}


def test_oom_skips_larger_batches_in_any_order(jobs, options):
    plan = Grid(jobs("", "train.batch_size=4,8,1,2,16"), {}, options)
    assert names(drain(plan, no_more_than({"lora": 1}))) == "lora4 lora1 lora2"
    assert skipped(plan) == {"lora8": "oom at batch 4", "lora16": "oom at batch 4"}


def test_oom_of_an_earlier_session_counts(jobs, options):
    found = jobs(BATCHES)
    leave(found[1], "oom")
    plan = Grid(found, {}, options)
    assert skipped(plan) == {"lora4": "oom at batch 2", "lora8": "oom at batch 2"}
    assert names(plan.pending()) == "lora1 qlora1 qlora2 qlora4 qlora8"


@pytest.mark.parametrize("shared", [{"foreign_processes": 1}, {"memory_used_before_gb": 20.0}], ids=str)
def test_oom_on_a_shared_gpu_skips_nothing(jobs, options, shared):
    plan = Grid(jobs("", "train.batch_size=1,2,4"), {}, options)
    assert names(drain(plan, no_more_than({"lora": 1}), gpu=GPU | shared)) == "lora1 lora2 lora4"
    assert skipped(plan) == {}


def test_finished_larger_batch_keeps_its_result(jobs, options):
    found = jobs("", "train.batch_size=2,4,8")
    leave(found[0], "oom")
    leave(found[1])
    plan = Grid(found, {}, options)
    assert [one.state for one in plan.statuses.values()] == ["oom", "ok", "skipped"]


# --- the search for the largest batch --------------------------------------------------------------------------------


@pytest.fixture
def search(options):
    """Return a function that builds a search over methods of a tiny model."""

    def build(*methods, refused=None, asked=None, **sections):
        families = [
            SearchCell(spec(method={"name": method}, **sections), (f"method={method}",), {"method": method},
                   (refused or {}).get(method))
            for method in methods or ("lora",)
        ]  # fmt: skip
        return Search(families, replace(options, **(asked or {})))

    return build


def edges(found):
    return {
        family.spec.method.name: (
            edge.largest and edge.largest.batch, edge.first_failing and edge.first_failing.batch, edge.note,
        )
        for family, _, edge in found.results()
    }  # fmt: skip


def test_search_of_two_families(search):
    plan = search("lora", "qlora")
    started = drain(plan, no_more_than({"lora": 5, "qlora": 21}))
    assert edges(plan) == {"lora": (5, 6, ""), "qlora": (21, 22, "")}
    assert len(set(started)) == len(started) == len(plan.statuses)
    assert plan.next(lambda each: True) is None


def test_settings_of_a_trial(search):
    plan = search(
        dataset={"name": "sample", "eval_samples": 8},
        measure={"eval": "end", "repeats": 3, "profile": "on"},
    )
    each = plan.next(lambda each: True)
    assert (each.spec.train.max_steps, each.spec.dataset.longest_first, each.spec.measure.eval) == (7, True, "off")
    assert (each.spec.measure.repeats, each.spec.measure.profile, each.repeat) == (1, "off", 1)
    assert "measure.profile=off" in each.sets
    assert each.values == {"method": "lora", "train.batch_size": 1}


@pytest.mark.parametrize("dataset", [{"name": "sample"}, {"name": "synthetic", "samples": 3, "length": 64}])
def test_sets_of_a_trial_reproduce_its_spec(search, tmp_path, dataset):
    (tmp_path / "exp.yaml").write_text(json.dumps({"model": MODEL, "dataset": dataset}))
    for each in drain(search(dataset=dataset), no_more_than({"lora": 5})):
        again = resolve(load(tmp_path / "exp.yaml", each.sets), None)
        assert identity.slug(again, GPU["name"]) == each.cell


def test_search_resumes_after_any_trial(search, tmp_path):
    outcome = no_more_than({"lora": 5})
    first = search()
    whole = drain(first, outcome)
    for cut in range(len(whole)):
        for each in whole[cut:]:
            rundir.archive(each.run)
        again = search()
        assert drain(again, outcome) == whole[cut:]
        assert edges(again) == {"lora": (5, 6, "")}


def test_interrupted_trial_runs_again(search):
    plan = search()
    assert names(drain(plan, lambda each: "interrupted" if each.spec.train.batch_size == 4 else "ok")) == (
        "lora1 lora2 lora4"
    )
    assert edges(plan) == {"lora": (2, None, "not finished")}
    again = search()
    assert names(drain(again, no_more_than({"lora": 4}))).startswith("lora4 lora8 ")
    assert edges(again) == {"lora": (4, 5, "")}


@pytest.mark.parametrize(
    ("more", "asked", "again"),
    [
        ({}, {}, ""),
        ({"exit_code": 3}, {}, "lora2"),
        ({}, {"retry_failed": True}, "lora2"),
        ({}, {"force": True}, "all"),
    ],
)
def test_failed_trial_stops_its_family(search, more, asked, again):
    plan = search("lora", "qlora")
    fails = lambda each: "error" if name(each) == "lora2" else no_more_than({"lora": 2, "qlora": 2})(each)  # noqa: E731
    while (each := plan.next(lambda each: True)) is not None:
        leave(each, fails(each), **(more if name(each) == "lora2" else {}))
        plan.ended(each)
    assert edges(plan) == {"lora": (1, None, "stopped at batch 2: why"), "qlora": (2, 3, "")}
    made = names(drain(search("lora", "qlora", asked=asked), no_more_than({"lora": 2, "qlora": 2})))
    wanted = {"": "", "lora2": "lora2 lora4 lora3", "all": "lora1 lora2 lora4 lora3 qlora1 qlora2 qlora4 qlora3"}
    assert made == wanted[again]


@pytest.mark.parametrize("asked", [{}, {"force": True}], ids=str)
def test_trial_of_another_process_is_not_started(search, asked):
    plan = search()
    first = plan.next(lambda each: True)
    leave(first, ELSEWHERE)
    assert search(asked=asked).next(lambda each: True) is None


def test_oom_on_a_shared_gpu_is_not_the_limit(search):
    plan = search()
    while (each := plan.next(lambda each: True)) is not None:
        crowded = each.spec.train.batch_size == 4
        leave(each, "oom" if crowded else "ok", gpu=GPU | {"foreign_processes": int(crowded)})
        plan.ended(each)
    assert edges(plan) == {"lora": (2, None, "stopped at batch 4: out of memory while others used the GPU")}


def test_trial_without_time_is_not_started(search):
    plan = search("lora", "qlora")
    assert names(drain(plan, no_more_than({"lora": 9, "qlora": 1}), fits=lambda each: name(each) != "lora4")) == (
        "lora1 lora2 qlora1 qlora2"
    )
    assert edges(plan) == {"lora": (2, None, "not finished"), "qlora": (1, 2, "")}


# --- limits of the search --------------------------------------------------------------------------------------------


def test_data_set_limits_the_batch(search):
    plan = search(dataset={"name": "sample"})
    assert names(drain(plan, samples=20)) == "lora1 lora2 lora4 lora8 lora16 lora20"
    assert edges(plan) == {"lora": (20, None, "not reached up to batch 20")}
    again = search(dataset={"name": "sample"})
    assert drain(again) == []
    assert edges(again) == edges(plan)


def test_synthetic_data_does_not_limit_the_batch(search):
    plan = search(dataset={"name": "synthetic", "samples": 3, "length": 64})
    started = drain(plan, no_more_than({"lora": 9}), samples=3)
    assert edges(plan) == {"lora": (9, 10, "")}
    assert all(each.spec.dataset.samples == max(3, each.spec.train.batch_size) for each in started)


def test_search_ends_at_the_largest_batch_size(search):
    plan = search(dataset={"name": "synthetic", "samples": 3, "length": 64})
    started = drain(plan)
    assert started[-1].spec.train.batch_size == 4096
    assert edges(plan) == {"lora": (4096, None, "not reached up to batch 4,096")}


def test_steps_contain_complete_groups(search):
    grpo = {
        "objective": {"name": "grpo", "num_generations": 4},
        "dataset": {"name": "synthetic", "samples": 9, "length": 8},
    }
    plan = search(**grpo, train={"batch_size": 4})
    assert names(drain(plan, no_more_than({"lora": 13}))) == "lora4 lora8 lora16 lora12"
    twice = search(**grpo, train={"batch_size": 2, "gradient_accumulation_steps": 2})
    assert all(each.spec.global_batch % 4 == 0 for each in drain(twice, no_more_than({"lora": 5})))
    assert edges(twice) == {"lora": (4, 6, "")}


# --- results of trials -----------------------------------------------------------------------------------------------


def test_trial_has_speed_and_memory(search):
    plan = search()
    drain(plan, no_more_than({"lora": 2}))
    ((_, trials, edge),) = plan.results()
    first = trials[0]
    assert (first.batch, first.fits, first.speed) == (1, True, pytest.approx(100.0))
    assert first.peak_gb == 3.0
    assert [trial.batch for trial in trials] == [1, 2, 3, 4]
    assert edge.knee == 2


def test_result_can_be_written_as_json(search, tmp_path):
    plan = search("lora", "full", refused={"full": "needs a GPU"})
    drain(plan, no_more_than({"lora": 2}))
    write_json(tmp_path / "frontier.json", plan.as_dicts())
    lora, full = json.loads((tmp_path / "frontier.json").read_text())
    assert (lora["method"], lora["cell"], lora["largest"]["batch"], len(lora["trials"])) == (
        "lora", {"method": "lora"}, 2, 4,
    )  # fmt: skip
    assert (full["largest"], full["trials"], full["note"]) == (None, [], "needs a GPU")
    assert next_batch([], plan.candidates(plan.cells[0])) == 1


def test_jobs_in_a_cluster_queue_do_not_share_the_remaining_work(tmp_path, jobs, options):
    plan = Grid(jobs("", "train.batch_size=1,2,4,8"), {}, options)
    plan.record(next(iter(plan.statuses)), JobStatus("ok", wall_s=100.0))
    slots = [SimpleNamespace(name="job", trains=trains) for trains in (True, True, False, False)]
    session = Session(b"", plan, slots, None, None, None)
    left = session.left_s()
    slots[1].trains = False
    assert session.left_s() == pytest.approx(2 * left)


def test_oom_of_another_process_since_the_plan_skips_larger_batches(jobs, options):
    found = jobs("sweep: {axes: {train.batch_size: [1, 2, 4]}}\n")
    plan = Grid(found, {}, options)
    leave(found[1], "oom")
    assert names(drain(plan)) == "lora1"
    assert skipped(plan) == {"lora4": "oom at batch 2"}
