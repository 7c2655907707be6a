"""Studies that run cells: valid specs, resuming, what is kept, and the page, without a GPU."""

from __future__ import annotations

import dataclasses
import runpy
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from ftbench.spec.experiment import resolve
from ftbench.spec.load import load
from ftbench.store.rundir import RunDir, read_json, write_json
from made_runs import OOM, make_run, steps

ROOT = Path(__file__).parents[1]
STUDIES = {
    name: runpy.run_path(str(ROOT / "scripts/studies" / name))
    for name in ("founding-text", "founding-images", "two-gpus", "grid")
}
TEXT = STUDIES["founding-text"]
study = sys.modules["study"]


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_is_a_valid_spec_and_ends_within_one_call(name):
    cells = STUDIES[name]["CELLS"]
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        spec = resolve(load(ROOT / f"configs/{cell.config}.yaml", [*cell.sets, f"name={cell.name}"]), (9, 0))
        assert spec.model.weights == "random"
        assert cell.train_s + cell.weights_s < 540
        others = name in ("two-gpus", "grid")
        assert others or spec.optimizations.gradient_checkpointing or spec.method.name == "unsloth"


def test_the_studys_own_cells_come_first_and_each_figure_has_a_cell():
    names = [cell.name for cell in TEXT["CELLS"]]
    assert names[:2] == [*TEXT["PUBLISHED"]][:2]
    assert set(TEXT["PUBLISHED"]) <= set(names)


def test_a_finished_cell_is_not_repeated_and_only_small_files_are_kept(tmp_path, capsys, monkeypatch):
    cell = next(cell for cell in TEXT["CELLS"] if cell.name == "qwen3-8b-lora-japanese-alpaca-b4")
    unsloth = next(cell for cell in TEXT["CELLS"] if "unsloth" in cell.name)
    runner, really = study.Study(tmp_path / "out", 1, tiny=True), subprocess.run

    def pretend(command, **options):
        """Leave the files of a run, or call ftbench for the spec that it refuses."""
        if f"configs/{cell.config}.yaml" not in command:
            return really(command, **options)
        run = make_run(tmp_path, "a").path
        (run / "log.txt").write_text("a log\n")
        shutil.copytree(run, runner.out / cell.name / "a")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pretend)
    assert runner.run([cell, unsloth]) == 1
    out = capsys.readouterr().out
    assert "b4: ok" in out
    assert "skipped: ftbench: method unsloth needs a GPU" in out
    assert runner.run([cell]) == 0
    assert capsys.readouterr().out == ""
    assert study.Study(tmp_path / "other", 0.1, tiny=True).run([cell]) == 1
    assert "needs 20 s and" in capsys.readouterr().out
    study.keep(runner.out, tmp_path / "kept")
    kept = {path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert {"summary.json", "steps.csv", "state.json"} <= kept <= set(study.KEPT)
    assert str(tmp_path) not in "".join(path.read_text() for path in (tmp_path / "kept").rglob("*.json"))


@pytest.mark.parametrize("shares", [{("GPU-a", (0, 1, 2, 3))}, {("GPU-a", (0, 1)), ("GPU-b", (2, 3))}], ids=len)
def test_cells_run_side_by_side_on_all_gpus_with_their_own_share_of_the_cpus(tmp_path, monkeypatch, shares):
    cells, seen, mine = TEXT["CELLS"][:6], [], threading.local()

    def run(self, cell, needed, left):
        time.sleep(0.05)
        seen.append((cell.name, cell.gpu, mine.cpus))
        (self.out / cell.name / "r1").mkdir(parents=True)
        write_json(self.out / cell.name / "r1/state.json", {"state": "ok"})
        return "ok"

    monkeypatch.setattr(study.machine, "gpus", lambda count: [{"uuid": gpu} for gpu, _ in sorted(shares)])
    monkeypatch.setattr(study.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(study.os, "sched_setaffinity", lambda _, cpus: setattr(mine, "cpus", tuple(cpus)))
    monkeypatch.setattr(study.Study, "_run", run)
    assert study.SideBySide(tmp_path, 60).run(cells) == 0
    assert sorted(name for name, _, _ in seen) == sorted(cell.name for cell in cells)
    assert {(gpu, cpus) for _, gpu, cpus in seen} == shares
    assert study.SideBySide(tmp_path, 60).run(cells) == 0
    assert len(seen) == len(cells)


def test_a_whole_run_counts_the_first_steps_as_they_were_and_the_rest_at_the_steady_rate(tmp_path):
    """A step that took ten times as long counts once."""
    rows = steps(20, 1.0, 21.0, noise=0.0)
    late = [dataclasses.replace(row, elapsed_time_sec=row.elapsed_time_sec + 9) for row in rows[10:]]
    late[0] = dataclasses.replace(late[0], step_time_s=10.0)
    run = RunDir(make_run(tmp_path, "a", [*rows[:10], *late]).path)
    summary = read_json(run.summary)
    tokens = sum(row.real_tokens for row in TEXT["read_steps"](run.steps)[0])
    summary["dataset"] = {"tokens": {"total": 3 * tokens}}
    write_json(run.summary, summary)
    seconds = 21.0 + 19 * 1.0 + 9 + 2 * tokens / 8192
    assert TEXT["whole_run"](run) == pytest.approx(3600 * 1000 / seconds, rel=1e-3)


def test_the_rest_of_a_launch_bound_run_takes_the_same_time_per_step(tmp_path):
    """The steps have different numbers of tokens and take one second each."""
    rows = [
        dataclasses.replace(row, real_tokens=100 * 3 ** (index % 4))
        for index, row in enumerate(steps(20, 1.0, 1.0, noise=0.0))
    ]
    run = RunDir(make_run(tmp_path, "a", rows).path)
    summary = read_json(run.summary)
    write_json(run.summary, summary | {"dataset": {"tokens": {"total": 1_000_000}}})
    assert TEXT["whole_run"](run) == pytest.approx(3600 * 1000 / (1000 / summary["batch_size"]), rel=0.01)


def test_the_page_of_slow_host_compares_runs_of_one_sitting_and_names_cells_without_a_result(tmp_path, monkeypatch):
    page = runpy.run_path(str(ROOT / "scripts/studies/slow-host"))
    monkeypatch.setitem(page["tables"].__globals__, "ROOT", tmp_path)
    for name, commit in {"launched": "a", "slow-launched": "b", "graphed": "a", "slow-graphed": "a"}.items():
        state = OOM if name == "graphed" else None
        run = make_run(tmp_path, name, machine={"ftbench.commit": commit * 40}, state=state)
        shutil.copytree(run.path, tmp_path / f"results/h100/slow-host/fastest-{name}/{name}")
    rows = [line for line in page["tables"]().splitlines() if line.startswith("| `fastest")]
    assert [line.split(" | ")[6:] for line in rows[:3]] == [["", f"{each * 8}, GPU-ba1b8cf2 |"] for each in "aba"]
    assert len(rows) == len(page["CELLS"])
    assert "| `fastest-graphed` |  |  | 0 |" in "".join(rows)


def test_the_page_names_the_commits_and_cards_of_its_runs(tmp_path, monkeypatch):
    page = STUDIES["founding-images"]
    monkeypatch.setitem(page["tables"].__globals__, "ROOT", tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for cell, commit in zip(page["CELLS"][:2], "ab", strict=True):
        run = make_run(tmp_path, cell.name, machine={"ftbench.commit": commit * 40})
        shutil.copytree(run.path, tmp_path / f"results/h100/founding-images/{cell.name}/r1")
    assert "aaaaaaaa, GPU-ba1b8cf2; bbbbbbbb, GPU-ba1b8cf2" in page["tables"]()


def test_a_stopped_run_of_a_later_sitting_does_not_replace_a_published_result(tmp_path):
    good, stopped = make_run(tmp_path, "good"), make_run(tmp_path, "stopped", state={"state": "timeout"})
    study.keep(good.path, tmp_path / "results/cell/r1")
    study.keep(stopped.path, tmp_path / "results/cell/r1")
    assert read_json(tmp_path / "results/cell/r1/state.json")["state"] == "ok"
    assert read_json(tmp_path / "results/cell/r1/summary.json")["run_id"] == "good"


def test_a_new_verdict_replaces_the_runs_of_the_published_one(tmp_path, monkeypatch):
    judge = runpy.run_path(str(ROOT / "scripts/studies/parity"))["judge"]
    monkeypatch.setitem(judge.__globals__, "ftbench", lambda *_, **__: 1)
    options = SimpleNamespace(out=tmp_path / "out", results=tmp_path / "results", large=False, seeds=3)
    published, made = options.results / "judged/fastest", options.out / "judged/fastest/parity"
    (published / "with-other-settings").mkdir(parents=True)
    (made / "new").mkdir(parents=True)
    write_json(published / "with-other-settings/agreement.json", {})
    judge("fastest", options, 0.0)
    assert [path.name for path in published.iterdir()] == ["with-other-settings"], "nothing ran"
    for name in ("parity.json", "new/agreement.json"):
        write_json(made / name, {})
    judge("fastest", options, 0.0)
    assert {path.name for path in published.iterdir()} == {"parity.json", "new"}


def test_an_unfinished_verdict_does_not_replace_the_published_one(tmp_path, monkeypatch):
    judge = runpy.run_path(str(ROOT / "scripts/studies/parity"))["judge"]
    monkeypatch.setitem(judge.__globals__, "ftbench", lambda *_, **__: 1)
    options = SimpleNamespace(out=tmp_path / "out", results=tmp_path / "results", large=False, seeds=3)
    published, made = options.results / "judged/fastest", options.out / "judged/fastest/parity"
    for folder, verdict in ((published, "pass"), (made, "not run yet")):
        folder.mkdir(parents=True)
        write_json(folder / "parity.json", {"recipes": [{"verdict": verdict}]})
    (published / "r1").mkdir()
    write_json(published / "r1/state.json", {"state": "ok"})
    judge("fastest", options, 0.0)
    assert read_json(published / "parity.json")["recipes"] == [{"verdict": "pass"}]
    assert read_json(published / "r1/state.json") == {"state": "ok"}


def test_each_group_of_recipes_has_a_model_and_valid_files():
    parity = runpy.run_path(str(ROOT / "scripts/studies/parity"))
    configs = parity["CONFIGS"]
    for group in parity["GROUPS"].split():
        suffix = parity["kind"](group)
        learned, judged = (load(configs / f"{name}{suffix}.yaml") for name in ("learn", "judged"))
        assert learned.model.id == judged.model.id
        assert judged.model.path == str(configs / f"learned{suffix}")
        assert (configs / learned.model.path).is_file()
        images = ["model.id=tiny/llava-next", "dataset={name: images, image_size: [64, 64], samples: 8, length: 8}"]
        tiny = images if suffix == "-vision" else ["model.id=tiny/qwen3"]
        for name in group.partition("@")[0].split(","):
            assert not name.endswith(".yaml") or load(configs / name, [*tiny, "name=x"])
    assert load(configs / "fastest-experts.yaml", ["model.id=tiny/qwen3-moe", "name=x"]).method.experts


def test_the_table_of_verdicts_names_the_model_of_a_mixture_of_experts(tmp_path, monkeypatch):
    """An unfinished verdict is listed unless the same recipe has another verdict on the same model."""
    table = runpy.run_path(str(ROOT / "scripts/studies/parity"))["table"]
    monkeypatch.setitem(table.__globals__, "ROOT", tmp_path)
    for folder, verdict in (("fastest", "pass"), ("again-fastest", "not run yet"), ("fastest-moe", "not run yet")):
        path = tmp_path / "results/h200/parity/judged" / folder / "parity.json"
        path.parent.mkdir(parents=True)
        levels = {"forward": {"state": verdict, "number": 0.1, "limit": 0.2, "sentence": ""}}
        write_json(path, {"recipes": [{"name": "fastest", "verdict": verdict, "levels": levels, "controls": []}]})
    rows = table("judged", ("forward",)).splitlines()[2:]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| `fastest`", "H200", "pass"], ["| `fastest`, Qwen3-MoE", "H200", "not run yet"],
    ]  # fmt: skip


def test_unsloths_best_setting_ran_to_its_end(tmp_path):
    page, cell = runpy.run_path(str(ROOT / "scripts/studies/unsloth-best")), TEXT["CELLS"][0]
    run = make_run(tmp_path, "oom", steps(9), state=OOM)
    shutil.copytree(run.path, tmp_path / cell.name / "oom")
    assert page["result_of"](study.Study(tmp_path, 0), cell) == {}


def notes_of(page: str) -> str:
    """Return the hand-written notes below the tables of a page, on one line."""
    return " ".join((ROOT / f"docs/evidence/{page}.md").read_text("utf-8").rpartition(study.END)[2].split())


def test_the_notes_on_the_text_study_state_the_figures_of_its_runs():
    notes, found = notes_of("founding-text"), TEXT["measured"]
    first = [read_json(found(card, cell).summary)["first_step_s"] for card in TEXT["CARDS"] for cell in TEXT["CELLS"]
             if "gpt-oss" in cell.name and read_json(found(card, cell).state)["state"] == "ok"]  # fmt: skip
    assert f"first steps take {min(first):.0f} to {max(first):.0f} s" in notes
    pairs = {cell.name: [found("h100", cell), again] for cell in TEXT["CELLS"]
             if (again := found("h100", cell, "founding-text-alone")) is not None}  # fmt: skip
    ratios = {True: [], False: []}  # the first run was on the machine with four GPUs, or on another one
    for runs in pairs.values():
        old, new = (read_json(run.summary)["step_time_s"]["median"] for run in runs)
        ratios[read_json(runs[0].machine)["ftbench"]["commit"] == "7476d3bd"].append(new / old)
    assert f"{len(ratios[True])} of these cells ran again" in notes
    assert f"took {min(ratios[True]):.2f} to {max(ratios[True]):.2f} times as long" in notes
    assert f"japanese-alpaca) took {ratios[False][0]:.1f} times as long" in notes
    rounds = read_json(ROOT / "results/h200/unsloth-check.json")["rounds"]
    apart = [each["ftbench"]["tokens_per_s"] / each["plain script"]["tokens_per_s"] - 1 for each in rounds]
    assert f"the difference is at most {max(map(abs, apart)):.1%}".replace("%", " %") in notes


def test_the_notes_on_the_image_study_count_later_compilations_and_no_waiting_for_batches():
    """Compilation saves time after the stated number of steps, and the stated changes are those of the runs."""

    def steady(card, name):
        """Return the median time of a step without waiting, and the seconds of all steps beyond it."""
        run = RunDir(next((ROOT / f"results/{card}/founding-images" / name).glob("*/")))
        times = [row.step_time_s - row.data_time_s for row in TEXT["read_steps"](run.steps)[0]]
        step = median(times[read_json(run.summary)["steps"]["warmup"] :])
        return step, sum(times) - len(times) * step

    notes, most = notes_of("founding-images"), {}
    results, cells = ROOT / "results/h100/founding-images", STUDIES["founding-images"]["CELLS"]
    ran = [cell.name for cell in cells if cell.runs(results)]
    for name in (name for name in ran if "-compile-" in name):
        model, _, batch = name.replace("-fp8", "").partition("-compile-")
        (own, more), (base, base_more) = (steady("h100", each) for each in (name, f"{model}-bf16-{batch}"))
        most[name] = (more - base_more) / (base - own)
    assert most.pop("qwen3-vl-compile-b1") < 0
    assert min(most.values()) > 0
    assert f"after at most {10 * round(max(most.values()) / 10)} steps" in notes
    places = {("h100", "b2"): ("fp8", "compile", "compile-fp8", "qlora"), ("h200", "b1"): ("compile", "compile-fp8")}
    for (card, batch), names in places.items():
        for name in names:
            own, base = (steady(card, f"llava-next-{each}-{batch}")[0] for each in (name, "bf16"))
            assert f"{100 * own / base - 100:+.0f} % (`{name}`)" in notes


def predicted_images(card: str, numbers: tuple[int, ...]) -> list[list[dict]]:
    """Return the predictions and results of the image study, grouped by rounds that the files `numbers` end."""
    images, results = STUDIES["founding-images"], ROOT / "results" / card / "founding-images"
    written = [read_json(ROOT / f"results/predictions/images-{card}-{number}.json")["written"] for number in numbers]
    expected = images["predictions"](f"images-{card}", images["CELLS"], results)
    found: list[list[dict]] = [[] for _ in range(len(numbers) + 1)]
    for cell in images["CELLS"]:
        runs = cell.runs(results)
        if cell.name in expected and (summary := read_json(runs[-1] / "summary.json"))["state"] == "ok":
            values = {"step_s": summary["step_time_s"]["median"], "reserved_gb": summary["memory_gb"]["reserved_peak"],
                      "busy": summary["bound"]["gpu_busy"]}  # fmt: skip
            number = sum(read_json(runs[-1] / "state.json")["started_at"] > each for each in written)
            found[number].append({key: (expected[cell.name].get(key), value) for key, value in values.items()})
    return found


def test_the_notes_on_the_image_study_state_the_errors_of_the_predictions():
    notes = notes_of("founding-images")

    def errors(part, key):
        return [100 * abs(band["expected"] / value - 1) for band, value in (each[key] for each in part)]

    def inside(part, key):
        return sum(band["low"] <= value <= band["high"] for band, value in (each[key] for each in part))

    def stated(part, key):
        return f"{median(errors(part, key)):.1f} % (at most {max(errors(part, key)):.1f} %"

    first, second, third, last = predicted_images("h200", (3, 4, 5))
    (h100,) = predicted_images("h100", ())
    assert f"The first {len(first)} cells on the H200 were predicted" in notes
    assert f"The median error of the step time was {median(errors(first, 'step_s')):.1f} %. Then" in notes
    assert f"The next {len(second)} cells on the H200" in notes
    assert f"The next {len(third)} cells on the H200" in notes
    for part in (second, third):
        for key, name in (("step_s", "the step time"), ("reserved_gb", "reserved memory")):
            assert f"The median error of {name} was {stated(part, key)})" in notes
        assert f"{inside(part, 'step_s')} of the {len(part)} times were in their range" in notes
    assert inside(third, "reserved_gb") == len(third)
    assert f"contained {inside(second, 'reserved_gb')} of the {len(second)} values of reserved memory" in notes
    assert f"The last {len(last)} cells" in notes
    assert len(h100) == len(last)
    assert stated(last, "reserved_gb") == stated(h100, "reserved_gb")
    assert f"The median error of reserved memory was {stated(last, 'reserved_gb')}) on both cards" in notes
    assert inside(last + h100, "reserved_gb") == len(last + h100)
    times = f"{stated(last, 'step_s')}) on the H200 and {stated(h100, 'step_s')}) on the H100"
    assert f"of the step time was {times}" in notes
    assert f"{inside(last + h100, 'step_s')} of the {len(last + h100)} times were in their range" in notes
    busy = [100 * each["busy"][1] for each in last + h100]
    assert f"worked for {min(busy):.0f} to {max(busy):.0f} % of the time" in notes


def test_unsloth_through_ftbench_and_its_plain_script_differ_by_at_most_2_percent():
    rounds = read_json(ROOT / "results/h200/unsloth-check.json")["rounds"]
    assert len(rounds) == 3
    for figures in rounds:
        for name in ("tokens_per_s", "allocated_gb", "reserved_gb", "mean_loss"):
            assert figures["ftbench"][name] == pytest.approx(figures["plain script"][name], rel=0.02)


def test_rounds_keep_their_number_and_ratios_pair_runs_of_a_round(tmp_path, monkeypatch):
    page = STUDIES["two-gpus"]["rounds"]
    speeds = {"round2-one": 10.0, "round2-ddp": 20.0, "round3-one": 40.0}
    monkeypatch.setitem(page.__globals__, "speed", lambda _, name: speeds.get(name))
    assert "| one |  | 10 | 40 |" in page("h100")
    assert "- ddp / one: 2.000" in page("h100")


def test_a_run_that_waited_too_long_for_the_gpu_is_stopped_at_the_end_of_the_call(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: called.extend(command) or SimpleNamespace(stderr=""))
    study.Study(tmp_path, 1)._run(TEXT["CELLS"][0], 100, 60)
    assert called[0] == "timeout"
    assert 60 < int(called[2]) <= 70


def test_a_refused_second_run_is_not_reported_as_the_first_one(tmp_path, monkeypatch):
    cell, refused = TEXT["CELLS"][0], SimpleNamespace(stderr="ftbench: no space is left\n")
    shutil.copytree(make_run(tmp_path, "a").path, tmp_path / cell.name / "a")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    assert study.Study(tmp_path, 1)._run(cell, 100, 60) == "skipped: ftbench: no space is left"


def test_verdicts_of_a_card_are_published_in_its_folder(tmp_path, monkeypatch):
    main, used = runpy.run_path(str(ROOT / "scripts/studies/parity"))["main"], []
    monkeypatch.setattr(study.machine, "gpu", lambda: {"name": "NVIDIA H200"})
    monkeypatch.setitem(main.__globals__, "train_base", lambda *_: 0)
    monkeypatch.setitem(main.__globals__, "judge", lambda _, options, end: used.append(options.results) or 0)
    monkeypatch.setattr("sys.argv", ["parity", str(tmp_path), "--groups", "fastest"])
    assert main() == 0
    assert used == [ROOT / "results/h200/parity"]
