"""`ftbench sweep --on` a cluster: real ones of two nodes on loopback, Ray's and Slurm's, mock runs, nodes lost for
real."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator

import pytest

import rays
import slurms
from ftbench.store.steps import read_steps
from sweeps import Folder, Night, sweep, write_sweep
from waiting import eventually

AXES = {"method": ["lora", "qlora"], "train.batch_size": [1, 2]}
RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: ftbench[ray]")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(rays.Cluster, marks=RAY, id="ray"),
        pytest.param(slurms.Cluster, marks=[pytest.mark.slurm, slurms.SKIP], id="slurm"),
    ],
)
def cluster(request) -> Iterator[rays.Cluster | slurms.Cluster]:
    with request.param() as found:
        yield found


@pytest.fixture
def held(cluster) -> Iterator[rays.Cluster | slurms.Cluster]:
    """The cluster, whose runs wait until they are released."""
    cluster.hold()
    yield cluster
    cluster.release()


def written(cluster, folder, axes, **parts):
    """Return a sweep's spec, with what the cluster needs beside it."""
    spec = write_sweep(folder, axes, **parts)
    cluster.settings(folder)
    return spec


def test_cells_run_and_come_back_into_the_same_directories(cluster, tmp_path):
    spec = written(cluster, tmp_path, AXES)
    done = sweep(spec, tmp_path / "out", "--on", cluster.on, env=cluster.environment)
    assert done.code == 0, done.stderr
    folder = Folder(tmp_path / "out")
    assert folder.told() == ["ok"] * 4
    if cluster.on == "ray":
        assert {event["slot"] for event in folder.events("start")} == set(rays.ADDRESSES)
    for run in folder.runs():
        assert read_steps(run.steps)[0]
        assert not run.reserve.exists()
    here = sweep(spec, tmp_path / "here")
    assert here.stdout == done.stdout
    again = sweep(spec, tmp_path / "out", "--on", cluster.on, env=cluster.environment)
    assert again.code == 0
    assert len(folder.events("start")) == 4


def test_a_signal_ends_the_tasks_and_the_same_command_goes_on(held, tmp_path):
    spec = written(held, tmp_path, {"train.batch_size": [1, 2]})
    with Night(spec, tmp_path / "out", "--on", held.on, env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        night.send(signal.SIGINT)
        assert night.finish().code == 130
    assert night.told() == ["interrupted", "interrupted"]
    eventually(lambda: not held.runs(), "a task has outlived its sweep")
    held.release()
    assert sweep(spec, tmp_path / "out", "--on", held.on, env=held.environment).code == 0
    assert night.told() == ["ok", "ok"]


def test_a_search_for_the_largest_batch_finds_it_there(cluster, tmp_path):
    """Of Ray by way of its client."""
    spec = written(cluster, tmp_path, None, launch={"mock": "oom", "mock_fits": 5})
    asked = ("--until-oom", "--trial-steps", "3", "--on", cluster.client)
    done = sweep(spec, tmp_path / "out", *asked, env=cluster.environment)
    assert done.code == 0, done.stderr
    assert sweep(spec, tmp_path / "here", "--until-oom", "--trial-steps", "3").stdout == done.stdout


def test_a_lost_nodes_cell_is_tried_elsewhere(held, tmp_path):
    """The last test of a cluster, which has a node less then."""
    spec = written(held, tmp_path, {"train.batch_size": [1, 2]})
    with Night(spec, tmp_path / "out", "--on", held.on, env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        held.lose(1)
        held.release()
        assert night.finish().code == 0, night.stderr
        notes = [event["text"] for event in night.events("note") if "elsewhere" in event["text"]]
        assert all(rays.ADDRESSES[1] in note for note in notes)
        assert len(notes) == (held.on == "ray")  # Slurm puts it into its queue again by itself
        assert night.told() == ["ok", "ok"]
