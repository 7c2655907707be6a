"""Profile and summary of one real run on two ranks over gloo."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

from commands import Command, write_spec
from ftbench.profile import profile_table
from ftbench.store import rundir
from ftbench.store.ranks import read_ranks

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("cache")]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    spec = write_spec(
        folder, dataset={"name": "synthetic", "samples": 64, "mean_length": 20, "max_length": 64},
        train={"batch_size": 2, "max_steps": 13}, launch={"gpus": 2, "strategy": "ddp"}, measure={"profile": "on"},
    )  # fmt: skip
    with Command(spec, folder / "out") as command:
        command.finish()
    assert command.code == 0, command.stderr
    return command.run


def test_profile_has_the_communication_of_all_ranks(profiled):
    for rank in (profiled, profiled.of_rank(1)):
        sent = rundir.read_json(rank.profile / "kernels.json")["communication"]
        assert 0 < sent["exposed_ms"] <= sent["total_ms"]
    text = profile_table.run_text(profiled)
    lines = text[text.index("waited for") :].splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]


def eagerly() -> None:
    torch.compile = partial(torch.compile, backend="eager")


@pytest.mark.exhaustive
def test_ranks_that_compile_in_different_steps_are_profiled_in_the_same_steps(tmp_path):
    """Without padding, a batch needs another graph. Rank 1 has its first one in step 5."""
    spec = write_spec(
        tmp_path, dataset={"name": "synthetic", "samples": 160, "mean_length": 20, "max_length": 64},
        train={"batch_size": 2, "max_steps": 40}, launch={"gpus": 2, "strategy": "ddp"},
        optimizations={"compile": True}, measure={"profile": "on"},
    )  # fmt: skip
    with Command(spec, tmp_path / "out", before=eagerly) as command:
        command.finish()
    assert command.code == 0, command.stderr
    first, second = (rundir.read_json(command.run.of_rank(rank).profile / rundir.WINDOW) for rank in range(2))
    assert first["profiled"] == second["profiled"] == [10, 12]


def test_summary_has_memory_and_skew_of_the_ranks(profiled):
    ranks, _ = read_ranks(profiled)
    summary = rundir.read_json(profiled.summary)["ranks"]
    assert summary["count"] == 2
    assert [of["allocated"] for of in summary["memory_gb"]] == [
        max(row.peak_memory_gb for row in rows) for rows in ranks
    ]
    assert 0 < summary["token_skew"] < 0.5
