"""A successful run: its output, its files and its figures."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from commands import Left, trained_once
from ftbench.core.rows import StepRow
from ftbench.store import run_warnings, rundir, summary
from ftbench.store.steps import read_steps

pytest.importorskip("torch", reason="training libraries are not installed")


pytestmark = pytest.mark.torch

FILES = {
    "spec.yaml", "spec.json", "machine.json", "applied.json", "steps.csv", "phases.json", "summary.json", "state.json",
    "log.txt",
}  # fmt: skip
# 10 samples in batches of 2, two batches a step: 5 batches make steps of 2, 2 and 1 batches.
SHORT_LAST_STEP = {
    "dataset": {"name": "sample", "samples": 10, "max_length": 64, "eval_samples": 4},
    "train": {"batch_size": 2, "gradient_accumulation_steps": 2, "epochs": 2},
    "measure": {"eval": "epoch"},
}
MANY_STEPS = {
    "dataset": {"name": "sample", "samples": 60, "max_length": 128},
    "train": {"batch_size": 2, "max_steps": 40, "learning_rate": 1e-3},
}


def rows(command: Left, phase: str) -> list[StepRow]:
    found, warnings = read_steps(command.run.steps)
    assert not warnings
    return [row for row in found if row.phase == phase]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str, cache: Path) -> Path:
    """A folder of this session that all its test processes share."""
    base = tmp_path_factory.getbasetemp()
    return (base if worker_id == "master" else base.parent) / "shared-runs"


@pytest.fixture(scope="session")
def command(shared: Path) -> Left:
    return trained_once(shared / "short", cold=True, **SHORT_LAST_STEP)


@pytest.fixture(scope="session")
def longer(shared: Path) -> Left:
    return trained_once(shared / "longer", **MANY_STEPS)


class TestARunThatGoesWell:
    def test_stdout_is_one_json_document_with_the_summary_that_is_in_the_file(self, command):
        document = command.document()
        assert list(document) == ["run_dir", "state", "summary"]
        assert document["run_dir"] == str(command.run.path)
        assert document["state"] == "ok"
        assert document["summary"] == json.loads(command.run.summary.read_text())

    def test_every_file_of_a_run_is_there_and_nothing_of_the_work_is_left(self, command):
        assert {path.name for path in command.run.path.iterdir()} == FILES
        assert summary.read_documents(command.run)[1] is None

    def test_the_spec_is_kept_as_written_and_as_resolved(self, command):
        assert json.loads(command.run.spec_yaml.read_text())["train"] == SHORT_LAST_STEP["train"]
        assert json.loads(command.run.spec_json.read_text())["train"]["precision"] in ("fp32", "bf16")

    def test_phases_are_disjoint_and_add_up_to_the_wall_time(self, command):
        phases = dict(command.summary()["phases_s"])
        total = phases.pop("total")
        assert sum(phases.values()) == pytest.approx(total, rel=0.02, abs=0.2)
        assert total == pytest.approx(command.state()["wall_s"], rel=0.02, abs=0.2)  # both from the child's start
        assert all(seconds >= 0 for seconds in phases.values())
        listed = rundir.read_json(command.run.phases)["phases"]
        assert all(a["end_s"] == b["start_s"] for a, b in pairwise(listed))

    def test_an_epoch_that_ends_in_a_short_step_is_counted_right(self, command):
        steps = rows(command, "train")
        assert [row.step for row in steps] == [1, 2, 3, 4, 5, 6]
        assert [row.samples for row in steps] == [4, 4, 2, 4, 4, 2]
        assert [row.epoch for row in steps] == pytest.approx([0.4, 0.8, 1.0, 1.4, 1.8, 2.0])
        assert [row.progress_ratio for row in steps] == pytest.approx([i / 6 for i in range(1, 7)])

    def test_tokens_of_an_epoch_are_those_of_the_data_set(self, command):
        steps, data = rows(command, "train"), command.summary()["dataset"]
        for epoch in (steps[:3], steps[3:]):
            assert sum(row.real_tokens for row in epoch) == data["tokens"]["total"]
            assert sum(row.label_tokens for row in epoch) == data["label_tokens"]
        assert all(row.label_tokens <= row.real_tokens <= row.padded_tokens for row in steps)
        assert all(row.padded_tokens <= row.samples * row.longest_sequence for row in steps)

    def test_every_epoch_is_evaluated_once_on_all_samples_set_aside(self, command):
        found = rows(command, "evaluate")
        assert [row.step for row in found] == [3, 6]
        assert [row.samples for row in found] == [4, 4]
        assert all(row.loss > 0 and row.step_time_s > 0 for row in found)
        assert command.summary()["loss"]["eval"] == found[-1].loss

    def test_the_loss_of_a_step_is_the_mean_over_its_tokens(self, command):
        """A short step at the end of an epoch is not scaled down by the accumulation it did not do."""
        untrained = 7.62  # ln(2048): a random model of 2,048 words has learned nothing
        assert all(row.loss == pytest.approx(untrained, rel=0.03) for row in rows(command, "train"))


class TestFortySteps:
    def test_the_steps_add_up_to_the_wall_clock_of_their_window(self, longer):
        found, _ = read_steps(longer.run.steps)
        steps = [row for row in found if row.phase == "train"]
        warm = longer.summary()["steps"]["warmup"]
        wall = steps[-1].elapsed_time_sec - steps[warm - 1].elapsed_time_sec
        assert sum(row.step_time_s for row in steps[warm:]) == pytest.approx(wall, rel=0.02)
        assert abs(run_warnings.wall_gap(found, steps, warm)) < 0.02

    def test_the_parts_of_a_step_fit_into_it(self, longer):
        for row in rows(longer, "train"):
            assert row.data_time_s + row.forward_backward_s + row.optimizer_s <= row.step_time_s * 1.001

    def test_anyone_can_compute_the_summary_again(self, longer):
        again = json.loads(json.dumps(summary.as_dict(summary.summarise(longer.run))))
        assert again == longer.summary()
