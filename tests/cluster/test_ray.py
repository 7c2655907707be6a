"""`ftbench sweep --on` with a real Ray cluster of two nodes on loopback, and mock runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

import rays
from ftbench.cluster import ray
from ftbench.errors import MissingError
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.steps import read_steps
from ftbench.sweep.gpu_slots import RunControl
from sweeps import Night, sweep, write_sweep
from waiting import eventually

SPEC = Experiment.model_validate(
    {"name": "a", "model": {"id": "a/b"}, "method": {"name": "lora"}, "dataset": {"name": "japanese-alpaca"}}
)
AXES = {"method": ["lora", "qlora"]}
pytest.importorskip("ray", reason="Ray is not installed: pip install 'ftbench[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[rays.Cluster]:
    with rays.Cluster() as found:
        yield found


@pytest.fixture
def held(cluster) -> Iterator[rays.Cluster]:
    """The cluster. Its runs wait until they are released."""
    cluster.hold()
    yield cluster
    cluster.release()


def written(cluster, folder, axes, **parts):
    """Write a sweep's spec and the cluster's settings."""
    spec = write_sweep(folder, axes, **parts)
    cluster.settings(folder)
    return spec


def test_ctrl_c_ends_the_jobs_and_the_results_of_the_resumed_sweep_equal_local_ones(held, tmp_path):
    spec = written(held, tmp_path, AXES)
    environment = held.environment | {"OMP_NUM_THREADS": "2"}
    with Night(spec, tmp_path / "out", "--on", held.on, env=environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        night.send(signal.SIGINT)
        assert night.finish().code == 130
    assert night.told() == ["interrupted", "interrupted"]
    assert all(run.summary.exists() for run in night.runs())
    eventually(lambda: not held.runs(), "a job has outlived its sweep")
    held.release()
    done = sweep(spec, tmp_path / "out", "--on", held.on, env=environment)
    assert done.code == 0, done.stderr
    assert night.told() == ["ok", "ok"]
    for run in night.runs():
        assert read_steps(run.steps)[0]
        assert not run.reserve.exists()
        assert rundir.read_json(run.machine)["environment"]["OMP_NUM_THREADS"] == "2"
    assert sweep(spec, tmp_path / "here").stdout == done.stdout


@pytest.mark.exhaustive  # on a busy machine, Ray's client needs minutes
def test_search_on_a_cluster(cluster, tmp_path):
    """Ray uses its client here."""
    spec = written(cluster, tmp_path, None, launch={"mock": "oom", "mock_fits": 2})
    asked = ("--until-oom", "--on", cluster.client)
    done = sweep(spec, tmp_path / "out", *asked, env=cluster.environment)
    assert done.code == 0, done.stderr
    assert sweep(spec, tmp_path / "here", "--until-oom").stdout == done.stdout


@pytest.mark.parametrize(("error", "tries"), [(ConnectionAbortedError, 3), (ConnectionError, 1)])
def test_slow_head_node_is_asked_again(monkeypatch, error, tries):
    import ray as package

    calls = []

    def init(*_, **__):
        calls.append(1)
        raise error

    monkeypatch.setattr(package, "init", init)
    with pytest.raises(MissingError, match="cannot join the Ray cluster"):
        ray.slots("ray", SPEC)
    assert len(calls) == tries


@pytest.mark.parametrize("call", ["remote", "wait"], ids=["before a task", "in a task"])
def test_lost_connection_is_reported(monkeypatch, tmp_path, call):
    import ray as package

    monkeypatch.setattr(package, "remote", MagicMock())
    monkeypatch.setattr(package, call, MagicMock(side_effect=ConnectionError("Client is shutting down.")))
    job = SimpleNamespace(run=rundir.RunDir(tmp_path / "run-r1"), spec=SPEC, sets=())
    with pytest.raises(MissingError, match="lost the connection to Ray"):
        ray.RaySlot("Ray 1", {}, None, False).run(job, b"", RunControl(0, None, print))


def test_slot_has_all_gpus_of_a_run(monkeypatch):
    node = {"Alive": True, "Resources": {"GPU": 5, "CPU": 8}}
    package = MagicMock(**{"nodes.return_value": [node, node], "get.return_value": {"gpus": []}})
    monkeypatch.setattr(ray, "_connect", lambda on: package)
    found, _ = ray.slots("ray", Experiment.model_validate(SPEC.model_dump(mode="json") | {"launch": {"gpus": 2}}))
    assert [slot.needs["num_gpus"] for slot in found] == [2] * 4


def test_cell_of_a_lost_node_runs_on_another_one(held, tmp_path):
    """This is the last test, because the cluster loses a node."""
    spec = written(held, tmp_path, {"train.batch_size": [1, 2]})
    with Night(spec, tmp_path / "out", "--on", held.on, env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        held.lose(1)
        held.release()
        assert night.finish().code == 0, night.stderr
        assert night.told() == ["ok", "ok"]


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("ray://127.0.0.1:1", "no answer at 127.0.0.1:1"),
        ("ray://me:word@127.0.0.1:1", "no answer at 127.0.0.1:1"),
        ("pbs", "allowed"),
    ],
)
def test_unreachable_cluster_is_reported(ftbench, tmp_path, on, message):
    spec = write_sweep(tmp_path, {"train.batch_size": [1, 2]})
    code, _, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", on)
    assert code == (2 if on == "pbs" else 3)
    assert message in err
