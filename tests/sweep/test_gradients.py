"""What a parity check says of gradients that it cannot compare: a run's gradients.npz is input like any other."""

import os

import pytest

pytest.importorskip("numpy", reason="training libraries are not installed")

import numpy as np

from ftbench.store import rundir
from ftbench.sweep import gradients


def kept_gradients(path, **changes):
    """Write what a run keeps of two weights' gradients in three steps."""
    arrays = {"names": np.array(["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]), "begin": np.ones((2, 4)),
              "sketches": np.ones((3, 2, 4)), "norms": np.ones((3, 2))} | changes  # fmt: skip
    run = rundir.RunDir(path)
    path.mkdir()
    with run.gradients.open("wb") as file:
        np.savez_compressed(file, **{name: array for name, array in arrays.items() if array is not None})
    return run


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"sketches": np.ones((2, 2, 4)), "norms": np.ones((2, 2))}, "other steps were kept"),
        ({"sketches": np.full((3, 2, 4), np.inf)}, "one of them is no number"),
        ({"names": np.array(["a", "b"])}, "other weights are trained"),
        ({"norms": None}, "no gradients were kept"),
        ({"norms": np.ones(3)}, "no gradients were kept"),
        ({"begin": np.array(["x", "y"])}, "no gradients were kept"),
        ({"names": np.array([{}, {}], dtype=object)}, "no gradients were kept"),
    ],
)  # fmt: skip
def test_gradients_that_cannot_be_compared_are_told_and_nothing_else(tmp_path, changes, said):
    good, other = kept_gradients(tmp_path / "good"), kept_gradients(tmp_path / "other", **changes)
    rows, reason = gradients.agreement(good, other)
    assert (reason, len(rows)) == (said, 0 if said else 2)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "fifo", "folder", "missing", "huge"])
def test_gradients_that_cannot_be_read_are_told_and_nothing_else(tmp_path, monkeypatch, damage):
    good, other = kept_gradients(tmp_path / "good"), kept_gradients(tmp_path / "other")
    content = other.gradients.read_bytes()
    if damage == "huge":
        monkeypatch.setattr(gradients, "_MOST_BYTES", 600)
    other.gradients.unlink()
    if damage == "fifo":
        os.mkfifo(other.gradients)
    elif damage == "folder":
        other.gradients.mkdir()
    elif damage != "missing":
        damaged = {"cut": content[:-40], "empty": b"", "text": b"x" * 1000, "huge": content}[damage]
        other.gradients.write_bytes(damaged)
    assert gradients.agreement(good, other) == ([], "no gradients were kept")
