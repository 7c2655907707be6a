"""A real Slurm of two nodes on loopback: munged, slurmctld and two slurmd. The nodes offer no GPU."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from waiting import Holder, eventually, free_ports, training

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
LACKING = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
SKIP = pytest.mark.skipif(
    bool(LACKING), reason=f"no {', '.join(LACKING)}: apt-get install slurmctld slurmd slurm-client munge"
)
NODES = ("n1", "n2")
CONF = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=8
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,sched_min_interval=0,requeue_setup_env_fail
SchedulerType=sched/backfill
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
KillWait=5
MessageTimeout=20
SlurmctldTimeout=10
SlurmdTimeout=60
InactiveLimit=0
MinJobAge=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2
"""


class Cluster(Holder):
    """Context manager. `environment` is for Slurm's commands."""

    on = "slurm"

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="fts", dir="/tmp"))
        os.chmod(self.folder, 0o700)
        ports = free_ports(3)
        (self.folder / "slurm.conf").write_text(CONF.format(
            host=socket.gethostname(), user=getpass.getuser(), folder=self.folder, ports=ports, nodes=NODES
        ))  # fmt: skip
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        self._conf = str(self.folder / "slurm.conf")
        self.environment = {"SLURM_CONF": self._conf, "PATH": PATH}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._munge()
            self.start("slurmctld")
            for node in NODES:
                self.start(node)
            eventually(lambda: self.said("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").split() == ["idle", "idle"],
                       f"the nodes did not become idle: see {self.folder}")  # fmt: skip
        except BaseException:
            self.__exit__()
            raise
        return self

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        ends = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        places = [f"--{name}={self.folder / f'munge.{end}'}" for name, end in ends.items()]
        self._run("munged", "munged", "--foreground", "--force", "--num-threads=2", *places)
        eventually((self.folder / "munge.sock").exists, "munged did not start")

    def _run(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                command, env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def settings(self, folder: Path, text: str = "partition: debug\ntime: 5\noptions: [--exclusive]\n") -> None:
        """Write slurm.yaml into the folder of a spec. By default a cell uses a node exclusively."""
        words = " ".join(f'{name}="{value}"' for name, value in self.holding().items())
        preamble = "" if "preamble" in text else f"preamble: {json.dumps(f'export {words}')}\n"
        (folder / "slurm.yaml").write_text(text + preamble)

    def settle(self) -> None:
        """Wait until the queue is empty and both nodes are idle.

        A controller that was killed may start a job twice and drain the node (Duplicate jobid).
        """
        self.said("scancel", "--me")

        def are_idle() -> bool:
            states = set(self.said("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").split())
            if {state.rstrip("*") for state in states} & {"drained", "down"}:
                self.said("scontrol", "update", f"NodeName={','.join(NODES)}", "State=RESUME")
            return states == {"idle"} and not self.said("squeue", "--me", "-h")

        eventually(are_idle, f"the nodes did not become idle again: see {self.folder}")

    def runs(self) -> list[psutil.Process]:
        """Return the processes that train, on both nodes."""
        return training([process for node in NODES for process in self.steps(node)])

    def lose(self, node: int) -> None:
        """Kill all processes of a node, and set it down without waiting for the controller's timeout."""
        self.kill(NODES[node], everything=True)
        self.said("scontrol", "update", f"NodeName={NODES[node]}", "State=DOWN", "Reason=lost")

    def start(self, name: str) -> None:
        """Start the controller or a node."""
        self._run(name, *(["slurmctld", "-D", "-i"] if name == "slurmctld" else ["slurmd", "-D", "-N", name]))

    def kill(self, name: str, everything: bool = False) -> None:
        """Kill the controller or a node's slurmd with -9; with `everything` also the processes of its jobs."""
        process = self._processes[name]
        process.kill()
        process.wait()
        for other in self.steps(name) if everything else ():
            with suppress(psutil.Error):
                other.kill()

    def steps(self, node: str) -> list[psutil.Process]:
        """Return the processes of the jobs on a node."""
        found = []
        for process in psutil.process_iter(["name"]):
            with suppress(psutil.Error):
                below = process.children(recursive=True) if process.info["name"] == "slurmstepd" else []
                own = [each.environ() for each in below[:1]]
                if any(env.get("SLURMD_NODENAME") == node and env.get("SLURM_CONF") == self._conf for env in own):
                    found += [process, *below]
        return found

    def said(self, *command: str) -> str:
        """Return the output of a Slurm command."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    def __exit__(self, *_: object) -> None:
        self.said("scancel", "--me", "--signal=KILL", "--full")
        for process in (each for node in NODES for each in self.steps(node)):
            with suppress(psutil.Error):
                process.kill()
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGKILL)
            process.wait()
        for process in psutil.process_iter(["name"]):  # steps of finished jobs that wait for their slurmd
            with suppress(psutil.Error):
                if process.info["name"] == "slurmstepd" and any(
                    file.path.startswith(str(self.folder)) for file in process.open_files()
                ):
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
