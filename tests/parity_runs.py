"""Runs of a parity check in processes that train one after the other, without starting Python for each."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from ftbench.spec.experiment import Experiment, resolve
from ftbench.store import rundir
from ftbench.sweep.parity import _reference
from ftbench.sweep.plan.base import Options
from ftbench.sweep.plan.parity import Contender, ParityPlan

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
TASKS = {"name": "synthetic", "structure": "tasks", "mean_length": 24, "max_length": 96}
STEPS = 60


def spec_of(model: Path, /, **sections) -> Experiment:
    """The spec of the tests with sections replaced key by key, resolved for a machine without a GPU."""
    values = {
        "name": "learning", "model": {"id": "learned", "path": str(model)}, "method": {"name": "lora"},
        "dataset": {**TASKS, "samples": 8 * STEPS, "eval_samples": 48, "seed": 1},
        "train": {"batch_size": 8, "learning_rate": 5e-3, "max_steps": STEPS},
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


def learn(folder: Path, steps: int = 400, seed: int = 0) -> Path:
    """Train a tiny Qwen3 on the tasks; returns the folder of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = Experiment.model_validate({
        "name": "learn",
        "model": {"id": "learned", "path": str(folder / "config.json"), "weights": "random", "seed": seed},
        "method": {"name": "full"}, "dataset": {**TASKS, "samples": 16 * steps, "seed": seed},
        "train": {"batch_size": 16, "learning_rate": 3e-3, "max_steps": steps, "max_grad_norm": 1.0},
        "measure": {"save_adapter": True},
    })  # fmt: skip
    train(resolve(spec, None).model_dump_json(), folder / "run", "")
    return folder / "run" / "adapter"


def train(spec: str, path: Path, damage: str) -> None:
    """Train a resolved spec in a directory as `python -m ftbench.worker` does; `damage` names a function of this
    module that changes the process first."""
    os.environ["TRITON_INTERPRET"] = "1"
    import pytest
    import torch

    from ftbench.worker.measure.phases import Phases
    from ftbench.worker.train import train as train_run
    from ftbench.worker.training_run import TrainingRun

    torch.set_num_threads(1)
    gc.freeze()  # each training collects garbage, which need not include the imported modules
    directory = rundir.create_at(path)
    rundir.write_json(directory.spec_json, json.loads(spec))
    rundir.write_json(directory.machine, {})
    phases = Phases(directory, "import")
    with pytest.MonkeyPatch.context() as patch:
        if damage:
            globals()[damage](patch)
        train_run(TrainingRun(Experiment.model_validate_json(spec), directory, phases))
    phases.close()
    rundir.write_json(directory.state, rundir.running() | {"state": "ok"})


def run_all(plan: ParityPlan, damages: dict[str, str], workers: int = 2) -> ParityPlan:
    """Run the remaining jobs of a plan, the reference first; `damages`: recipe → function of this module."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        first, futures = True, {}
        while (job := plan.next(lambda job: True)) is not None:
            text = job.spec.model_dump_json()
            futures[job] = pool.submit(train, text, job.run.path, damages.get(job.values["recipe"], ""))
            if first:
                futures[job].result()
                first = False
        for job, future in futures.items():
            error = future.exception()
            if error is not None:
                rundir.write_json(job.run.state, {"state": "error", "reason": repr(error)[:300]})
            with suppress(OSError):
                plan.ended(job)
    return plan


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
        module = loop.model.base_model.model.model.layers[0].mlp.up_proj
        module.scaling = {name: 1.02 * value for name, value in module.scaling.items()}

    _after_assembly(patch, change)


def stale_weights_in_one_layer(patch) -> None:
    """The forward pass uses a copy of an adapter that was taken before training."""

    def change(loop):
        import torch

        linear = loop.model.base_model.model.model.layers[1].mlp.down_proj.lora_B["default"]
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


def wrong_weight_decay(patch) -> None:
    import torch

    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1 - 0.1 * group["lr"])
        return original(self, *args, **kwargs)

    patch.setattr(torch.optim.AdamW, "step", step)


def wrong_beta_in_the_second_step(patch) -> None:
    """The settings are right and the step uses others."""
    import torch

    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        kept = [group["betas"] for group in self.param_groups]
        for group in self.param_groups:
            group["betas"] = (0.8, 0.999)
        result = original(self, *args, **kwargs)
        for group, betas in zip(self.param_groups, kept, strict=True):
            group["betas"] = betas
        return result

    patch.setattr(torch.optim.AdamW, "step", step)


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


def no_clipping(patch) -> None:
    _after_assembly(patch, lambda loop: setattr(loop.args, "max_grad_norm", 1e9))


BUGS = [
    "one_projection_2_percent_too_large", "stale_weights_in_one_layer", "labels_one_token_late",
    "last_token_of_each_sample_dropped", "wrong_beta", "wrong_weight_decay", "wrong_beta_in_the_second_step",
    "gradients_of_one_sample_twice", "no_clipping",
]  # fmt: skip
HONEST = {
    "other seed": ({"train": {"seed": 1042}}, ""),
    "gradient accumulation": ({"train": {"batch_size": 2, "gradient_accumulation_steps": 4}}, ""),
    "padding side": ({}, "padding_on_the_left"),
    "packing": ({"optimizations": {"packing": True}}, ""),
    "chunked loss": ({"optimizations": {"chunked_loss": True}}, ""),
    "checkpointing": ({"optimizations": {"gradient_checkpointing": True}}, ""),
    "compile": ({"optimizations": {"compile": True}}, "compiled_by_the_eager_backend"),
    "fused optimizer": ({"train": {"optimizer": "adamw_torch_fused"}}, ""),
}


def honest(model: Path, seed: int = 1) -> tuple[list[Contender], dict[str, str]]:
    """The honest variants as contenders, with what changes their process by name."""
    recipes = [
        contender(model, name, number, seed, **sections)
        for number, (name, (sections, _)) in enumerate(HONEST.items(), 1)
    ]
    return recipes, {name: damage for name, (_, damage) in HONEST.items()}
