"""Import of logs of other tools: known fields become figures, unknown ones stay empty."""

from __future__ import annotations

import csv
import json
import math
import time

import pytest

from ftbench.errors import SpecError
from ftbench.report.build import Request, report
from ftbench.report.data.collect import collect
from ftbench.report.document import Report
from ftbench.report.formats import render
from ftbench.store import bundle, rundir
from ftbench.store.importers import COLUMNS, About, import_run
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.store.summary import as_dict, summarise
from ftbench.store.verify import verify

ABOUT = About("study", "Qwen/Qwen3-8B", "lora", "NVIDIA H200", batch_size=4)


def write_csv(path, lines, columns=COLUMNS):
    """A file as the study's logger writes it: `lines` are of step and elapsed seconds."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        last = lines[-1][0] if lines else 1
        for step, elapsed in lines:
            writer.writerow([step, step / last, elapsed, step / last, 15.5, 77.5, 77.3])
    return path


def imported(path, out, **changes):
    values = {name: getattr(ABOUT, name) for name in ABOUT.__slots__} | changes
    run = import_run(path, About(**values), out)
    return run, read_json(run.summary)


# --- the study's CSV -------------------------------------------------------------------------------------------------


def test_line_per_step_gives_step_times_and_rates(tmp_path):
    lines = [(1, 3.0), *((step, 3.0 + 0.5 * (step - 1)) for step in range(2, 31))]
    run, found = imported(write_csv(tmp_path / "log.csv", lines), tmp_path / "out")
    assert found["first_step_s"] == 3.0
    assert found["time_to_steady_s"] == 3.0
    assert found["step_time_s"]["median"] == pytest.approx(0.5)
    assert found["samples_per_hour"] == pytest.approx(4 / 0.5 * 3600)
    assert found["memory_gb"]["allocated_peak"] == 77.3
    assert (found["gpu"], found["model"], found["method"]) == ("NVIDIA H200", "Qwen/Qwen3-8B", "lora")
    assert [row.step for row in read_steps(run.steps)[0]] == list(range(1, 31))


@pytest.mark.parametrize("seconds", [0.4, 0.6, 0.9])
def test_rounded_times_give_the_mean_step_time(tmp_path, seconds):
    """With whole seconds, several steps have the same time."""
    lines = [(step, int(step * seconds)) for step in range(1, 201)]
    found = imported(write_csv(tmp_path / "log.csv", lines), tmp_path / "out")[1]
    assert found["step_time_s"]["mean"] == pytest.approx(seconds, rel=0.02)
    assert found["samples_per_hour"] == pytest.approx(4 / seconds * 3600, rel=0.02)
    assert found["steps"]["total"] == pytest.approx(200, abs=2)


def test_a_last_line_without_a_line_break_counts(tmp_path):
    path = write_csv(tmp_path / "log.csv", [(step, 0.5 * step) for step in range(1, 31)])
    path.write_bytes(path.read_bytes().rstrip())
    run, _ = imported(path, tmp_path / "out")
    assert [row.step for row in read_steps(run.steps)[0]] == list(range(1, 31))


def test_byte_order_mark_is_ignored(tmp_path):
    path = write_csv(tmp_path / "log.csv", [(step, 0.5 * step) for step in range(1, 31)])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert imported(path, tmp_path / "out")[1]["step_time_s"]["median"] == pytest.approx(0.5)


def test_missing_fields_stay_empty(tmp_path):
    run, found = imported(write_csv(tmp_path / "log.csv", [(i, 0.5 * i) for i in range(1, 31)]), tmp_path / "out")
    assert found["tokens_per_s"] == {"real": None, "padded": None, "label": None}
    assert found["loss"] == {"first": None, "last": None, "eval": None}
    assert found["parameters"] == {"total": None, "trainable": None}
    assert found["energy"]["joules"] is None
    assert found["mfu"] is None
    assert found["optimizations"] == ["unknown"]
    assert found["phases_s"] == found["dataset"] == {}
    (first, second) = found["warnings"]
    assert first.startswith("imported from log.csv (the founding study's seven-column CSV), not recorded by ftbench")
    assert "full batch" in second
    assert read_json(run.state)["imported"]["sha256"]


def test_line_every_ten_steps_is_a_mean(tmp_path):
    lines = [(10, 12.0), *((step, 12.0 + 0.5 * (step - 10)) for step in range(20, 251, 10))]
    _, found = imported(write_csv(tmp_path / "log.csv", lines), tmp_path / "out")
    assert found["first_step_s"] is None
    assert found["time_to_steady_s"] is None
    assert found["step_time_s"]["median"] == pytest.approx(0.5)
    assert found["samples_per_hour"] == pytest.approx(4 / 0.5 * 3600)
    assert any("mean of up to 10 steps" in warning for warning in found["warnings"])
    assert not any("wall clock" in warning for warning in found["warnings"])


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "CSV with the columns step, epoch"),
        ("step,loss\n1,2\n", "(missing in its first line: elapsed_time_sec)"),
        ("step,elapsed_time_sec\n", "contains no training step"),
        ("step,elapsed_time_sec\n1,1.0\n2,2.0\n1,0.5\n", "goes back from step 2 to 1; a file must have one run"),
        ("step,elapsed_time_sec\n1,nan\n", "contains no training step (log: line 2 cannot be read and was left out)"),
        ("step,elapsed_time_sec\n,1.0\n", "has no step number or no time"),
        ('{"loss": 2.0}\n{"loss": 1.9}\n', "not valid JSON"),
        ("{", "not valid JSON"),
        ('{"log_history": [1]}', "`log_history` is missing"),
        ('{"log_history": [{"step": 1}]}', "contains no loss"),
        ('{"log_history": [{"step": 1.5, "loss": 2.0}]}', "1.5 is not a valid step number"),
        ('{"log_history": [{"step": 1, "loss": 2.0}]}', "add --batch-size"),
    ],
)
def test_other_file_is_refused_and_creates_nothing(tmp_path, text, said):
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        imported(path, tmp_path / "out", batch_size=None)
    assert str(path) in str(refused.value)
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_without_step_times_the_bottleneck_is_unknown(ftbench, tmp_path):
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": [{"loss": 2.0, "step": 1}, {"loss": 1.5, "step": 2}], "max_steps": 2}))
    run, _ = imported(file, tmp_path, gpu="cpu")
    assert "verdict: the bottleneck is unknown: " in ftbench("show", run.path)[1]


def test_implausible_numbers_of_a_trainer_state_are_unknown(tmp_path):
    history = [{"step": i, "loss": 2.0, "grad_norm": math.nan, "epoch": 10**400, "eval_runtime": math.inf}
               for i in range(1, 6)]  # fmt: skip
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [*history, {"step": math.inf, "loss": 1.0}], "max_steps": 10**400}))
    run, found = imported(path, tmp_path / "out")
    assert found["learning"] == {"state": "not finite", "first_step": 1, "count": 5}
    rows, _ = read_steps(run.steps)
    assert [(row.step, row.epoch, row.progress_ratio) for row in rows] == [(i, None, None) for i in range(1, 6)]


@pytest.mark.parametrize(("changes", "said"), [
    ({"name": "../up"}, r"--name '\.\./up' may have up to 80 letters"),
    ({"method": "lorra"}, "'lorra' is not a method"),
])  # fmt: skip
def test_invalid_description_is_refused(tmp_path, changes, said):
    with pytest.raises(SpecError, match=f"import: {said}"):
        imported(write_csv(tmp_path / "log.csv", [(1, 1.0)]), tmp_path / "out", **changes)


def test_same_file_is_imported_once(tmp_path):
    path = write_csv(tmp_path / "log.csv", [(i, 0.5 * i) for i in range(1, 31)])
    run, _ = imported(path, tmp_path / "out")
    with pytest.raises(SpecError, match="was imported before") as refused:
        imported(path, tmp_path / "out")
    assert str(run.path) in str(refused.value)
    imported(path, tmp_path / "out", gpu="NVIDIA H100 80GB HBM3")
    assert len(rundir.find_runs(tmp_path / "out")) == 2


# --- the log of a real Trainer ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A plain transformers Trainer with a logger like the study's: its trainer_state.json and its CSV."""
    torch = pytest.importorskip("torch")
    import transformers

    folder = tmp_path_factory.mktemp("trainer")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip

    class Logger(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            with (folder / "log.csv").open("a", newline="") as file:
                if state.global_step == 1:
                    csv.writer(file).writerow(COLUMNS)
                seconds, progress = time.perf_counter() - self.begin, state.global_step / state.max_steps
                csv.writer(file).writerow([state.global_step, state.epoch, seconds, progress, 0.1, 0.2, 0.15])

    ids = torch.randint(0, 64, (22, 12), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, num_train_epochs=1, logging_steps=2, use_cpu=True,
        report_to="none", eval_strategy="epoch", save_strategy="no", disable_tqdm=True, per_device_eval_batch_size=2,
    )  # fmt: skip
    trainer = transformers.Trainer(
        transformers.Qwen3ForCausalLM(config),
        arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[Logger()],
    )
    trainer.train()
    trainer.save_state()
    return folder


@pytest.mark.torch
def test_trainer_state_has_losses_without_times(trained, tmp_path):
    run, found = imported(trained / "trainer_state.json", tmp_path, batch_size=None, gpu=None)
    state = json.loads((trained / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    (evaluated,) = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert found["loss"] == pytest.approx({"first": losses[0], "last": losses[-1], "eval": evaluated})
    assert found["batch_size"] == 2
    assert found["step_time_s"] == found["tokens_per_s"] == {}
    assert found["first_step_s"] is None
    assert found["phases_s"]["train"] == pytest.approx(state["log_history"][-1]["train_runtime"])
    assert any("step times, memory, tokens" in warning for warning in found["warnings"])
    assert any("the Trainer's own rate" in warning for warning in found["warnings"])
    assert not any("steady steps" in warning for warning in found["warnings"])
    assert [row.step for row in read_steps(run.steps)[0] if row.phase == "train"] == [2, 4, 6, 8, 10]


@pytest.mark.torch
def test_imported_runs_are_reported_bundled_and_verified(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    imported(trained / "trainer_state.json", tmp_path / "out", batch_size=None, method="full")
    run, found = imported(trained / "log.csv", tmp_path / "out", dataset="japanese-alpaca", batch_size=2)
    assert json.loads(json.dumps(as_dict(summarise(run)))) == found
    for name in ("table", "md", "csv", "json"):
        text = render(Report(collect([tmp_path / "out"])), name)
        assert "imported from log.csv" in text or name == "csv"
        assert "japanese-alpaca" in text
    bundle.make([tmp_path / "out"], tmp_path / "x.tar.zst")
    assert verify(tmp_path / "x.tar.zst").problems == []


# --- comparison ------------------------------------------------------------------------------------------------------


def test_imported_runs_are_compared_without_hashes(tmp_path):
    for number, (gpu, step) in enumerate((("NVIDIA H200", 0.5), ("NVIDIA H100 PCIe", 0.7))):
        log = write_csv(tmp_path / f"{number}.csv", [(i, step * i) for i in range(1, 41)])
        imported(log, tmp_path / "out", gpu=gpu, dataset="alpaca")
    answer = report(Request([tmp_path / "out"], "json", compare="gpu", baseline="H200")).text
    (_, other) = json.loads(answer)["comparison"]["records"]
    assert other["same_recipe"] is True
    assert other["speed_ratio"] == pytest.approx(0.5 / 0.7, rel=1e-3)
    assert "sha256" not in report(Request([tmp_path / "out"])).text


def rows_of(folder, name, content, **changes):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    run, found = imported(path, folder / "out", **changes)
    return read_steps(run.steps)[0], found


def test_rate_of_the_trainer_is_reported(tmp_path):
    history = [*({"step": i, "loss": 2.0} for i in range(1, 9)),
               {"step": 8, "train_runtime": 20.0, "train_samples_per_second": 1.5, "train_loss": 2.0}]  # fmt: skip
    _, found = rows_of(tmp_path, "trainer_state.json", json.dumps({"log_history": history}))
    assert (found["samples_per_s"], found["samples_per_hour"]) == (1.5, 5400)
    assert found["steps"]["steady"] == 0
    assert any("warm-up and evaluations included: 1.5 samples/s" in warning for warning in found["warnings"])
