"""`ftbench sweep --on ray`: a real two-node Ray cluster on loopback, mock runs, nodes lost for real."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ftbench[ray]'")

from ftbench.store.steps import read_steps
from rays import ADDRESSES, Cluster
from sweeps import Folder, Night, sweep, write_sweep
from waiting import eventually

pytestmark = pytest.mark.timeout(240)
AXES = {"method": ["lora", "qlora"], "train.batch_size": [1, 2]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as found:
        yield found


def places(folder: Folder) -> set[str]:
    return {event["slot"] for event in folder.events("start")}


def mocks(cluster: Cluster) -> list[psutil.Process]:
    """The runs' own processes, on both nodes."""
    found = []
    for process in cluster.processes():
        with suppress(psutil.Error):
            found += [process] if process.cmdline()[3:4] == ["ftbench.launch.mock"] else []
    return found


def test_cells_run_on_every_node_and_come_back_into_the_same_directories(cluster, tmp_path):
    spec = write_sweep(tmp_path, AXES)
    done = sweep(spec, tmp_path / "out", "--on", "ray", env=cluster.environment)
    assert done.code == 0, done.stderr
    folder = Folder(tmp_path / "out")
    assert folder.told() == ["ok"] * 4
    assert places(folder) == set(ADDRESSES)
    for run in folder.runs():
        assert read_steps(run.steps)[0]
        assert not run.reserve.exists()
    here = sweep(spec, tmp_path / "here")
    assert here.stdout == done.stdout
    again = sweep(spec, tmp_path / "out", "--on", "ray", env=cluster.environment)
    assert again.code == 0
    assert len(folder.events("start")) == 4


def test_rays_client_is_another_way_in(cluster, tmp_path):
    spec = write_sweep(tmp_path, {"train.batch_size": [1, 2]})
    done = sweep(spec, tmp_path / "out", "--on", cluster.client, env=cluster.environment, within=180)
    assert done.code == 0, done.stderr
    assert Folder(tmp_path / "out").told() == ["ok", "ok"]


def test_a_signal_ends_the_tasks_and_the_same_command_goes_on(cluster, tmp_path):
    spec = write_sweep(tmp_path, {"train.batch_size": [1, 2]}, launch={"mock": "slow"}, train={"max_steps": 4})
    with Night(spec, tmp_path / "out", "--on", "ray", env=cluster.environment) as night:
        eventually(lambda: len(night.events("start")) == 2)
        night.send(signal.SIGINT)
        assert night.finish(60).code == 130
    assert "ok" not in night.told()
    assert sweep(spec, tmp_path / "out", "--on", "ray", env=cluster.environment).code == 0
    assert night.told() == ["ok", "ok"]


@pytest.mark.parametrize(
    ("on", "said"),
    [("ray://127.0.0.1:1", "nobody answers at 127.0.0.1:1"), ("ray://nowhere", "nobody answers"), ("slurm", "allowed")],
)
def test_a_cluster_that_is_not_there_is_a_sentence(tmp_path, on, said):
    done = sweep(write_sweep(tmp_path, AXES), tmp_path / "out", "--on", on)
    assert done.code == (2 if on == "slurm" else 3)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lost_nodes_cell_is_tried_elsewhere(tmp_path):
    spec = write_sweep(tmp_path, {"train.batch_size": [1, 2]}, launch={"mock": "slow"}, train={"max_steps": 6})
    with Cluster() as cluster, Night(spec, tmp_path / "out", "--on", "ray", env=cluster.environment) as night:
        eventually(lambda: len(night.events("start")) == 2)
        eventually(lambda: len(mocks(cluster)) == 2)
        cluster.lose(1)
        assert night.finish(120).code == 0, night.stderr
        (note,) = [event["text"] for event in night.events("note")]
        assert ADDRESSES[1] in note
        assert "elsewhere" in note
        assert night.told() == ["ok", "ok"]
