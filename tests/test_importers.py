"""Import of logs of other tools: known fields become figures, unknown ones stay empty."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import time

import pytest

from ftbench.errors import SpecError
from ftbench.report.build import Request, report
from ftbench.report.data.collect import collect
from ftbench.report.data.facts import spec_facts
from ftbench.report.document import Report
from ftbench.report.formats import render
from ftbench.store import bundle, importers, rundir, summary
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


def test_last_step_of_an_epoch_is_short(tmp_path):
    """1,000 samples at batch 32 leave 8 for the last of 32 steps."""
    path = write_csv(tmp_path / "log.csv", [(i, 0.5 * i) for i in range(1, 65)])
    run, found = imported(path, tmp_path / "out", batch_size=32, samples=1000)
    rows, _ = read_steps(run.steps)
    assert [row.step for row in rows if row.samples != 32] == [32, 64]
    assert rows[31].samples == 8
    assert not any("full batch" in warning for warning in found["warnings"])


def test_line_with_two_batch_sizes_has_no_step_time(tmp_path):
    path = write_csv(tmp_path / "log.csv", [(i, 0.5 * i) for i in range(5, 65, 5)])
    run, _ = imported(path, tmp_path / "out", batch_size=32, samples=1000)
    assert [row.step for row in read_steps(run.steps)[0] if row.step_time_s is None] == [35]


def test_incomplete_training_is_a_warning(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,elapsed_time_sec,progress_ratio\n" + "".join(f"{i},{i},{i / 100}\n" for i in range(1, 41)))
    _, found = imported(path, tmp_path / "out")
    assert any("ends at 40 % of the planned steps" in warning for warning in found["warnings"])


def test_torn_line_is_skipped_with_a_warning(tmp_path):
    path = write_csv(tmp_path / "log.csv", [(i, 0.5 * i) for i in range(1, 31)])
    path.write_text(path.read_text() + "31,1.0,15.")
    _, found = imported(path, tmp_path / "out")
    assert found["steps"]["total"] == 30
    assert any("last line is not finished" in warning for warning in found["warnings"])


def test_imported_recipe_has_no_defaults(tmp_path):
    run, _ = imported(write_csv(tmp_path / "log.csv", [(i, 0.5 * i) for i in range(1, 31)]), tmp_path / "out")
    facts = spec_facts(run)
    assert facts["train.batch_size"] == "4"
    assert facts["imported.from"] == "the founding study's seven-column CSV"
    assert not {"train.learning_rate", "model.weights", "model.dtype", "method.alpha"} & facts.keys()


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "CSV with the columns step, epoch"),
        ("step,loss\n1,2\n", "(missing in its first line: elapsed_time_sec)"),
        ("step,elapsed_time_sec\n", "lacks a step"),
        ("step,elapsed_time_sec\n1,1.0\n2,2.0\n1,0.5\n", "goes back from step 2 to 1; a file must have one run"),
        ("step,elapsed_time_sec\n1,5.0\n2,2.0\n", "goes back"),
        ("step,elapsed_time_sec\n1,nan\n", "lacks a step (log: line 2 cannot be read and was left out)"),
        ("step,elapsed_time_sec\n,1.0\n", "lacks a step or a time"),
        ('{"loss": 2.0}\n{"loss": 1.9}\n', "unknown JSON lines; give the trainer_state.json"),
        ("{", "not valid JSON"),
        ('{"log_history": [{"step": ' + "9" * 5000 + "}]}", "not valid JSON (a number with thousands of digits)"),
        ('{"a": ' * 5000, "not valid JSON (nested too deeply)"),
        ("{}", "`log_history` is missing"),
        ('{"log_history": [1]}', "`log_history` is missing"),
        ('{"log_history": [{"step": 1}]}', "lacks a loss"),
        ('{"log_history": [{"step": 1.5, "loss": 2.0}]}', "1.5 is not a valid step number"),
        ('{"log_history": [{"step": -1, "loss": 2.0}]}', "-1 is not a valid step number"),
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


@pytest.mark.parametrize("hostile", ["9" * 400, "inf", "nan", "-5", "1e300"])
@pytest.mark.parametrize("column", range(7))
def test_line_with_an_implausible_number_is_skipped(tmp_path, column, hostile):
    lines = [[str(i), "0.5", str(0.5 * i), str(i / 30), "15", "16", "16"] for i in range(1, 31)]
    lines[7][column] = hostile
    path = tmp_path / "log.csv"
    path.write_text("\n".join(map(",".join, [COLUMNS, *lines])) + "\n")
    run, found = imported(path, tmp_path / "out")
    assert found["steps"]["total"] == 29
    assert "log.csv: line 9 cannot be read and was left out" in found["warnings"]
    assert summary.read_documents(run)[1] is None


def test_implausible_numbers_of_a_trainer_state_are_unknown(tmp_path):
    history = [{"step": i, "loss": 2.0, "grad_norm": math.nan, "epoch": 10**400, "eval_runtime": math.inf}
               for i in range(1, 6)]  # fmt: skip
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [*history, {"step": math.inf, "loss": 1.0}], "max_steps": 10**400}))
    run, found = imported(path, tmp_path / "out")
    assert found["learning"] == {"state": "not finite", "first_step": 1, "count": 5}
    rows, _ = read_steps(run.steps)
    assert [(row.step, row.epoch, row.progress_ratio) for row in rows] == [(i, None, None) for i in range(1, 6)]


def test_state_is_written_after_the_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(importers.summary, "summarise", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        imported(write_csv(tmp_path / "log.csv", [(i, 0.5 * i) for i in range(1, 31)]), tmp_path / "out")
    (run,) = rundir.find_runs(tmp_path / "out")
    assert read_json(run.state)["state"] == "running"


def test_csv_needs_the_batch_size(tmp_path):
    with pytest.raises(SpecError, match="add --batch-size"):
        imported(write_csv(tmp_path / "log.csv", [(1, 1.0)]), tmp_path / "out", batch_size=None)


@pytest.mark.parametrize(("changes", "said"), [
    ({"name": "../up"}, r"--name '\.\./up' may have up to 80 letters"), ({"method": "lorra"}, "'lorra' is no method"),
    ({"model": " "}, "--model ' ': is not a valid name"), ({"gpu": "a\nb"}, "--gpu "),
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
def test_csv_of_a_real_loop_gives_its_step_times(trained, tmp_path):
    _, found = imported(trained / "log.csv", tmp_path, batch_size=2, samples=22)
    with (trained / "log.csv").open() as file:
        elapsed = [float(line["elapsed_time_sec"]) for line in csv.DictReader(file)]
    assert found["steps"]["total"] == 11
    assert found["first_step_s"] == pytest.approx(elapsed[0], rel=1e-6)
    assert (
        0 < found["step_time_s"]["median"] < max(b - a for a, b in zip([0.0, *elapsed], elapsed, strict=False)) + 1e-9
    )
    assert found["samples_per_s"] > 0


@pytest.mark.torch
def test_imported_runs_are_reported_bundled_and_verified(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    imported(trained / "trainer_state.json", tmp_path / "out", batch_size=None, method="full")
    run, found = imported(trained / "log.csv", tmp_path / "out", dataset="japanese-alpaca", samples=22, batch_size=2)
    assert json.loads(json.dumps(as_dict(summarise(run)))) == found
    for name in ("table", "md", "csv", "json"):
        text = render(Report(collect([tmp_path / "out"])), name)
        assert "imported from log.csv" in text or name == "csv"
        assert "japanese-alpaca" in text
    bundle.make([tmp_path / "out"], tmp_path / "x.tar.zst")
    assert verify(tmp_path / "x.tar.zst").problems == []


@pytest.mark.torch
def test_command_prints_the_run_directory(trained, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ftbench", "import", str(trained / "log.csv"), "--name", "old",
         "--model", "Qwen/Qwen3-8B", "--method", "lora", "--gpu", "cpu", "--batch-size", "2",
         "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = rundir.find_runs(tmp_path / "out")
    assert done.stdout == f"{run.path}\n"
    assert run.run_id.startswith("qwen3-8b-lora-b2-")
    assert not run.reserve.exists()


# --- comparison ------------------------------------------------------------------------------------------------------


def test_imported_runs_are_compared_without_hashes(tmp_path):
    for number, (gpu, step) in enumerate((("NVIDIA H200", 0.5), ("NVIDIA H100 PCIe", 0.7))):
        log = write_csv(tmp_path / f"{number}.csv", [(i, step * i) for i in range(1, 41)])
        imported(log, tmp_path / "out", gpu=gpu, dataset="alpaca", samples=160)
    answer = report(Request([tmp_path / "out"], "json", compare="gpu", baseline="H200", strict=True)).text
    (_, other) = json.loads(answer)["comparison"]["records"]
    assert other["same_recipe"] is True
    assert other["speed_ratio"] == pytest.approx(0.5 / 0.7, rel=1e-3)
    assert other["learning"] == "cannot tell"
    assert "sha256" not in report(Request([tmp_path / "out"])).text


def test_imported_runs_are_not_repeats(tmp_path):
    for number, step in enumerate((0.5, 0.7)):
        imported(write_csv(tmp_path / f"{number}.csv", [(i, step * i) for i in range(1, 41)]), tmp_path / "out")
    runs = json.loads(report(Request([tmp_path / "out"], "json", repeats="merge")).text)["runs"]
    assert len(runs) == 2


# --- logs of other tools ---------------------------------------------------------------------------------------------


def rows_of(folder, name, content, **changes):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    run, found = imported(path, folder / "out", **changes)
    return read_steps(run.steps)[0], found


def test_llama_factory_log(tmp_path):
    lines = [
        {"current_steps": step, "total_steps": 60, "loss": 2 - step / 100, "lr": 1e-4, "epoch": step / 60,
         "percentage": step / 0.6, "elapsed_time": f"0:0{step // 60}:{step % 60:02d}", "remaining_time": "0:00:10"}
        for step in range(10, 61, 10)
    ]  # fmt: skip
    lines.append({"current_steps": 60, "total_steps": 60, "epoch": 1.0, "elapsed_time": "0:01:02"})
    rows, found = rows_of(tmp_path, "trainer_log.jsonl", "\n".join(map(json.dumps, lines)))
    assert [(row.step, row.loss, row.step_time_s) for row in rows][:2] == [(10, 1.9, 1.0), (20, 1.8, 1.0)]
    assert rows[-1].progress_ratio == 1
    assert found["samples_per_hour"] == pytest.approx(4 * 3600)
    assert any("full seconds" in warning for warning in found["warnings"])


def test_axolotl_trainer_state_has_memory(tmp_path):
    history = [{"step": i, "loss": 2.0, "memory/max_active (GiB)": 30.5, "memory/device_reserved (GiB)": 33.25}
               for i in range(1, 9)]  # fmt: skip
    rows, found = rows_of(tmp_path, "trainer_state.json", json.dumps({"log_history": history}))
    assert (rows[0].peak_memory_gb, rows[0].peak_reserved_gb) == (30.5, 33.25)
    assert found["memory_gb"]["allocated_peak"] == 30.5
    assert found["warnings"][0].endswith("step times, tokens, energy and most of the recipe are not known")


def test_rate_of_the_trainer_is_reported(tmp_path):
    history = [*({"step": i, "loss": 2.0} for i in range(1, 9)),
               {"step": 8, "train_runtime": 20.0, "train_samples_per_second": 1.5, "train_loss": 2.0}]  # fmt: skip
    _, found = rows_of(tmp_path, "trainer_state.json", json.dumps({"log_history": history}))
    assert (found["samples_per_s"], found["samples_per_hour"]) == (1.5, 5400)
    assert found["steps"]["steady"] == 0
    assert any("warm-up and evaluations included: 1.5 samples/s" in warning for warning in found["warnings"])


def test_wandb_history(tmp_path):
    lines = ['"_step","_runtime","_timestamp","train/global_step","train/loss","train/grad_norm","eval/loss"']
    lines += [f"{i},{30 + i * 2},1731000000,{i * 5},{2 - i / 100},0.5," for i in range(1, 30)]
    rows, found = rows_of(tmp_path, "history.csv", "\n".join([*lines, "30,100,1731000000,150,,,1.25"]))
    assert [(row.step, row.step_time_s) for row in rows][:3] == [(5, None), (10, 0.4), (15, 0.4)]
    assert (rows[0].loss, rows[0].grad_norm, rows[-1].phase, rows[-1].loss) == (1.99, 0.5, "evaluate", 1.25)
    assert found["samples_per_hour"] == pytest.approx(4 / 0.4 * 3600)


def test_wandb_panel_with_one_run(tmp_path):
    text = (
        '"Step","fast - train/loss","fast - train/loss__MIN","fast - train/loss__MAX"\n1,2.0,2.0,2.0\n2,1.5,1.5,1.5\n'
    )
    rows, _ = rows_of(tmp_path, "panel.csv", text)
    assert [(row.step, row.loss) for row in rows] == [(1, 2.0), (2, 1.5)]
    with pytest.raises(SpecError, match="has several runs"):
        rows_of(tmp_path, "two.csv", '"Step","a - train/loss","b - train/loss"\n1,2.0,2.0\n')


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "events"))
    for step in range(1, 20):
        values = [Summary.Value(tag="train/loss", simple_value=2 - step / 8), Summary.Value(tag="train/epoch",
                  simple_value=step / 20)]  # fmt: skip
        writer.add_event(Event(wall_time=1000 + step / 2, step=step, summary=Summary(value=values)))
    writer.close()
    (path,) = (tmp_path / "events").iterdir()
    rows, found = rows_of(tmp_path, path.name, path.read_bytes())
    assert [(row.step, row.loss, row.step_time_s) for row in rows][:2] == [(1, 1.875, None), (2, 1.75, 0.5)]
    assert found["step_time_s"]["median"] == pytest.approx(0.5)
    torn, _ = rows_of(tmp_path, "torn." + path.name, path.read_bytes()[:-7], gpu="NVIDIA H100")
    assert len(torn) == 18


@pytest.mark.parametrize(("name", "content"), [
    ("events.out.tfevents.1", b"\xff" * 100), ("trainer_log.jsonl", b'{"current_steps": 1, "loss": 2}\n{"x'),
    ("x.csv", b"_step,x\n1,2\n"), ("y.csv", b'_step,train/loss\n"1\r"2,3\r"x\n'),
    ("z.csv", b"_step,train/loss\n1," + b"9" * 200_000 + b"\n"),
    ("long.jsonl", b'{"current_steps": 1, "loss": 2, "elapsed_time": "' + b"9" * 5000 + b':00:00"}\n{"x'),
    ("events.out.tfevents.2", (5).to_bytes(8, "little") + b"1234" + b"\xff" * 9),
    ("log.jsonl", b'{"current_steps": 1.5, "loss": 2}'),
])  # fmt: skip
def test_broken_log_is_refused(tmp_path, name, content):
    csv.field_size_limit(2**31 - 1)  # as reading a data set leaves it
    with pytest.raises(SpecError, match=name):
        rows_of(tmp_path, name, content)
    assert not (tmp_path / "out").exists()


# --- Megatron --------------------------------------------------------------------------------------------------------

# Lines as Megatron-LM prints them: a run of 8 RTX 4090 with four pipeline stages, whose ranks write into one another.
MEGATRON_LM = """\
------------------------ arguments ------------------------
  seq_length ...................................... 4096
-------------------- end of arguments ---------------------
Theoretical memory footprints: weight and optimizer=10764.77 MB
[Rank 2] (after 1 iterations) memory (MB) | allocated: 9334.3779296875 | max allocated: 12680.6357421875 | \
reserved: 13236.0 | max reserved: 13236.0[Rank 6] (after 1 iterations) memory (MB) | allocated: 10850.67578125 | \
max allocated: 10850.70751953125 | reserved: 11000.0 | max reserved: 11000.0

[Rank 0] (after 1 iterations) memory (MB) | allocated: 10770.3779296875 | max allocated: 15754.88818359375 | \
reserved: 16334.0 | max reserved: 16334.0
 [2025-08-01 07:19:37] iteration        1/    5000 | consumed samples:          128 | elapsed time per iteration (ms): \
19138.8 | throughput per GPU (TFLOP/s/GPU): 80.2 | learning rate: 6.976744E-08 | global batch size:   128 | \
lm loss: 1.043863E+01 | loss scale: 1.0 | grad norm: 26.203 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
 [2025-08-01 07:19:50] iteration        2/    5000 | consumed samples:          256 | elapsed time per iteration (ms): \
12936.1 | throughput per GPU (TFLOP/s/GPU): 118.7 | learning rate: 1.395349E-07 | global batch size:   128 | \
lm loss: 1.044022E+01 | loss scale: 1.0 | grad norm: 26.305 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
 validation loss at iteration 2 | lm loss value: 2.724416E+00 | lm loss PPL: 1.524780E+01 |
 [2025-08-01 07:20:03] iteration        3/    5000 | consumed samples:          384 | elapsed time per iteration (ms): \
12978.1 | throughput per GPU (TFLOP/s/GPU): 118.3 | learning rate: 2.093023E-07 | global batch size:   128 | \
lm loss: 1.044375E+01 | loss scale: 1.0 | grad norm: 25.930 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
"""
# And Megatron-Bridge: decimal gigabytes, and the next rank's words in the same line.
BRIDGE = """\
[2025-12-19 10:49:15] iteration        1/       1 | consumed samples:          128 | elapsed time per iteration (ms): \
20289.1 | learning rate: 3.000000E-05 | global batch size:   128 | lm loss: 1.258695E+01 | loss scale: 1.0 | \
grad norm: 10.275 | number of skipped iterations:   0 | number of nan iterations:   0 |Number of parameters in \
transformer layers in billions:  6.98
[Rank 0] (after 1 iterations) memory (GB) | mem-allocated-gigabytes: 51.072 | mem-active-gigabytes: 51.072 | \
mem-inactive-gigabytes: 10.971 | mem-reserved-gigabytes: 216.89 | mem-max-allocated-gigabytes: 194.41 | \
mem-max-active-gigabytes: 195.46 | mem-max-inactive-gigabytes: 14.369 | mem-max-reserved-gigabytes: 216.89 | \
mem-alloc-retires: 0 | mem-allocated-count: 571
"""


def megatron(tmp_path, text, **changes):
    (tmp_path / "log-0.out").write_text(text)
    return imported(tmp_path / "log-0.out", tmp_path / "out", batch_size=None, **changes)


def test_megatron_log(tmp_path):
    run, summary = megatron(tmp_path, MEGATRON_LM)
    rows = [row for row in read_steps(run.steps)[0] if row.phase == "train"]
    assert [row.step for row in rows] == [1, 2, 3]
    assert [row.step_time_s for row in rows] == pytest.approx([19.1388, 12.9361, 12.9781])
    assert rows[2].elapsed_time_sec == pytest.approx(19.1388 + 12.9361 + 12.9781)
    assert [row.loss for row in rows] == pytest.approx([10.43863, 10.44022, 10.44375])
    assert (rows[1].grad_norm, rows[1].learning_rate) == (26.305, 1.395349e-07)
    assert {row.samples for row in rows} == {128}
    assert {row.padded_tokens for row in rows} == {128 * 4096}
    assert {row.real_tokens for row in rows} == {None}
    assert rows[0].peak_memory_gb == pytest.approx(15754.88818359375 / 1024)  # the rank with most
    assert rows[0].peak_reserved_gb == pytest.approx(16334 / 1024)
    assert rows[1].peak_memory_gb is None
    assert summary["loss"]["eval"] == 2.724416
    notes = " ".join(summary["warnings"])
    assert "(Megatron's log), not recorded by ftbench: energy and most of the recipe are not known" in notes
    assert "the global batch of all GPUs" in notes
    assert "118.3 TFLOP/s per GPU (median)" in notes
    assert "memory is the highest of all ranks, up to step 1" in notes


def test_megatron_bridge_log_has_decimal_gigabytes(tmp_path):
    run, summary = megatron(tmp_path, BRIDGE)
    (row,) = read_steps(run.steps)[0]
    assert row.peak_memory_gb == pytest.approx(194.41e9 / 2**30)
    assert row.peak_reserved_gb == pytest.approx(216.89e9 / 2**30)
    assert (row.step_time_s, row.loss, row.padded_tokens) == (20.2891, 12.58695, None)
    assert "tokens, energy and most of the recipe are not known" in summary["warnings"][0]


def test_megatron_interval_is_a_mean(tmp_path):
    line = BRIDGE.splitlines()[0]
    text = "".join(
        line.replace("iteration        1/       1", f"iteration {step:8}/{100:8}").replace("20289.1", ms) + "\n"
        for step, ms in ((10, "2000.0"), (20, "1000.0"), (30, "1000.0"))
    )
    run, summary = megatron(tmp_path, text)
    assert [row.elapsed_time_sec for row in read_steps(run.steps)[0]] == [20.0, 30.0, 40.0]
    assert any("mean of up to 10 steps" in warning for warning in summary["warnings"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text + text, "goes back from step 3 to 1; a file must have one run"),
        (lambda text: text.replace("global batch size", "batch"), "iteration 1 lacks global batch size"),
        (lambda text: text.replace("(ms): 12936.1", "(ms): -1"), "iteration 2 lacks"),
        (lambda text: text.replace("/    5000", "/" + "9" * 40), "not a CSV"),
    ],
)
def test_broken_megatron_log_is_refused(tmp_path, change, said):
    with pytest.raises(SpecError, match=said):
        megatron(tmp_path, change(MEGATRON_LM))


def test_missing_megatron_loss_is_nan(tmp_path):
    text = MEGATRON_LM.replace("lm loss: 1.044375E+01 | ", "").replace(
        "of nan iterations:   0 |\n", "of nan iterations:   1 |\n"
    )
    run, summary = megatron(tmp_path, text)
    assert math.isnan([row for row in read_steps(run.steps)[0] if row.phase == "train"][2].loss)
    assert any("had a NaN loss" in warning for warning in summary["warnings"])
