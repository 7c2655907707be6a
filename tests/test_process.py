"""Processes of a run: exit codes and signals, and no descendant outlives a run."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ftbench.core.processes import process_start
from ftbench.errors import MissingError
from ftbench.launch import process, trl
from ftbench.launch.process import run_child, signals
from ftbench.spec.load import load
from waiting import eventually


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 90.0)
    monkeypatch.setattr(process, "TICK_S", 0.02)


@pytest.fixture
def strict(monkeypatch):
    """Kill a child that ignores SIGTERM soon."""
    monkeypatch.setattr(process, "GRACE_S", 0.5)


@pytest.fixture
def run(tmp_path):
    """Run Python code as a child with its output in log.txt. With `stops` it times out once it is ready."""

    def start(code, stops=False, on_tick=lambda: None):
        log = tmp_path / "log.txt"

        def watch():
            on_tick()
            return TIME_UP if stops and "ready\n" in log.read_text() else None

        with signals() as pipe:
            return run_child([sys.executable, "-S", "-u", "-c", code], os.environ, log, pipe, watch)

    return start


@pytest.fixture
def log(tmp_path):
    return lambda: (tmp_path / "log.txt").read_text()


def test_a_process_that_cannot_be_started_is_an_error(run, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(MissingError, match="/missing cannot be started: No such file"):
        run("")


def gone(pid):
    return process_start(pid) is None


def tree_in(log):
    """Return the pids that TREE prints: the child, its four descendants, and the supervisor."""
    return [int(word) for word in log.splitlines()[0].split() if word.isdecimal()]


TIME_UP = process.Stop("timeout", "too long")
SLEEP = "import time; print('ready'); time.sleep(60)"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# A child prints when the process has stopped (state T), so SIGTERM does not arrive earlier.
STOP = """
import os
pid = os.getpid()
if not os.fork():
    while open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'T': pass
    print('ready', flush=True)
    os._exit(0)
os.kill(pid, 19)
"""
# The child starts a process, one in another session, and both again as daemons.
TREE = """
import os, subprocess
pids = [os.getpid()]
for prefix in ([], ['setsid']):
    pids.append(subprocess.Popen([*prefix, 'sleep', '600']).pid)
    daemon = [*prefix, 'sh', '-c', 'exec sleep 600 >/dev/null & echo $!']
    pids.append(int(subprocess.run(daemon, stdout=subprocess.PIPE, check=True).stdout))
print(*pids, 'and the supervisor', os.getppid())
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [
        ("print('out'); import sys; print('err', file=sys.stderr)", 0, "out\nerr\n"),
        ("raise SystemExit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV, ""),
        ("import sys; print(repr(sys.stdin.read()))", 0, "''\n"),
    ],
    ids=["output", "exit code", "signal", "no stdin"],
)
def test_exit_code_and_output_are_those_of_the_child(run, log, code, exit_code, text):
    ended = run(code)
    assert (ended.code, ended.stop, ended.kernel_oom) == (exit_code, None, False)
    assert log() == text


def test_timeout_sends_sigterm_first(run, log):
    handler = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('last words'), sys.exit(3)))"
    ended = run(f"{handler}; {SLEEP}", stops=True)
    assert (ended.code, ended.stop) == (3, TIME_UP)
    assert log() == "ready\nlast words\n"


@pytest.mark.parametrize("before", [IGNORE_TERM, STOP], ids=["ignores SIGTERM", "stopped"])
@pytest.mark.usefixtures("strict")
def test_child_is_killed_after_the_grace_period(run, before):
    ended = run(before + SLEEP, stops=True)
    assert (ended.code, ended.stop) == (-signal.SIGKILL, TIME_UP)


@pytest.mark.parametrize(("code", "stops"), [(TREE, False), (IGNORE_TERM + TREE + SLEEP, True)],
                         ids=["child ended", "killed"])  # fmt: skip
@pytest.mark.usefixtures("strict")
def test_all_descendants_end_with_the_child(run, log, code, stops):
    run(code, stops=stops)
    assert len(tree_in(log())) == 6
    assert all(map(gone, tree_in(log())))


def test_error_in_the_watch_function_ends_the_child(run, log):
    def tick():
        if log():
            raise RuntimeError("cannot draw")

    with pytest.raises(RuntimeError, match="cannot draw"):
        run(f"import os; print(os.getpid()); {SLEEP}", on_tick=tick)
    assert gone(int(log().split()[0]))


def test_child_has_its_own_session(run, log):
    run(f"import os; print(os.getsid(0) == os.getpgid(0) != {os.getsid(0)})")
    assert log() == "True\n"


# --- signals to this process -----------------------------------------------------------------------------------------


def test_signal_is_in_the_pipe_before_a_python_handler_runs():
    """Otherwise a signal just before a wait would be noticed only after it."""
    with signals() as pipe:
        signal.signal(signal.SIGTERM, lambda *_: None)  # only the interpreter itself writes to the pipe
        signal.raise_signal(signal.SIGTERM)
        assert select.select([pipe], [], [], 0)[0] == [pipe]


PARENT = """
import os, signal, sys
from pathlib import Path
from ftbench.launch import process
process.GRACE_S, process.TICK_S = {grace}, 0.02
{before}
child = {child!r}
with process.signals() as pipe:
    ended = process.run_child([sys.executable, "-S", "-u", "-c", child], os.environ, Path(sys.argv[1]), pipe)
print(ended.code, ended.stop and ended.stop.state)
"""


class Parent:
    """A process that runs a child with descendants."""

    def __init__(self, log, child, before="", grace=0.5):
        self.log, self.starts = log, {}
        script = PARENT.format(child=TREE + child, before=before, grace=grace)
        self.process = subprocess.Popen([sys.executable, "-c", script, log], stdout=subprocess.PIPE, text=True)

    def tree(self):
        """Return the pids of child, descendants and supervisor, once they run."""
        eventually(lambda: self.log.exists() and "\n" in self.log.read_text())
        pids = tree_in(self.log.read_text())
        self.starts |= {pid: process_start(pid) for pid in pids}
        return pids

    def end(self):
        return self.process.communicate(timeout=300)[0].strip()


@pytest.fixture
def parent(tmp_path):
    started = []

    def start(child=SLEEP, **options):
        started.append(Parent(tmp_path / "log.txt", child, **options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()
        for pid, start in each.starts.items():
            if start is not None and process_start(pid) == start:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_to_the_parent_ends_all_descendants(parent, number):
    one = parent()
    tree = one.tree()
    one.process.send_signal(number)
    assert one.end() == "-15 interrupted"
    assert all(map(gone, tree))


def test_killed_parent_leaves_no_process(parent):
    one = parent(child=IGNORE_TERM + SLEEP)
    tree = one.tree()
    one.process.kill()
    one.end()
    eventually(lambda: all(map(gone, tree)))


@pytest.mark.parametrize(("member", "code"), [(0, "-9 None"), (1, "0 None")], ids=["child", "grandchild"])
def test_killed_descendant_leaves_no_process(parent, member, code):
    one = parent(child="os.waitpid(pids[1], 0)" if member == 1 else SLEEP)
    tree = one.tree()
    os.kill(tree[member], signal.SIGKILL)
    assert one.end() == code
    assert all(map(gone, tree))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_supervisor_leaves_no_process_of_the_session(parent, number):
    one = parent(child=IGNORE_TERM + SLEEP)
    tree = one.tree()
    os.kill(tree[5], number)
    if number == signal.SIGSTOP:
        one.process.send_signal(signal.SIGTERM)
    assert one.end() == ("-9 None" if number == signal.SIGKILL else "-9 interrupted")
    eventually(lambda: all(map(gone, [*tree[:3], tree[5]])))  # not the two in another session


def test_parent_and_supervisor_killed_at_once_end_the_child(parent):
    one = parent(child=IGNORE_TERM + SLEEP)
    tree = one.tree()
    both = [psutil.Process(pid) for pid in (one.process.pid, tree[5])]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in both:
            each.send_signal(number)
    one.process.wait()
    eventually(lambda: gone(tree[0]))


def test_second_signal_skips_the_grace_period(parent):
    one = parent(child="import signal, time; signal.signal(15, lambda *_: print('asked')); time.sleep(60)", grace=600)
    tree = one.tree()
    one.process.send_signal(signal.SIGTERM)
    eventually(lambda: "asked" in one.log.read_text())
    one.process.send_signal(signal.SIGINT)
    assert one.end() == "-9 interrupted"
    eventually(lambda: all(map(gone, tree)))


def test_ignored_hangup_stays_ignored(parent):
    """With nohup, closing the terminal does not end a run."""
    one = parent(child="import time; time.sleep(0.6)", before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    one.tree()
    one.process.send_signal(signal.SIGHUP)
    assert one.end() == "0 None"


def test_signal_during_the_start_of_the_child_ends_it(parent):
    at_once = """
class Popen(process.subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        while not Path(sys.argv[1]).read_text().endswith(chr(10)): pass
        os.kill(os.getpid(), signal.SIGTERM)
process.subprocess.Popen = Popen
"""
    one = parent(before=at_once)
    assert one.end() == "-15 interrupted"
    eventually(lambda: all(map(gone, one.tree())))


# --- the kernel's OOM killer -----------------------------------------------------------------------------------------

KILL = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("counts", "code", "stops", "oom"),
    [
        ([3, 4], KILL, False, True),
        ([3, 3], KILL, False, False),
        ([3, 4], "raise SystemExit(137)", False, True),
        ([3, 4], "raise SystemExit(1)", False, False),
        ([3, 4], IGNORE_TERM + SLEEP, True, False),
    ],
    ids=["killed", "killed by a user", "shell killed", "failed", "killed by ftbench"],
)
@pytest.mark.usefixtures("strict")
def test_kernel_oom_needs_a_kill_and_a_higher_count(run, monkeypatch, counts, code, stops, oom):
    remaining = iter(counts)
    monkeypatch.setattr(process, "_kernel_oom_kills", lambda: next(remaining))
    assert run(code, stops=stops).kernel_oom is oom


@pytest.mark.parametrize(
    ("change", "inherited", "setting"),
    [
        ("recipe=smallest", {}, "expandable_segments:True"),
        ("recipe=fastest", {}, None),
        ("recipe=smallest", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("recipe=smallest", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_only_weight_offload_changes_the_allocator_and_only_if_the_user_did_not(change, inherited, setting):
    spec = load(Path(__file__).parents[1] / "configs" / "qwen3-8b-recipes.yaml", [change])
    assert trl.environment(inherited, spec).get("PYTORCH_CUDA_ALLOC_CONF") == setting
