"""What of `ftbench sweep --on ray` is Ray's alone; the rest is in test_sweep_clusters.py."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ftbench[ray]'")

import types
from contextlib import ExitStack

from ftbench.errors import MissingError
from ftbench.spec.load import load
from ftbench.sweep.execute import ray_slots, remote
from ftbench.sweep.execute.ray_slots import RaySlot
from sweeps import sweep, write_sweep


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("ray://127.0.0.1:1", "nobody answers at 127.0.0.1:1"),
        ("ray://nowhere", "nobody answers at nowhere (no port is named)"),
        ("ray://me:word@127.0.0.1:1", "nobody answers at 127.0.0.1:1"),
        ("pbs", "allowed"),
    ],
)
def test_a_cluster_that_is_not_there_is_a_sentence(tmp_path, on, said):
    done = sweep(write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out", "--on", on)
    assert done.code == (2 if on == "pbs" else 3)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "why", ["RuntimeError: Starting Ray client server failed.", "psutil.ZombieProcess: PID still exists"]
)
def test_a_cluster_whose_server_does_not_begin_is_asked_again(monkeypatch, why):
    answers = [ConnectionAbortedError(f"Initialization failure from server:\n{why}\n")] * 2

    def init(**options):
        if answers:
            raise answers.pop()

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(ray_slots, "_RETRY_S", 0.0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ExitStack() as stack:
        assert ray_slots._connect("ray", stack).init is init


A, B = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def trained(monkeypatch):
    """Return a function that runs a cell on the slot of node `a` in a cluster of nodes, by name and address, while
    each of its trials is lost as told; it returns how the cell ended, and on which nodes it was tried."""

    def run(nodes, losses=()):
        tried, losses = [], list(losses)

        def train(slot, job, source, control, node):
            tried.append(node)
            if losses:
                raise losses.pop(0)("gone")
            return b""

        monkeypatch.setattr(ray_slots, "claim", lambda job: "claimed")
        monkeypatch.setattr(ray_slots, "unpack", lambda packed, run: None)
        monkeypatch.setattr(remote, "finished", lambda run: "ok")
        monkeypatch.setattr(remote, "ended", lambda run, state, reason: reason)
        monkeypatch.setattr(RaySlot, "_train", train)
        monkeypatch.setattr("ray.nodes", lambda: [
            {"NodeID": name, "NodeManagerAddress": address, "Alive": True, "Resources": {"CPU": 1}}
            for name, address in nodes.items()
        ])  # fmt: skip
        control = types.SimpleNamespace(show=lambda text: None, say=lambda text: None)
        return slot.run(types.SimpleNamespace(what="a cell"), b"", control), tried

    slot = RaySlot(A, "a", {"num_gpus": 0, "num_cpus": 1}, shared=False)
    return run


def test_a_lost_worker_costs_its_node_no_other_cell(trained):
    nodes = {"b": B, "a": A}
    for _ in range(3):
        assert trained(nodes, [ray_slots._Lost]) == ("ok", ["a", "b"])
    assert trained({"a": A}, [ray_slots._Lost]) == ("ok", ["a", "a"])
    assert trained(nodes, [ray_slots._Lost] * 2) == ("two workers were lost with it: gone", ["a", "b"])


def test_lost_nodes_are_no_fault_of_the_cell_and_are_used_again_when_they_are_back(trained):
    assert trained({"b": B, "a": A}, [ray_slots._NodeLost] * 3) == ("ok", ["a", "b", "a", "a"])
    assert trained({"b": B, "a2": A}) == ("ok", ["a2"])
    assert trained({"b": B}) == ("ok", ["b"])


def test_a_node_that_goes_away_while_it_is_asked_is_done_without(monkeypatch, tmp_path):
    gone = {"TaskUnschedulableError": "no such node", "NodeDiedError": "dead"}

    def ask(name, timeout):
        if name in gone:
            raise getattr(errors, name)(gone[name])
        return {"name": name}

    class Task:
        def options(self, scheduling_strategy, **_):
            return types.SimpleNamespace(remote=lambda values, visible: scheduling_strategy)

    errors = pytest.importorskip("ray").exceptions
    monkeypatch.setattr(ray_slots, "_only", lambda node: {"scheduling_strategy": node})
    ray = types.SimpleNamespace(exceptions=errors, remote=lambda task: Task(), get=ask)
    spec = load(write_sweep(tmp_path))
    nodes = [{"NodeID": name} for name in (*gone, "here")]
    assert ray_slots._describe_nodes(ray, "ray", spec, nodes) == {"here": {"name": "here"}}
    with pytest.raises(MissingError, match="a node cannot run ftbench: dead"):
        ray_slots._describe_nodes(ray, "ray", spec, nodes[:2])
