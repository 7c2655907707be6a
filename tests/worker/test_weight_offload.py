"""Weights in host memory train the same as weights on the device, bit by bit, and are read only in their layer's
turn. On the CPU a copy into a buffer is also a copy."""

from __future__ import annotations

import json
import mmap
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from conftest import spec_of, train_in
from ftbench.core.units import GIB
from ftbench.errors import NotAppliedError
from ftbench.estimate.memory import weights
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.plan import plan_of
from ftbench.facts import architectures
from ftbench.kernels.weight_stream import Copies, HostMatrix, Weight, WeightStream
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.optimizations import fused_lora, weight_offload

LAYERS = 5
ON = {"gradient_checkpointing": True, "weight_offload": True}
RECIPES = {
    "two passes a step, evaluated": {
        "train": {"gradient_accumulation_steps": 2, "epochs": 2}, "dataset": {"samples": 4, "eval_samples": 2},
        "measure": {"eval": "epoch"},
    },
    "packed, loss over chunks, fused adapters": {
        "optimizations": {"packing": True, "chunked_loss": 16, "fused_lora": True}, "dataset": {"samples": 12},
    },
    "tied, loss over chunks": {"model": {"tied": True}, "optimizations": {"chunked_loss": True}},
    "all weights": {
        "method": {"name": "full"}, "dataset": {"samples": 4, "eval_samples": 2}, "measure": {"save_adapter": False},
        "optimizations": {"optimizer_in_backward": True, "chunked_loss": 16},
    },
    "4 bits": {"method": {"name": "qlora", "upcast": False}, "optimizations": {"chunked_loss": True}},
}  # fmt: skip


@pytest.fixture
def trained(tmp_path, cache, monkeypatch):
    """Return a function that trains a tiny model of several layers with SGD without clipping and returns its
    directory."""

    def run(on: dict, **changes):
        tied = changes.pop("model", {}).get("tied", False)
        shape = architectures()["tiny/qwen3"] | {"num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
        path = tmp_path / ("tied" if tied else "apart") / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(shape))
        train = {"optimizer": "sgd", "max_grad_norm": 0, "learning_rate": 0.1} | changes.pop("train", {})
        optimizations = changes.pop("optimizations", {}) | on
        model = {"id": f"tiny/{path.parent.name}", "path": str(path)}
        data = {"samples": 4} | changes.pop("dataset", {})
        return train_in(tmp_path, model=model, train=train, optimizations=optimizations, dataset=data,
                        measure={"save_adapter": True} | changes.pop("measure", {}), **changes)  # fmt: skip

    return run


def figures(run) -> list[tuple]:
    return [(row.phase, row.loss, row.grad_norm) for row in read_steps(run.steps)[0]]


NAN = 255  # in each byte


class Poisoned(WeightStream):
    """No weight is there before its layer's turn, and none after it."""

    def take(self, index: int) -> None:
        other = 1 - index % 2
        if self._there[other] is not None:
            self._fetch(self._there[other])  # copies updated weights to the host first
        self.buffers[other].fill_(NAN)
        self._there[other] = None
        super().take(index)

    def _following(self, index: int) -> int | None:
        return None


class TooEarly(WeightStream):
    """Copies the layer behind the next one: into the buffer that is being read."""

    def _following(self, index: int) -> int | None:
        expected = super()._following(index)
        return None if expected is None else max(0, min(LAYERS - 1, 2 * expected - index))


@pytest.mark.parametrize("name", RECIPES)
def test_losses_gradients_and_adapters_equal_those_on_the_device(trained, monkeypatch, name):
    """The estimate counts the same weights, and a layer's weights are read only in its turn."""
    monkeypatch.setattr(fused_lora, "_group", lambda layers, spec: fused_lora.AdaptersOnlyGroup(layers, torch.float32))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    there, away = (trained(on, **RECIPES[name]) for on in ({"gradient_checkpointing": True}, ON))
    assert figures(away) == figures(there)
    assert figures(away)[0][1:] != figures(away)[-1][1:]
    if name != "all weights":  # the losses of the evaluation compare the final weights
        ours, theirs = (load_file(next(run.adapter.glob("adapter_model*"))) for run in (away, there))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    applied = read_json(away.applied)
    assert applied["weights_on_host_gb"] > applied["weight_buffers_gb"] > 0
    assert applied["allocator"] == "expandable_segments:True"
    assert applied["weights_moved_gb"] > applied["weight_buffers_gb"]
    assert "weights_on_host_gb" not in read_json(there.applied)
    spec = Experiment.model_validate(read_json(away.spec_json))
    model = shape_of(spec.model)
    how = plan_of(spec, model)
    assert applied["weights_on_host_gb"] * GIB == pytest.approx(weights.on_host(model, how), rel=0.02)
    assert applied["weight_buffers_gb"] * GIB == pytest.approx(weights.buffers(model, how), rel=0.1)  # rounded up
    monkeypatch.setattr(weight_offload, "WeightStream", Poisoned)
    assert figures(trained(ON, **RECIPES[name])) == figures(away)


def test_early_overwrite_of_a_buffer_is_noticed(trained, monkeypatch):
    expected = figures(trained(ON))
    monkeypatch.setattr(weight_offload, "WeightStream", TooEarly)
    assert figures(trained(ON)) != expected


def test_weights_outside_the_buffers_are_reported(trained, monkeypatch):
    matrices = weight_offload._matrices
    monkeypatch.setattr(weight_offload, "_matrices", lambda layer: list(matrices(layer))[1:])
    with pytest.raises(NotAppliedError, match="of layer 0 is not in the shared buffer"):
        trained(ON)


def stream(layers: int) -> tuple[WeightStream, list[dict]]:
    """Return a stream of layers with a matrix and its scale each, whose values identify the layer."""
    owners = [{"matrix": torch.full((3, 5), float(n)), "scale": torch.full((7,), n, dtype=torch.uint8)}
              for n in range(layers)]  # fmt: skip
    weights = [[Weight(tensor, lambda view, owner=owner, name=name: owner.update({name: view}))
                for name, tensor in owner.items()] for owner in owners]  # fmt: skip
    return WeightStream(weights, Copies(torch.device("cpu"))), owners


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_layer_has_its_weights_in_any_order(layers):
    made, owners = stream(layers)
    order = torch.randint(0, layers, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for index in [*range(layers), *reversed(range(layers)), *range(layers), *order]:
        made.take(index)
        assert owners[index]["matrix"].tolist() == [[index] * 5] * 3
        assert owners[index]["scale"].tolist() == [index] * 7
    assert {owner["matrix"].dtype for owner in owners} == {torch.float32}


def test_step_copies_each_missing_layer_once_per_pass():
    made, _ = stream(6)
    copied = []
    fetch = made._fetch
    made._fetch = lambda index: (copied.append(index), fetch(index))
    for _ in range(2):
        for index in [*range(6), *reversed(range(6))]:
            made.take(index)
    assert copied == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0, 2, 3, 4, 5, 3, 2, 1, 0]


def test_head_is_fetched_late_and_not_kept():
    made, _ = stream(4)
    matrix = torch.arange(12.0).view(3, 4)
    made.head = HostMatrix(matrix, made.copies)
    begun = []
    begin = made.head.begin
    made.head.begin = lambda: (begun.append(made._last), begin())
    for index in (0, 1, 2, 3):
        made.take(index)
    assert begun == [1]  # in the turn of the last layer but one
    fetched = made.head.fetch()
    assert fetched.tolist() == matrix.tolist()
    fetched.zero_()
    assert made.head.view.tolist() == matrix.tolist()
    for index in (3, 2, 1, 0):
        made.take(index)
    with torch.no_grad():
        for index in (0, 1, 2, 3):
            made.take(index)
    assert begun == [1]
    assert made.head.fetch().tolist() == matrix.tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": {"name": "full"}}, "use lora or qlora"),
        ({"method": {"name": "full"}, "measure": {"save_adapter": True}}, "cannot save a model"),
        ({"method": {"name": "qlora"}}, "set method.upcast to off"),
        ({"method": {"name": "qlora", "quant_type": "mxfp4"}}, "does not support experts in MXFP4"),
        ({"optimizations": {"gradient_checkpointing": False}}, "gradient_checkpointing to on or offload"),
        ({"optimizations": {"gradient_checkpointing": "selective"}}, "gradient_checkpointing to on or offload"),
        ({"optimizations": {"fp8": "tensorwise"}}, "choose one"),
        ({"launch": {"gpus": 2}}, "is for one GPU"),
    ],
)
def test_incompatible_settings_are_errors_with_a_fix(changes, said):
    spec = spec_of(optimizations=ON)
    values = {name: keys for name, keys in changes.items() if name != "method"}
    parts = {name: getattr(spec, name).model_copy(update=keys) for name, keys in values.items()}
    if "method" in changes:
        parts["method"] = spec_of(model={"id": "tiny/gpt-oss"}, method=changes["method"]).method
    assert incompatibilities(spec) == []
    assert any("weight_offload" in told and said in told for told in incompatibilities(spec.model_copy(update=parts)))


@pytest.mark.parametrize("size", [1, 4096, 5000])
def test_locked_memory_is_shared_with_a_forked_process(monkeypatch, size):
    locked = []
    torchs = SimpleNamespace(cudaHostRegister=lambda *arguments: locked.append(arguments))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: torchs)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    copies = Copies(torch.device("cpu"))
    copies._stream = object()
    host, other = copies.pinned(size), copies.pinned(size)
    assert [arguments[:2] for arguments in locked] == [(host.data_ptr(), size), (other.data_ptr(), size)]
    assert host.data_ptr() % mmap.PAGESIZE == other.data_ptr() % mmap.PAGESIZE == 0
    if (child := os.fork()) == 0:
        host.fill_(7)
        os._exit(0)
    os.waitpid(child, 0)
    assert host.tolist() == [7] * size
