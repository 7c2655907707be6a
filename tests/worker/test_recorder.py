"""The recorder with a plain torch loop and with a plain transformers.Trainer."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import pytest
import torch

from conftest import spec_of
from ftbench.launch.progress import Progress
from ftbench.store.ranks import merge, read_ranks
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter, read_steps
from ftbench.worker import training_run
from ftbench.worker.measure.batch_count import COUNT, BatchCount, count_of
from ftbench.worker.measure.hf_adapter import HfRecording, mean_loss
from ftbench.worker.measure.recorder import Recorder
from ftbench.worker.outcome import Phases, Terminated

CPU = torch.device("cpu")


@pytest.fixture
def recorder(tmp_path):
    return Recorder(StepsWriter(tmp_path / "steps.csv"), CPU)


def rows(tmp_path):
    found, warnings = read_steps(tmp_path / "steps.csv")
    assert warnings == []
    return found


def test_plain_loop_is_recorded(recorder, tmp_path):
    model, optimizer_steps = torch.nn.Linear(4, 1), 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    recorder.start(planned_steps=optimizer_steps)
    for step in range(optimizer_steps):
        recorder.begin_step()
        total = 0.0
        for longest in (4, 3):
            loss = model(torch.ones(3, 4)).square().mean() / 2
            loss.backward()
            total += loss.item()
            count = BatchCount(real=10 + step, padded=12, labels=9, samples=3, longest=longest)
            recorder.micro_batch(count, loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        recorder.begin_optimizer()
        optimizer.step()
        optimizer.zero_grad()
        recorder.end_step(norms[-1], learning_rate=0.5, epoch=step / 5)
        losses.append(total)
    recorder.finish()
    found = rows(tmp_path)
    assert [row.step for row in found] == [1, 2, 3, 4, 5]
    assert [row.loss for row in found] == pytest.approx(losses)
    assert [row.grad_norm for row in found] == pytest.approx([float(norm) for norm in norms])
    assert {row.longest_sequence for row in found} == {4}
    assert [row.progress_ratio for row in found] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    first = found[0]
    assert (first.real_tokens, first.padded_tokens, first.label_tokens, first.samples) == (20, 24, 18, 6)
    assert (first.longest_sequence, first.learning_rate, first.phase, first.rank) == (4, 0.5, "train", 0)
    assert all(row.data_time_s + row.forward_backward_s + row.optimizer_s <= row.step_time_s for row in found)
    assert min(row.optimizer_s for row in found) > 0
    assert sum(row.step_time_s for row in found) < 1.5 * found[-1].elapsed_time_sec


def test_columns_of_a_row_are_of_its_step_or_evaluation(recorder, tmp_path, monkeypatch):
    """Neither the check after the first step nor an evaluation is part of the next step."""
    now, held = [0.0], {"peak_memory_gb": 9.0}
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    recorder.memory = SimpleNamespace(read=held.copy, reset=lambda: held.update(peak_memory_gb=0.0))
    over = {"take": lambda: None, "over": lambda begin, end: {"power_w": begin, "energy_j": end}, "latest": math.inf}
    recorder.sampler = SimpleNamespace(**over)
    check = training_run.AfterFirstStep(SimpleNamespace(recorder=recorder), lambda: now.__setitem__(0, 4.0))
    for at, peak, call, *given in (
        (0, 9, recorder.start), (1, 5, recorder.begin_step), (3, 0, recorder.end_step),
        (3, 0, check.on_step_end, None, SimpleNamespace(global_step=1), None),
        (6, 2, recorder.begin_step), (9, 3, recorder.end_step),
        (10, 8, recorder.begin_evaluation), (20, 7, recorder.end_evaluation, BatchCount(), 1.0),
        (21, 1, recorder.begin_step), (24, 4, recorder.end_step),
    ):  # fmt: skip
        now[0], held["peak_memory_gb"] = at, max(held["peak_memory_gb"], peak)
        call(*given)
    recorder.finish()
    names = ("step_time_s", "data_time_s", "elapsed_time_sec", "power_w", "energy_j", "peak_memory_gb")
    assert [tuple(getattr(row, name) for name in names) for row in rows(tmp_path)] == [
        (3, 1, 3, 0, 3, 5), (5, 2, 9, 4, 9, 3), (10, None, 20, 10, 20, 7), (4, 1, 24, 20, 24, 4),
    ]  # fmt: skip


def test_signal_during_the_last_wait_loses_no_step(recorder, tmp_path, monkeypatch):
    def interrupted(mark=None):
        raise Terminated

    recorder.start()
    recorder.begin_step()
    recorder.end_step()
    with monkeypatch.context() as patch:
        patch.setattr(recorder.clock, "wait", interrupted)
        with pytest.raises(Terminated):
            recorder.finish()
    recorder.finish()  # as the worker does after an error
    assert [row.step for row in rows(tmp_path)] == [1]


def test_unreported_values_are_empty(recorder, tmp_path):
    recorder.start()
    recorder.begin_step()
    recorder.end_step()
    recorder.finish()
    (row,) = rows(tmp_path)
    assert row.step_time_s >= 0
    unknown = ("loss", "grad_norm", "learning_rate", "real_tokens", "samples", "optimizer_s", "progress_ratio", "epoch")
    assert [name for name in unknown if getattr(row, name) is not None] == []


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_are_recorded(recorder, tmp_path, value, as_tensor):
    recorder.start()
    for loss, norm in ((1.0, value), (value, 1.0), (1.0, None)):
        recorder.begin_step()
        recorder.micro_batch(None, torch.tensor(loss))
        recorder.end_step(torch.tensor(norm) if as_tensor and norm is not None else norm)
    recorder.finish()
    assert recorder.without_loss == 0
    assert [str(row.loss) for row in rows(tmp_path)] == ["1.0", str(value), "1.0"]
    assert [str(row.grad_norm) for row in rows(tmp_path)] == [str(value), "1.0", "None"]


def test_last_steps_without_a_loss_are_counted(recorder):
    recorder.start()
    for loss in (math.nan, 1.0, math.inf, math.nan):
        recorder.begin_step()
        recorder.micro_batch(None, torch.tensor(loss))
        recorder.end_step()
    recorder.finish()
    assert recorder.without_loss == 2


def test_position_follows_the_step(recorder):
    seen = []
    recorder.start()
    for call in (
        recorder.begin_step, lambda: recorder.micro_batch(None, None), recorder.begin_optimizer, recorder.end_step,
        recorder.begin_evaluation, lambda: recorder.end_evaluation(BatchCount(), 1.0),
    ):  # fmt: skip
        call()
        seen.append(recorder.position)
    recorder.finish()
    assert seen == ["forward", "forward", "optimizer", "data", "evaluate", "data"]


def test_each_rank_writes_its_own_file(tmp_path, monkeypatch):
    spec = spec_of()
    spec = spec.model_copy(update={"launch": spec.launch.model_copy(update={"gpus": 2})})
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        made = training_run.recorder_of(spec, RunDir(tmp_path, rank))
        made.start()
        made.begin_step()
        made.micro_batch(BatchCount(real=5, padded=8, labels=5, samples=1, longest=5), torch.tensor(1.0 + rank))
        made.end_step()
        made.finish()
    (row,) = merge(read_ranks(RunDir(tmp_path))[0])
    assert (row.real_tokens, row.loss, row.rank) == (10, 1.5, None)
    assert not RunDir(tmp_path).steps.exists()


# --- a plain transformers.Trainer ------------------------------------------------------------------------------------


class Texts(torch.utils.data.Dataset):
    """Eleven samples of 5 to 8 tokens, padded to 8. The first two tokens have no loss."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        length = 5 + index % 4
        ids = torch.tensor([1 + (index + place) % 50 for place in range(length)] + [0] * (8 - length))
        real = torch.arange(8) < length
        labels = torch.where(real & (torch.arange(8) >= 2), ids, -100)
        return {"input_ids": ids, "attention_mask": real.long(), "labels": labels}


@pytest.fixture
def trainer(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments, default_data_collator

    class CountedTrainer(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs.pop(COUNT)
            return super().compute_loss(model, inputs, *args, **kwargs)

    def collate(rows):
        batch = default_data_collator(rows)
        real = [row["input_ids"][row["attention_mask"] == 1].numpy() for row in rows]
        labels = int((batch["labels"][:, 1:] != -100).sum())
        return batch | {COUNT: count_of(real, batch["input_ids"].numel(), labels)}

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    ))  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_train_epochs=2, logging_strategy="steps", logging_steps=1, save_strategy="no", eval_strategy="epoch",
        report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=1e-2, max_grad_norm=0.5,
    )  # fmt: skip
    return CountedTrainer(
        model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts(), data_collator=collate
    )


def test_plain_trainer_is_recorded(trainer, recorder, tmp_path):
    HfRecording(recorder).attach(trainer)
    trainer.train()
    recorder.finish()
    train = [row for row in rows(tmp_path) if row.phase == "train"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [row.step for row in train] == [entry["step"] for entry in logged] == [1, 2, 3, 4, 5, 6]
    assert [row.loss for row in train] == pytest.approx([entry["loss"] for entry in logged], abs=1e-4)
    assert [row.grad_norm for row in train] == pytest.approx([entry["grad_norm"] for entry in logged], rel=1e-4)
    assert [row.learning_rate for row in train][1:] == pytest.approx([e["learning_rate"] for e in logged][1:])
    assert [row.samples for row in train] == [4, 4, 3, 4, 4, 3]
    real = sum(int(Texts()[index]["attention_mask"].sum()) for index in range(11))
    assert sum(row.real_tokens for row in train) == 2 * real
    assert sum(row.label_tokens for row in train) == 2 * (real - 2 * 11)
    assert [row.padded_tokens for row in train] == [32, 32, 24, 32, 32, 24]


def test_evaluation_is_the_mean_over_labels_or_pairs():
    batches = [(BatchCount(labels=1, samples=3), 4.0), (BatchCount(labels=3, samples=1), 2.0), (BatchCount(), 9.0)]
    assert (mean_loss(batches, "labels"), mean_loss(batches, "samples")) == (2.5, 3.5)


def test_evaluations_are_separate_rows(trainer, recorder, tmp_path):
    HfRecording(recorder).attach(trainer)
    trainer.train()
    recorder.finish()
    evaluated = [row for row in rows(tmp_path) if row.phase == "evaluate"]
    assert [(row.step, row.samples) for row in evaluated] == [(3, 11), (6, 11)]
    expected = trainer.predict(Texts()).metrics["test_loss"]  # all samples have nearly the same length
    assert evaluated[-1].loss == pytest.approx(expected, rel=0.02)


def test_a_long_evaluation_is_progress(tmp_path, recorder):
    """The parent ends a training without progress, and an evaluation can take hours."""
    run = RunDir(tmp_path)
    phases = Phases(run, "train")
    recording, progress = HfRecording(recorder, phases), Progress(run)
    with phases.within("evaluate"):
        progress.poll()
        for _ in range(2):
            os.utime(run.phases, (1, 1))
            progress.poll()
            before = progress.changed
            recording._prediction_step(lambda *_: (torch.tensor(1.0),), None, {COUNT: BatchCount()})
            progress.poll()
            assert progress.changed > before
