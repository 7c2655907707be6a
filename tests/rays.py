"""A real Ray cluster of two nodes on loopback, each with a separate session.

Its processes are found by a variable in their environment or by their session. Ray's servers listen on all interfaces
and run code for any client, so the cluster has a token."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from waiting import Holder, eventually, free_ports, training

MARK = "FTBENCH_TEST_CLUSTER"
# Two addresses of the loopback: Ray turns 127.0.0.1 into the machine's outside one.
ADDRESSES = ("127.0.0.2", "127.0.0.3")
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    # A lost node refuses connections at once; a slow node is only busy.
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",  # on a busy machine a client's server starts slowly
}


class Cluster(Holder):
    """Context manager. `environment` is for a driver, `client` another address for `--on`."""

    on = "ray"

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="ftr", dir="/tmp"))  # paths of sockets end at 107 bytes
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._own = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self._own |= {**auth, **SETTINGS, MARK: str(self.folder), **self.holding()}
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        (port,) = free_ports(1, ADDRESSES[0])
        self._joins = ["--head", "--port=0", "--include-dashboard=false", f"--ray-client-server-port={port}"]
        try:
            self.start(0)
            found = self._wait(0, "session_latest/gcs_server_port_*")
            self.address = f"{ADDRESSES[0]}:{found}"
            self.client = f"ray://{ADDRESSES[0]}:{port}"
            self.environment = auth | {"RAY_ADDRESS": self.address}
            self._joins = [f"--address={self.address}"]
            self.start(1)
            for node in (0, 1):
                self._wait(node, "ray_current_cluster")
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, node: int) -> None:
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={ADDRESSES[node]}",
            f"--temp-dir={self.folder / str(node)}", "--object-store-memory=80000000", "--include-log-monitor=false",
            "--min-worker-port=0", "--max-worker-port=0", "--num-cpus=1", "--num-gpus=0", *self._joins,
        ]  # fmt: skip
        with (self.folder / f"{node}.out").open("wb") as out:
            self.nodes[node] = subprocess.Popen(
                command, env=self._own, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _wait(self, node: int, pattern: str) -> str:
        def written() -> str:
            assert self.nodes[node].poll() is None, f"node {node} ended: {output.read_text(errors='replace')[-2000:]}"
            with suppress(FileNotFoundError):  # Ray renames a file while the loop reads it
                paths = (self.folder / str(node)).glob(pattern)
                return next((text for path in paths if (text := path.read_text().strip())), "")
            return ""

        output = self.folder / f"{node}.out"
        return eventually(written, f"node {node} did not start in time: see {output}")

    def processes(self, node: int | None = None) -> list[psutil.Process]:
        """Return the processes of this cluster or of one node."""
        sessions = {process.pid for name, process in self.nodes.items() if node in (None, name)}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                marked = node is None and process.environ().get(MARK) == str(self.folder)
                if marked or os.getsid(process.pid) in sessions:
                    found.append(process)
        return found

    def settings(self, folder: Path, text: str = "") -> None:
        """Do nothing: Ray needs no settings."""

    def runs(self) -> list[psutil.Process]:
        """Return the processes that train, on both nodes."""
        return training(self.processes())

    def workers(self) -> list[psutil.Process]:
        """Return Ray's worker processes on both nodes."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                found += [process] if process.cmdline()[0].startswith("ray::train") else []
        return found

    def lose(self, node: int, everything: bool = True) -> None:
        """Kill all processes of a node, or only its raylet."""

        def struck() -> bool:
            killed = False
            for process in self.processes(node):
                with suppress(psutil.Error):
                    if everything or process.name() == "raylet":
                        process.kill()
                        killed = True
            return killed

        eventually(lambda: struck() or self.nodes[node].poll() is not None)
        self.nodes[node].wait()

    def __exit__(self, *_: object) -> None:
        for node in reversed(self.nodes.values()):
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 8
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        for node in self.nodes.values():
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
