"""What stands in the way of a task that waits in Slurm's queue, where waiting alone changes nothing."""

from ftbench.sweep.execute.slurm_queue import Queue, Task, ask

# Reasons of squeue(1) that last until somebody changes the cluster or what is asked of it, with what to do.
_ASKED = "ask for what the partition gives (`scontrol show partition`): time, partition and options in slurm.yaml"
_REASONS = {
    "PartitionTimeLimit": _ASKED, "PartitionNodeLimit": _ASKED, "BadConstraints": _ASKED, "InvalidAccount": _ASKED,
    "InvalidQOS": _ASKED, "PartitionDown": "its administrator opens it, or name another in slurm.yaml",
    "PartitionInactive": "its administrator opens it, or name another in slurm.yaml",
    "JobHeldAdmin": "ask who holds it (`scontrol show job`)", "JobHeldUser": "`scontrol release` lets it go",
}  # fmt: skip
_NODES = ("Nodes required for job are DOWN", "ReqNodeNotAvail", "Resources", "launch failed")
_AWAY = ("down", "drain", "fail")  # how the states of nodes begin that take no task (sinfo(1))


def obstacle(queue: Queue, task: Task) -> str | None:
    """Return why a task cannot begin, with a way out; None where it waits for its turn."""
    entry = queue.entry(task)
    if entry is None or entry.state != "PENDING":
        return None
    if entry.reason in _REASONS:
        return f"no task can begin in this queue ({entry.reason}): {_REASONS[entry.reason]}"
    nodes = _nodes(task) if entry.reason.startswith(_NODES) else []
    if not nodes or any(not state.startswith(_AWAY) for _, state, _ in nodes):
        return None
    words = [f"{name} {state} ({why.strip()})" if why.strip() != "none" else f"{name} {state}"
             for name, state, why in nodes]  # fmt: skip
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    return (f"no node can take a task: {', '.join(words[:4])}{more}: `scontrol update NodeName=… State=RESUME` brings "
            "one back that is well, or name another partition in slurm.yaml")  # fmt: skip


def _nodes(task: Task) -> list[tuple[str, str, str]]:
    """Return name, state and reason of each node of a task's partition; nothing where Slurm does not say."""
    partitions = ask(["squeue", "-h", "-j", task.name, "-o", "%P"]).stdout.split()[:1]
    lines = ask(["sinfo", "-h", "-N", "-p", *partitions, "-o", "%N|%T|%E"]).stdout if partitions else ""
    rows = [line.strip().split("|", 2) for line in lines.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]
