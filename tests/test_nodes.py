"""What reaches a machine of a run from outside: variables of its environment, and what others say at its port."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from commands import TINY
from ftbench.errors import MissingError
from ftbench.launch import nodes, ranks
from ftbench.spec.experiment import Experiment

SPEC = Experiment.model_validate({"name": "two", "model": TINY, "launch": {"gpus": 2, "nodes": 2}})


@pytest.fixture
def meets(monkeypatch):
    """Says where machines meet, and which this one is."""

    def at(**variables):
        for name, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "NODE_RANK": "1"} | variables).items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr(nodes, "MEETING_S", 0.0)
    return at


@pytest.mark.parametrize(("name", "value"), [
    ("MASTER_ADDR", "x" * 300), ("MASTER_ADDR", "a..b"), ("MASTER_ADDR", "\udcff"), ("MASTER_ADDR", ""),
    ("NODE_RANK", "9" * 5000), ("NODE_RANK", "2"), ("NODE_RANK", "²"), ("MASTER_PORT", "9" * 5000),
    ("MASTER_PORT", "65536"), ("MASTER_PORT", "0"), ("MASTER_PORT", "1.5"),
])  # fmt: skip
def test_variables_that_name_no_machine_end_in_a_sentence(meets, name, value):
    meets(**{name: value})
    with pytest.raises(MissingError, match="MASTER_ADDR"):
        _ = nodes.number(SPEC), nodes.ask()


def served(words):
    """A service that says this to whoever comes; the port that it has."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, suppress(OSError):
            line, _ = listener.accept()
            with line:
                line.sendall(words)

    threading.Thread(target=serve, daemon=True).start()
    return str(listener.getsockname()[1])


@pytest.mark.parametrize(
    "words", [b"SSH-2.0-OpenSSH\r\n", b"[" * 60_000 + b"\n", b"5\n", b"\xff\n", b"", b"x" * 100_000]
)
def test_another_service_at_the_port_is_no_node(meets, monkeypatch, words):
    monkeypatch.setattr(nodes, "MEETING_S", 60.0)
    meets(MASTER_PORT=served(words))
    with pytest.raises(MissingError, match="no node of ftbench's"):
        nodes.ask()


@pytest.mark.parametrize(
    "words", [b"[[0, [0, true]]]", b"[5]", b"5", b'[["x", [1, true]]]', b"[" * 60_000, b"[[7, [0, true]]]", b""]
)
def test_what_no_node_says_is_taken_for_a_lost_one(words):
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(words + b"\n")
        assert ranks._Node(1, 2, 0).ended(ours, 1, False) == {1: (1, False)}
