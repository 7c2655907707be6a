"""A recorded and replayed step trains the same as the trainer's step. A stand-in for the graph calls the recorded
function again and copies its outputs to the tensors of the first call; tests/gpu has a real graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from conftest import spec_of
from ftbench.errors import NotAppliedError, SpecError
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities, resolve
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.optimizations import chunked_loss, cuda_graph
from warm import returned

ON = {"packing": True, "fixed_shape": True, "chunked_loss": True, "cuda_graph": True}
SGD = {"optimizer": "sgd", "learning_rate": 0.5, "batch_size": 2}
DATA = {"samples": 20, "eval_samples": 4}


class Recording(cuda_graph.CudaGraph):
    """Nothing is computed before the first replay, as on a GPU: the recorded outputs hold no values."""

    def __init__(self):
        self.calls = 0

    def warm_up(self, function):
        for _ in range(cuda_graph.WARM_UP):
            function()

    def record(self, function):
        self._function = function
        loss, gradients = function()
        self._made = loss.detach().clone(), gradients
        for tensor in (self._made[0], *gradients):
            tensor.fill_(float("nan"))
        return self._made

    def replay(self):
        loss, gradients = self._function()
        for held, new in zip((self._made[0], *self._made[1]), (loss, *gradients), strict=True):
            held.copy_(new.detach())


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(cuda_graph, "CudaGraph", Recording)


def rows(run, phase="train"):
    return [row for row in read_steps(run.steps)[0] if row.phase == phase]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_replayed_steps_learn_the_same(recording, train_here, method):
    given = {"dataset": DATA, "train": SGD, "method": {"name": method}}
    plain = train_here(**given, optimizations=ON | {"cuda_graph": False})
    ours = train_here(**given, optimizations=ON)
    assert len(rows(ours)) > 2
    assert len({row.label_tokens for row in rows(ours)}) > 1  # as many labels in no two batches
    for name in ("loss", "grad_norm", "label_tokens"):
        expected = [getattr(row, name) for row in rows(plain)]
        assert [getattr(row, name) for row in rows(ours)] == pytest.approx(expected, rel=1e-5)
    assert rows(ours, "evaluate")[0].loss == pytest.approx(rows(plain, "evaluate")[0].loss, rel=1e-5)
    assert read_json(ours.applied)["cuda_graph_replays"] == len(rows(ours))
    assert "cuda_graph_replays" not in read_json(plain.applied)


def squares(model, batch, tokens):
    loss = model(batch["x"]).square().sum() / tokens
    loss.backward()
    return loss.detach()


def test_trainer_pass_runs_only_until_recorded(recording, monkeypatch):
    called = []
    monkeypatch.setattr(Recording, "replay", lambda self: None)

    def train(*arguments):
        called.append(arguments)
        return squares(*arguments)

    step, model = cuda_graph.GraphedStep(), torch.nn.Linear(2, 1)
    for _ in range(4):
        step(train, model, {"x": torch.ones(3, 2)}, torch.tensor(3))
        assert model.weight.grad is not None
        model.zero_grad()
    assert len(called) == cuda_graph.WARM_UP + 1
    assert step.replays == 4


def train_on_rank(rank, store, graphed):
    """Train three steps with ddp, and return the weights after each step."""
    cuda_graph.CudaGraph = Recording
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer, step, weights = torch.optim.SGD(model.parameters(), 0.1), cuda_graph.GraphedStep(), []
    for number in range(3):
        batch = {"x": torch.full((3, 2), 1.0 + rank + number)}
        step(squares, model, batch, torch.tensor(3)) if graphed else squares(model, batch, 3)
        optimizer.step()
        optimizer.zero_grad()
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).tolist())
    return weights


def test_ddp_averages_the_gradients_of_a_replay(tmp_path):
    with ThreadPoolExecutor() as pool:
        plain, graphed = (
            [pool.submit(returned, train_on_rank, rank, Path(tmp_path, str(on)), on) for rank in (0, 1)]
            for on in (False, True)
        )
    expected, *others = [torch.tensor(rank.result()) for rank in (*plain, *graphed)]
    for weights in others:
        torch.testing.assert_close(weights, expected)
    assert not torch.equal(expected[0], expected[-1])


def test_batch_of_another_shape_is_an_error(recording):
    step, model = cuda_graph.GraphedStep(), torch.nn.Linear(2, 1)
    step(squares, model, {"x": torch.ones(3, 2), "max_length_q": 3}, torch.tensor(3))
    with pytest.raises(SpecError, match=r"x changed from \(3, 2\) to \(4, 2\)"):
        step(squares, model, {"x": torch.ones(4, 2), "max_length_q": 3}, torch.tensor(3))
    with pytest.raises(SpecError, match="max_length_q changed from 3 to 4"):
        step(squares, model, {"x": torch.ones(3, 2), "max_length_q": 4}, torch.tensor(3))


def test_waiting_step_is_an_error_and_out_of_memory_a_result(recording, monkeypatch):
    for error, raised in ((RuntimeError("operation not permitted when stream is capturing"), NotAppliedError),
                          (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError)):  # fmt: skip

        def record(self, function, error=error):
            try:
                raise error
            finally:
                if type(error) is RuntimeError:
                    raise RuntimeError("capture failed due to a previous error")

        monkeypatch.setattr(Recording, "record", record)
        with pytest.raises(raised, match=str(error)):
            cuda_graph.GraphedStep()(squares, torch.nn.Linear(2, 1), {"x": torch.ones(3, 2)}, torch.tensor(3))


def test_run_without_replay_fails():
    spec, model = changed(), torch.nn.Linear(2, 1)
    cuda_graph.apply(model, spec)
    assert cuda_graph.verify(model, spec) == [
        "optimizations.cuda_graph is on, but the first step did not replay a graph"
    ]


def changed(optimizations=None, **sections) -> Experiment:
    spec = spec_of(optimizations=ON)
    parts = sections | {"optimizations": optimizations or {}}
    return spec.model_copy(
        update={name: getattr(spec, name).model_copy(update=values) for name, values in parts.items()}
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizations": {"fixed_shape": False}}, "set packing and fixed_shape to on"),
        ({"optimizations": {"chunked_loss": False}}, "set chunked_loss to on"),
        ({"optimizations": {"gradient_checkpointing": True}}, "random number generator"),
        ({"optimizations": {"activation_offload": True}}, "needs the host in each step"),
        ({"train": {"gradient_accumulation_steps": 2}}, "set train.gradient_accumulation_steps to 1"),
        ({"train": {"precision": "fp16"}}, "set it to bf16"),
        ({"launch": {"gpus": 2, "strategy": "fsdp"}}, "set launch.strategy to ddp"),
    ],
)
def test_settings_incompatible_with_a_graph_are_errors(changes, said):
    assert incompatibilities(changed()) == []
    assert any(said in sentence for sentence in incompatibilities(changed(**changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"launch": {"gpus": 2, "strategy": "ddp"}}, None),
        ({"launch": {"gpus": 2, "strategy": "fsdp"}}, "supports only ddp"),
        ({"train": {"gradient_accumulation_steps": 2}}, "overwrites gradients"),
        ({"train": {"precision": "fp16"}}, "train.precision fp16 scales gradients on the host"),
        ({"optimizations": {"gradient_checkpointing": True}}, "gradient_checkpointing is on"),
        ({"optimizations": {"attention": "auto"}}, "only with method lora, attention varlen and fp8 off"),
        ({"optimizations": {"fp8": "tensorwise-delayed"}}, None),
        ({"optimizations": {"fp8": "tensorwise"}}, "only with method lora, attention varlen and fp8 off"),
        ({"model": {"id": "tiny/qwen3-moe"}}, None),
        (
            {"model": {"id": "tiny/qwen3-moe"}, "method": {"name": "lora", "experts": True}},
            "with adapters of experts, it needs more memory",
        ),
        ({"model": {"id": "tiny/gpt-oss"}}, None),
        ({"model": {"id": "tiny/qwen2.5-vl"}}, "was not tested with the layers of qwen2_5_vl"),
        ({"measure": {"profile": "on"}}, "a profile shows separate launches"),
    ],
)
def test_auto_is_on_if_the_spec_supports_it(changes, reason):
    auto = {"cuda_graph": "auto", "attention": "varlen"}
    changes = changes | {"optimizations": auto | changes.get("optimizations", {})}
    resolved = resolve(changed(**changes), (9, 0))
    assert resolved.optimizations.cuda_graph is (reason is None)
    assert (reason or "every step has one shape") in resolved.resolved["optimizations.cuda_graph"]["reason"]
    assert resolve(changed(**changes), (8, 9)).optimizations.cuda_graph is False


def test_cuda_graph_needs_a_gpu():
    assert "optimizations.cuda_graph needs a GPU: set it to off" in machine_incompatibilities(changed(), None)
    assert not machine_incompatibilities(changed(), (9, 0))


def test_ignored_labels_add_nothing_to_loss_and_gradient():
    torch.manual_seed(0)
    head, labels = torch.nn.Linear(8, 50), torch.randint(0, 50, (1, 12))
    labels[0, [0, 3, 7]] = -100
    carrying = torch.tensor([1, 2, 4, 5, 6, 8, 9, 10, 11])
    found = []
    for positions in (carrying, torch.cat([carrying, torch.tensor([0, 3, 7])])):
        hidden = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        head.zero_grad()
        loss = chunked_loss.chunked_loss(hidden, labels, positions, head, size=4)
        loss.backward()
        model = SimpleNamespace(
            base_model=lambda hidden=hidden, **_: SimpleNamespace(last_hidden_state=hidden),
            get_output_embeddings=lambda: head,
        )
        mean = chunked_loss._forward(None, None, 4)(model, labels=labels, label_positions=positions).loss
        torch.testing.assert_close(mean, loss / len(carrying))
        found.append((loss.detach(), hidden.grad, head.weight.grad.clone(), head.bias.grad.clone()))
    for plain, filled in zip(*found, strict=True):
        torch.testing.assert_close(filled, plain)
