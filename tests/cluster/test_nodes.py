"""Several nodes: invalid variables, and other services at the port."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from commands import TINY
from ftbench.cluster import nodes
from ftbench.errors import MissingError
from ftbench.spec.experiment import Experiment

SPEC = Experiment.model_validate({"name": "two", "model": TINY, "launch": {"gpus": 2, "nodes": 2}})


@pytest.fixture
def set_variables(monkeypatch):
    def set_all(**variables):
        for name, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "NODE_RANK": "1"} | variables).items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr(nodes, "MEETING_S", 0.0)
    return set_all


@pytest.mark.parametrize(("name", "value"), [
    ("MASTER_ADDR", "x" * 300), ("NODE_RANK", "9" * 5000), ("NODE_RANK", "2"), ("MASTER_PORT", "65536"),
])  # fmt: skip
def test_invalid_variables_are_reported(set_variables, name, value):
    set_variables(**{name: value})
    with pytest.raises(MissingError, match="MASTER_ADDR"):
        _ = nodes.number(SPEC), nodes.receive_path(1)


def serve(text):
    """Start a service that sends `text` to each client, and return its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            line, _ = listener.accept()
            with line, suppress(OSError):
                line.sendall(text)

    threading.Thread(target=answer, daemon=True).start()
    return str(listener.getsockname()[1])


@pytest.mark.parametrize(
    "text", [b"SSH-2.0-OpenSSH\r\n", b"\xff\n", b"", b"x" * 100_000], ids=["ssh", "bytes", "nothing", "long"]
)
def test_other_service_at_the_port_is_reported(set_variables, monkeypatch, text):
    monkeypatch.setattr(nodes, "MEETING_S", 60.0)
    set_variables(MASTER_PORT=serve(text))
    with pytest.raises(MissingError, match="not a node of ftbench"):
        nodes.receive_path(1)
