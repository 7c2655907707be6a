"""Runs of a parity check in two processes that a fork server starts after it imported the training libraries."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from ftbench.spec.experiment import Experiment, resolve
from ftbench.store import rundir
from ftbench.sweep.parity import _reference
from ftbench.sweep.plan.base import Options
from ftbench.sweep.plan.parity import Contender, ParityPlan
from warm import PRELOADED

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
TASKS = {"name": "synthetic", "structure": "tasks", "mean_length": 12, "max_length": 48}
STEPS, BATCH = 32, 16


def spec_of(model: Path, /, **sections) -> Experiment:
    """The spec of the tests with sections replaced key by key, resolved for a machine without a GPU."""
    values = {
        "name": "learning", "model": {"id": "learned", "path": str(model)},
        "method": {"name": "lora", "rank": 32, "alpha": 64},
        "dataset": {**TASKS, "samples": BATCH * STEPS, "eval_samples": 128},
        "train": {"batch_size": BATCH, "learning_rate": 4e-3, "max_steps": STEPS, "weight_decay": 0.1},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return resolve(Experiment.model_validate(values), None)


def contender(model: Path, name: str, number: int = 0, seed: int = 1, **sections) -> Contender:
    """A recipe on data and adapters of a seed. `number` separates its runs from the reference's."""
    base = {"dataset": {"seed": seed}, "train": {"seed": seed}}
    merged = {key: {**base.get(key, {}), **value} for key, value in {**base, **sections}.items()}
    spec = spec_of(model, **{**merged, "model": {"seed": number}})
    return Contender(name, spec, _reference(spec_of(model, **base), spec))


def plan_of(folder: Path, *recipes: Contender, every_control: bool = False, seeds: int = 3) -> ParityPlan:
    return ParityPlan(recipes, seeds, every_control, Options(folder, None))


def learn(folder: Path, seed: int = 1, steps: int = 600, size: int = 16) -> Path:
    """Train a tiny Qwen3 on the tasks with wrong answers for half of the symbols, which LoRA then has to correct.
    Return its folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    from ftbench.spec.datasets import Dataset
    from ftbench.worker.data import synthetic

    set_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    samples = synthetic.draw(Dataset(**TASKS, samples=size * steps, seed=seed), size * steps, CONFIG["vocab_size"])
    pad = torch.nn.utils.rnn.pad_sequence
    for start in range(0, len(samples), size):
        batch = samples[start : start + size]
        ids, labels = ([torch.tensor(getattr(each, part)) for each in batch] for part in ("ids", "labels"))
        labels = pad(labels, batch_first=True, padding_value=-100)
        labels = torch.where(labels % 2 == 1, (labels + 2) % CONFIG["vocab_size"], labels)
        mask = pad([torch.ones_like(each) for each in ids], batch_first=True)
        loss = model(input_ids=pad(ids, batch_first=True), attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    return folder


def train(spec: str, path: Path, damage: str) -> float:
    """Train a resolved spec in a directory as `python -m ftbench.worker` does; `damage` names a function of this
    module that changes the process first. Return the seconds of CPU time."""
    import time

    import pytest

    from ftbench.worker.outcome import Phases
    from ftbench.worker.train import train as train_run
    from ftbench.worker.training_run import TrainingRun

    begin, directory = time.process_time(), rundir.create_at(path)
    rundir.write_json(directory.spec_json, json.loads(spec))
    rundir.write_json(directory.machine, {})
    phases = Phases(directory, "import")
    with pytest.MonkeyPatch.context() as patch:
        if damage:
            globals()[damage](patch)
        train_run(TrainingRun(Experiment.model_validate_json(spec), directory, phases))
    phases.close()
    rundir.write_json(directory.state, rundir.running() | {"state": "ok"})
    return time.process_time() - begin


@cache
def pool(workers: int) -> ProcessPoolExecutor:
    """Return processes that train one run after the other."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return ProcessPoolExecutor(workers, context, _start)


def _start() -> None:
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # each training collects garbage, which need not include the imported modules


def run_all(plan: ParityPlan, damages: dict[str, str], workers: int = 2) -> float:
    """Run the remaining jobs of a plan: the first one, whose weights the recordings need, then trainings, then
    recordings. `damages`: recipe → function of this module. Return the seconds of CPU time."""
    jobs = list(plan.pending())
    futures = {}
    for job in [*jobs[:1], *sorted(jobs[1:], key=lambda job: job.spec.measure.gradients)]:
        if job.spec.measure.gradients:
            futures[jobs[0]].exception()
        damage = damages.get(job.values["recipe"], "")
        futures[job] = pool(workers).submit(train, job.spec.model_dump_json(), job.run.path, damage)
    for job, future in futures.items():
        error = future.exception()
        if error is not None:
            rundir.write_json(job.run.state, {"state": "error", "reason": repr(error)[:300]})
        with suppress(OSError):
            plan.ended(job)
    return sum(future.result() for future in futures.values() if not future.exception())


# --- honest variants without a setting in a spec, and bugs ------------------------------------------------------------


def padding_on_the_left(patch) -> None:
    from ftbench.worker.data.collate import Collator

    original = Collator._padded

    def padded(self, samples):
        batch = original(self, samples)
        for row, (ids, _) in enumerate(samples):
            for key, values in batch.items():
                shift = values.shape[1] - len(ids)
                batch[key][row] = [*values[row][len(ids) :], *values[row][: len(ids)]] if shift else values[row]
        return batch

    patch.setattr(Collator, "_padded", padded)


def compiled_by_the_eager_backend(patch) -> None:
    import torch

    compile_layer = torch.nn.Module.compile
    patch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_layer(self, **how | {"backend": "eager"}))


def _after_assembly(patch, change) -> None:
    from ftbench.worker import train as module

    original = module.build_trainer

    def build_trainer(*args, **kwargs):
        loop = original(*args, **kwargs)
        change(loop)
        return loop

    patch.setattr(module, "build_trainer", build_trainer)


def one_projection_2_percent_too_large(patch) -> None:
    def change(loop):
        module = _layer(loop, 0).mlp.up_proj
        module.scaling = {name: 1.02 * value for name, value in module.scaling.items()}

    _after_assembly(patch, change)


def stale_weights_in_one_layer(patch) -> None:
    """The forward pass uses a copy of an adapter that was taken before training."""

    def change(loop):
        import torch

        linear = _layer(loop, 1).mlp.down_proj.lora_B["default"]
        copy = linear.weight.detach().clone()

        def stale(module, inputs, output):
            return output + (torch.nn.functional.linear(inputs[0], copy) - output).detach()

        linear.register_forward_hook(stale)

    _after_assembly(patch, change)


def labels_one_token_late(patch) -> None:
    import torch

    def change(loop):
        collate = loop.data_collator

        def late(rows):
            batch = collate(rows)
            batch["labels"] = torch.roll(batch["labels"], 1, dims=1)
            return batch

        loop.data_collator = late

    _after_assembly(patch, change)


def pictures_of_another_sample(patch) -> None:
    def change(loop):
        collate = loop.data_collator

        def swapped(rows):
            batch = collate(rows)
            return batch | {"pixel_values": batch["pixel_values"].roll(1, 0)}

        loop.data_collator = swapped

    _after_assembly(patch, change)


def projector_frozen(patch) -> None:
    """The adapters of the projector have an optimizer that does not step them."""

    def change(loop):
        for name, parameter in loop.model.named_parameters():
            if "multi_modal_projector" in name and parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 0)

    _after_assembly(patch, change)


def last_token_of_each_sample_dropped(patch) -> None:
    def change(loop):
        collate = loop.data_collator

        def shorter(rows):
            batch = collate(rows)
            for row, length in enumerate(batch["attention_mask"].sum(1)):
                batch["labels"][row, length - 1] = -100
            return batch

        loop.data_collator = shorter

    _after_assembly(patch, change)


def _optimizer_with(patch, **changes) -> None:
    import torch

    original = torch.optim.AdamW.__init__
    patch.setattr(torch.optim.AdamW, "__init__", lambda self, *a, **k: original(self, *a, **k | changes))


def wrong_beta(patch) -> None:
    _optimizer_with(patch, betas=(0.9, 0.99))


def _step_with(patch, **changes) -> None:
    """The settings are right and the optimizer's step uses others."""
    import torch

    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        kept = [{name: group[name] for name in changes} for group in self.param_groups]
        for group in self.param_groups:
            group.update(changes)
        result = original(self, *args, **kwargs)
        for group, values in zip(self.param_groups, kept, strict=True):
            group.update(values)
        return result

    patch.setattr(torch.optim.AdamW, "step", step)


def weight_decay_lost_in_the_step(patch) -> None:
    _step_with(patch, weight_decay=0.0)


def wrong_first_beta_in_the_step(patch) -> None:
    _step_with(patch, betas=(0.8, 0.999))


def wrong_second_beta_in_the_step(patch) -> None:
    _step_with(patch, betas=(0.9, 0.99))


def learning_rate_of_the_previous_step(patch) -> None:
    """The optimizer's step uses a learning rate that was copied before the schedule changed it."""
    import torch

    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        now = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, getattr(self, "previous", now), strict=True):
            group["lr"] = rate
        result = original(self, *args, **kwargs)
        for group, rate in zip(self.param_groups, now, strict=True):
            group["lr"] = rate
        self.previous = now
        return result

    patch.setattr(torch.optim.AdamW, "step", step)


def clipping_in_the_step(patch) -> None:
    import torch

    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return original(self, *args, **kwargs)

    patch.setattr(torch.optim.AdamW, "step", step)


def _layer(loop, layer):
    return loop.model.base_model.model.model.layers[layer]


def another_rotary_base(patch) -> None:
    _after_assembly(patch, lambda loop: loop.model.base_model.model.model.rotary_emb.inv_freq.pow_(1.05))


def half_the_gradient_of_one_layer(patch) -> None:
    def change(loop):
        for parameter in _layer(loop, 1).parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / 2)

    _after_assembly(patch, change)


def dead_projection(patch) -> None:
    """A fused product that returns no gradients for one projection of one layer."""

    def change(loop):
        for parameter in _layer(loop, 0).self_attn.v_proj.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 0)

    _after_assembly(patch, change)


def norms_with_a_larger_epsilon(patch) -> None:
    def change(loop):
        for module in _layer(loop, 0).modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon *= 100

    _after_assembly(patch, change)


def dropout_left_on(patch) -> None:
    def change(loop):
        import torch

        for module in loop.model.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = torch.nn.Dropout(0.05)

    _after_assembly(patch, change)


def one_sample_of_each_batch_dropped(patch) -> None:
    def change(loop):
        step = loop.training_step

        def training_step(model, inputs, *args, **kwargs):
            if len(inputs["labels"]) > 1:
                inputs["labels"] = inputs["labels"].clone()
                inputs["labels"][-1] = -100
            return step(model, inputs, *args, **kwargs)

        loop.training_step = training_step

    _after_assembly(patch, change)


def gradients_of_one_sample_twice(patch) -> None:
    """The second sample of each batch is replaced by the first, after the batch was counted."""

    def change(loop):
        step = loop.training_step

        def training_step(model, inputs, *args, **kwargs):
            for key in ("input_ids", "labels", "attention_mask"):
                if len(inputs[key]) > 1:
                    inputs[key] = inputs[key].clone()
                    inputs[key][1] = inputs[key][0]
            return step(model, inputs, *args, **kwargs)

        loop.training_step = training_step

    _after_assembly(patch, change)


def attention_window_of_36_tokens(patch) -> None:
    """Only one recorded sample is longer."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def windowed(module, query, key, value, mask, **kwargs):
        at = torch.arange(query.shape[2])
        near = (at[:, None] - at < 36) & (at[:, None] >= at)
        return attention(module, query, key, value, near[None, None] if mask is None else mask & near, **kwargs)

    patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", windowed)


def no_clipping(patch) -> None:
    _after_assembly(patch, lambda loop: setattr(loop.args, "max_grad_norm", 1e9))


BUGS = [
    "one_projection_2_percent_too_large", "stale_weights_in_one_layer", "labels_one_token_late",
    "last_token_of_each_sample_dropped", "wrong_beta", "weight_decay_lost_in_the_step", "wrong_first_beta_in_the_step",
    "wrong_second_beta_in_the_step", "clipping_in_the_step", "another_rotary_base", "half_the_gradient_of_one_layer",
    "learning_rate_of_the_previous_step", "dead_projection", "norms_with_a_larger_epsilon", "dropout_left_on",
    "one_sample_of_each_batch_dropped", "gradients_of_one_sample_twice", "attention_window_of_36_tokens", "no_clipping",
]  # fmt: skip
HONEST = {
    "other seed": ({"train": {"seed": 10_000}}, ""),
    "gradient accumulation": ({"train": {"batch_size": BATCH // 2, "gradient_accumulation_steps": 2}}, ""),
    "padding side": ({}, "padding_on_the_left"),
    "packing": ({"optimizations": {"packing": True}}, ""),
    "chunked loss": ({"optimizations": {"chunked_loss": True}}, ""),
    "checkpointing": ({"optimizations": {"gradient_checkpointing": True}}, ""),
    "compile": ({"optimizations": {"compile": True}}, "compiled_by_the_eager_backend"),
    "fused optimizer": ({"train": {"optimizer": "adamw_torch_fused"}}, ""),
}


# The test combines honest changes, to save time. A combination passes only if all its changes are correct.
COMBINED = {
    "other seed, fused optimizer, accumulation, padding side": (
        {"train": {"seed": 10_000, "optimizer": "adamw_torch_fused", **HONEST["gradient accumulation"][0]["train"]}},
        "padding_on_the_left",
    ),
    "packing, compile, chunked loss, checkpointing": (
        {"optimizations": {"packing": True, "fixed_shape": True, "compile": True, "chunked_loss": True,
                           "gradient_checkpointing": True}},
        "compiled_by_the_eager_backend",
    ),
}  # fmt: skip


def honest(model: Path, seed: int = 1, variants: dict = HONEST) -> tuple[list[Contender], dict[str, str]]:
    """The honest variants as contenders, with what changes their process by name."""
    recipes = [
        contender(model, name, number, seed, **sections)
        for number, (name, (sections, _)) in enumerate(variants.items(), 1)
    ]
    return recipes, {name: damage for name, (_, damage) in variants.items()}
