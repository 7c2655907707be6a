"""Format a profile as text: kernels by group, kernels, phases, communication."""

from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.table import text_table
from ftbench.core.units import percent
from ftbench.profile.work import short
from ftbench.store.rundir import KERNELS, SNAPSHOT, TRACE, RunDir, read_json

_SHOWN = 15


def run_text(run: RunDir) -> str:
    """Return the profile of a run as text, or an empty string without a profile. Times are per step."""
    if not (document := read_json(run.profile / KERNELS)):
        return ""
    folder = run.profile
    on_gpu, steps = document["device"] == "cuda", document["steps"]
    parts = [
        f"{units.some(steps, 'step')} on {document['gpu'] or 'the CPU'}\n{text_table(['', ''], _head(document))}",
        text_table(("group", ">ms/step", ">share", ">calls/step"), [
            (group["group"], *_ms(steps, group["time_ms"]), percent(group["share"]), f"{group['calls'] / steps:,.0f}")
            for group in document["groups"]
        ]),
        text_table((">ms/step", ">share", ">calls/step", ">mean µs", "kernel" if on_gpu else "operator"), [
            (*_ms(steps, kernel["time_ms"]), percent(kernel["share"]), f"{kernel['calls'] / steps:,.0f}",
             f"{kernel['mean_us'] or 0:.1f}", f"{short(kernel['name'])} ({kernel['group']})")
            for kernel in document["kernels"][:_SHOWN]
        ]),
        text_table(("phase", ">thread ms", ">work ms", ">idle ms"), [
            (phase["phase"], *_ms(steps, phase["cpu_ms"], phase["device_ms"], phase["idle_ms"]))
            for phase in document["phases"]
        ]),
        _sent(document, folder),
        text_table(["", ""], _files(folder)),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def _sent(document: dict[str, Any], folder: Path) -> str:
    """Return a table with one row per rank: communication time, and the part of this time that the step waits for."""
    documents = {0: document} | {int(p.parent.name[4:]): read_json(p) for p in folder.glob("rank[0-9]*/kernels.json")}
    ranks = [(rank, each["communication"]) for rank, each in sorted(documents.items()) if each.get("communication")]
    if not ranks:
        return ""
    rows = [
        (_rank(rank, folder), *_ms(document["steps"], each["total_ms"], each["exposed_ms"]),
         percent(each["overlap_share"]))
        for rank, each in ranks
    ]  # fmt: skip
    return text_table(("rank", ">sending ms/step", ">waited for", ">overlap"), rows)


def _rank(rank: int, folder: Path) -> str:
    """Return the number of a rank. With pipeline parallelism, add its stages: `1, stage 2 and 3`."""
    stages = read_json(RunDir(folder.parent).of_rank(rank).applied).get("parallel", {}).get("stages", [])
    return f"{rank}, stage {' and '.join(map(str, stages))}" if stages else str(rank)


def _ms(steps: int, *times: float) -> list[str]:
    return [f"{time / steps:.3f}" for time in times]


def _head(document: dict[str, Any]) -> list[tuple[str, str]]:
    times, on_gpu, idle = document["step_ms"], document["device"] == "cuda", document["idle"]
    step = f"{units.seconds(times['profiled'] / 1e3)} profiled"
    if times["before"]:
        step += f", {units.seconds(times['before'] / 1e3)} just before"
    busy = f"{percent(document['busy_share'])} of the profiled time"
    if not on_gpu:
        busy += " in operators; the rest is Python and waiting"
    elif document["busy_share_unprofiled"] is not None:
        busy += f"; {percent(document['busy_share_unprofiled'])} of the steps just before the profile"
    waits = document.get("host_waits_ms")  # older profiles do not have this key
    host = [] if waits is None else [f"waits {waits / document['steps']:.3f} ms per step for the GPU (0: launch-bound)"]
    per_step = [idle[key] / document["steps"] for key in ("ms", "gaps")]
    return [
        ("step", step),
        ("busy", busy),
        ("idle", "{:.3f} ms per step, in {:,.0f} gaps".format(*per_step)),
        *(("host", text) for text in host),
    ]  # fmt: skip


def _files(folder: Path) -> list[tuple[str, str]]:
    """Return table rows for the trace and the memory snapshot: the path, and the web page that opens the file."""
    files = (("trace", TRACE, "ui.perfetto.dev"), ("memory", SNAPSHOT, "pytorch.org/memory_viz"))
    return [
        row for label, name, page in files if (folder / name).is_file()
        for row in ((label, str(folder / name)), ("", f"open it in {page}"))
    ]  # fmt: skip
