import os
import select
import signal
import subprocess
import sys
import types
from contextlib import suppress

import psutil
import pytest

from ftbench.launch import family, process
from ftbench.launch.process import run_child, signals
from ftbench.store.process_identity import process_start
from waiting import eventually

NO_GROUP = "family._new_group = lambda mark: None"


@pytest.fixture(params=["", NO_GROUP], ids=["control group", "no control group"])
def group(request):
    """What a parent does before: nothing where there are control groups, which is skipped elsewhere, or without one."""
    with family.control_group("0.0.0.0") as made:
        if not request.param and made is None:
            pytest.skip(f"this system gives this process no control group that it may write to: {family.own_group()}")
    return request.param


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 90.0)
    monkeypatch.setattr(process, "TICK_S", 0.02)


@pytest.fixture
def strict(monkeypatch):
    """Kill soon what does not listen; else who listens may take his time, as on a busy machine."""
    monkeypatch.setattr(process, "GRACE_S", 0.5)


@pytest.fixture
def run(tmp_path):
    """Runs Python code as a child; its output is in log.txt. With `stops` its time is up once it is ready."""

    def start(code, stops=False, on_tick=lambda: None):
        log = tmp_path / "log.txt"

        def watch():
            on_tick()
            return TIME_UP if stops and "ready\n" in log.read_text() else None

        with signals() as asked:
            return run_child([sys.executable, "-S", "-u", "-c", code], os.environ, log, asked, watch)

    return start


@pytest.fixture
def log(tmp_path):
    return lambda: (tmp_path / "log.txt").read_text()


def gone(pid):
    return process_start(pid) is None


def family_in(log):
    """The processes of FAMILY: child, four of its own, supervisor."""
    return [int(word) for word in log.splitlines()[0].split() if word.isdecimal()]


TIME_UP = process.Stop("timeout", "too long")
SLEEP = "import time; print('ready'); time.sleep(60)"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# The child, one of its own, one in a session of its own, and both again as a daemon that nobody waits for.
FAMILY = """
import os, subprocess
family = [os.getpid()]
for prefix in ([], ['setsid']):
    family.append(subprocess.Popen([*prefix, 'sleep', '600']).pid)
    daemon = [*prefix, 'sh', '-c', 'exec sleep 600 >/dev/null & echo $!']
    family.append(int(subprocess.run(daemon, stdout=subprocess.PIPE, check=True).stdout))
print(*family, 'and its supervisor', os.getppid())
"""


def test_a_child_that_ends_well_ends_with_nought(run, log):
    ended = run("print('hello'); import sys; print('there', file=sys.stderr)")
    assert (ended.code, ended.stop, ended.kernel_oom) == (0, None, False)
    assert log() == "hello\nthere\n"


def test_the_exit_code_is_the_childs(run):
    assert run("raise SystemExit(7)").code == 7


def test_a_child_that_is_killed_from_outside_ends_with_the_signal(run):
    ended = run("import os; os.kill(os.getpid(), 11)")
    assert (ended.code, ended.stop) == (-signal.SIGSEGV, None)


def test_the_log_is_added_to_and_never_cut(run, log):
    run("print(1)")
    run("print(2)")
    assert log() == "1\n2\n"


def test_a_child_reads_nothing_from_the_terminal(run, log):
    assert run("import sys; print(repr(sys.stdin.read()))").code == 0
    assert log() == "''\n"


def test_the_child_gets_the_environment_it_was_given_and_no_other(tmp_path):
    argv = [sys.executable, "-S", "-c", "import os; print(sorted(os.environ.keys() & {'A', 'HOME'}))"]
    with signals() as asked:
        run_child(argv, {"A": "1"}, tmp_path / "log.txt", asked)
    assert (tmp_path / "log.txt").read_text() == "['A']\n"


def test_a_program_that_does_not_exist_is_named_in_the_log(tmp_path, log):
    with signals() as asked:
        ended = run_child([str(tmp_path / "nothing")], os.environ, tmp_path / "log.txt", asked)
    assert ended.code == 127
    assert log() == f"{tmp_path}/nothing: No such file or directory\n"


def test_the_wall_time_is_that_from_the_child_s_start_to_its_end(run, monkeypatch):
    clock = iter([100.0, 107.5])
    monkeypatch.setattr(process, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    assert run("pass").wall_s == 7.5


def test_a_child_that_takes_too_long_is_asked_to_end(run, log):
    handler = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('last words'), sys.exit(3)))"
    ended = run(f"{handler}; {SLEEP}", stops=True)
    assert (ended.code, ended.stop) == (3, TIME_UP)
    assert log() == "ready\nlast words\n"


@pytest.mark.usefixtures("strict")
def test_a_child_that_will_not_end_is_killed_after_the_grace(run):
    ended = run(IGNORE_TERM + SLEEP, stops=True)
    assert (ended.code, ended.stop) == (-signal.SIGKILL, TIME_UP)


@pytest.mark.usefixtures("strict")
def test_a_child_that_is_stopped_is_killed_after_the_grace(run):
    ended = run(f"import os; print('ready'); os.kill(os.getpid(), 19); {SLEEP}", stops=True)
    assert (ended.code, ended.stop) == (-signal.SIGKILL, TIME_UP)


@pytest.mark.parametrize(
    ("code", "stops"),
    [(FAMILY, False), (FAMILY + SLEEP, True), (IGNORE_TERM + FAMILY + SLEEP, True)],
    ids=["child ended", "timeout", "killed"],
)
@pytest.mark.usefixtures("strict")
def test_the_family_is_gone_when_the_child_has_ended(run, log, code, stops):
    run(code, stops=stops)
    assert len(family_in(log())) == 6
    assert all(map(gone, family_in(log())))


def test_the_tick_is_called_while_the_child_runs(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ticks = []
    waits = "import pathlib, time\nwhile not pathlib.Path('ticked').exists(): time.sleep(0.01)"
    run(waits, on_tick=lambda: (ticks.append(1), len(ticks) == 2 and (tmp_path / "ticked").touch()))
    assert len(ticks) >= 2


def test_an_error_in_the_tick_ends_the_child_and_is_told(run, log):
    def tick():
        if log():
            raise RuntimeError("cannot draw")

    with pytest.raises(RuntimeError, match="cannot draw"):
        run(f"import os; print(os.getpid()); {SLEEP}", on_tick=tick)
    assert gone(int(log().split()[0]))


def test_handlers_are_given_back(run):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    run("")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before


# --- signals to this process -----------------------------------------------------------------------------------------


def test_a_signal_is_in_the_pipe_before_any_handler_of_python_runs():
    """Or one that comes between the interpreter's last look and a wait would be heard after the wait."""
    with signals() as asked:
        signal.signal(signal.SIGTERM, lambda *_: None)  # all that could write is the interpreter itself
        signal.raise_signal(signal.SIGTERM)
        assert select.select([asked], [], [], 0)[0] == [asked]


PARENT = """
import os, signal, sys
from pathlib import Path
from ftbench.launch import family, process
process.GRACE_S, process.TICK_S = {grace}, 0.02
{before}
child = {child!r}
with process.signals() as asked:
    ended = process.run_child([sys.executable, "-S", "-u", "-c", child], os.environ, Path(sys.argv[1]), asked)
print(ended.code, ended.stop and ended.stop.state)
"""


class Parent:
    """A process of its own that runs a child with a family."""

    def __init__(self, log, child, before="", grace=0.5):
        self.log, self.starts = log, {}
        script = PARENT.format(child=FAMILY + child, before=before, grace=grace)
        self.process = subprocess.Popen([sys.executable, "-c", script, log], stdout=subprocess.PIPE, text=True)

    def family(self):
        """The ids of child, grandchildren and supervisor, once they run."""
        eventually(lambda: self.log.exists() and "\n" in self.log.read_text())
        pids = family_in(self.log.read_text())
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
def test_a_signal_to_the_parent_ends_the_whole_family(parent, number):
    one = parent()
    family = one.family()
    one.process.send_signal(number)
    assert one.end() == "-15 interrupted"
    assert all(map(gone, family))


def test_a_parent_that_is_killed_leaves_nothing_of_the_family(parent):
    one = parent(child=IGNORE_TERM + SLEEP)
    family = one.family()
    one.process.kill()
    one.end()
    eventually(lambda: all(map(gone, family)))


@pytest.mark.parametrize(("member", "code"), [(0, "-9 None"), (1, "0 None"), (5, "-9 None")],
                         ids=["child", "grandchild", "supervisor"])  # fmt: skip
def test_whichever_of_the_family_is_killed_nothing_outlives_the_child(parent, member, code):
    one = parent(child="os.waitpid(family[1], 0)" if member == 1 else SLEEP)
    family = one.family()
    os.kill(family[member], signal.SIGKILL)
    assert one.end() == code
    assert all(map(gone, family))


def is_dead(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def send(pids, number):
    for pid in pids:
        with suppress(ProcessLookupError):  # one that goes on, or a neighbour's ftbench, may have ended it by now
            os.kill(pid, number)


def strike(one, family_ids, *names):
    """Kill some of ftbench, both supervisors and the guard at the same instant: the others go on when those are dead.
    Return the ids of all but ftbench."""
    upper = psutil.Process(family_ids[-1]).parent()
    (guard,) = [each for each in upper.children() if each.pid != family_ids[-1]]
    four = {"ftbench": one.process.pid, "upper": upper.pid, "lower": family_ids[-1], "guard": guard.pid}
    killed = {four[name] for name in names}
    send(four.values(), signal.SIGSTOP)
    send(killed, signal.SIGKILL)
    eventually(lambda: all(map(is_dead, killed)))
    send({*four.values()} - killed, signal.SIGCONT)
    return list(four.values())[1:]


@pytest.mark.parametrize(
    "killed", ["ftbench upper", "ftbench lower", "upper lower", "ftbench upper lower", "upper guard", "lower guard"]
)
def test_who_is_left_of_ftbench_and_the_supervisors_leaves_nothing_of_the_family(parent, group, killed):
    one = parent(child=IGNORE_TERM + SLEEP, before=group)
    family_ids = one.family()
    others = strike(one, family_ids, *killed.split())
    eventually(lambda: all(map(gone, [*family_ids, *others])))
    one.process.wait()


def test_what_a_kill_of_all_four_leaves_is_ended_by_the_next_command(parent, group):
    one = parent(child=IGNORE_TERM + SLEEP, before=group)
    family_ids = one.family()
    strike(one, family_ids, "ftbench", "upper", "lower", "guard")
    one.process.wait()
    family.end_orphans()
    eventually(lambda: all(map(gone, family_ids)))


def test_what_has_lost_its_mark_as_it_ends_is_waited_for(monkeypatch):
    looks, kill, kills = iter([["a mark"]]), os.kill, []
    with subprocess.Popen(["sleep", "600"]) as ending:
        monkeypatch.setattr(family, "_marked", lambda: [(ending.pid, mark) for mark in next(looks, [])])
        monkeypatch.setattr(os, "kill", lambda *call: kill(*call) if kills else kills.append(call))
        family.end_marked("a mark".__eq__)
        left = not gone(ending.pid)
        ending.kill()
    assert not left


WITHOUT_MARK = "import subprocess; subprocess.Popen(['env', '-i', 'setsid', 'sh', '-c', 'echo $$; exec sleep 600']); "


@pytest.mark.parametrize("killed", ["ftbench upper lower", "ftbench upper lower guard"])
@pytest.mark.parametrize("group", [""], ids=["control group"], indirect=True)
def test_a_control_group_holds_what_has_taken_its_mark_off(parent, group, killed):
    one = parent(child=WITHOUT_MARK + SLEEP)
    family_ids = one.family()
    stranger = int(eventually(lambda: [line for line in one.log.read_text().splitlines() if line.isdecimal()])[0])
    one.starts[stranger] = process_start(stranger)
    strike(one, family_ids, *killed.split())
    one.process.wait()
    if "guard" in killed:
        family.end_orphans()
    eventually(lambda: gone(stranger))


@pytest.mark.parametrize("killed", ["", "ftbench", "ftbench upper lower guard"])
@pytest.mark.parametrize("group", [""], ids=["control group"], indirect=True)
def test_no_control_group_is_left_of_a_run(parent, group, killed):
    one = parent(child="input()" if not killed else SLEEP)
    groups = f"ftbench-*.{one.process.pid}.*"
    if killed:
        strike(one, one.family(), *killed.split())
    one.process.wait()
    if "guard" in killed:  # what is left, another ftbench of this machine may end before
        family.end_orphans()
    eventually(lambda: not [*family.own_group().glob(groups)])


def test_a_system_without_control_groups_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(family, "own_group", lambda: None)
    with family.control_group("1.2.3.4") as made:
        assert made is None
    monkeypatch.setattr(family, "own_group", lambda: tmp_path / "read-only")
    with family.control_group("1.2.3.4") as made:
        assert made is None
    monkeypatch.setattr(family, "own_group", lambda: tmp_path)  # of Linux before 5.14
    with family.control_group("1.2.3.4") as made:
        assert made is None
    assert not [*tmp_path.iterdir()]


def test_a_family_whose_ftbench_is_alive_is_no_orphan(parent):
    one = parent()
    family_ids = one.family()
    family.end_orphans()
    assert not any(map(gone, family_ids))
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == "-15 interrupted"


def test_what_must_not_be_killed_does_not_keep_a_supervisor(tmp_path):
    """A descendant of another user (setuid) is its owner's to end."""
    forbidden = "raise PermissionError if number == 9 else OSError"
    code = f"""
import os, sys
os.environ["FTBENCH_FAMILY"] = "0.0.0.of-this-test"
from ftbench.launch import supervisor
def kill(pid, number): {forbidden}
os.kill = kill
supervisor.main("", ["sh", "-c", "setsid sleep 600 >/dev/null & echo $!; exit 3"])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.wait(300) == 3
        os.kill(int(supervisor.stdout.read()), signal.SIGKILL)


def test_a_supervisor_that_is_stopped_keeps_nothing_alive(parent):
    one = parent(child=IGNORE_TERM + SLEEP)
    family = one.family()
    os.kill(family[5], signal.SIGSTOP)
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == "-9 interrupted"
    assert all(map(gone, family))


def test_a_second_signal_does_not_wait_for_the_grace(parent):
    one = parent(child="import signal, time; signal.signal(15, lambda *_: print('asked')); time.sleep(60)", grace=600)
    family = one.family()
    one.process.send_signal(signal.SIGTERM)
    eventually(lambda: "asked" in one.log.read_text())
    one.process.send_signal(signal.SIGINT)
    assert one.end() == "-9 interrupted"
    eventually(lambda: all(map(gone, family)))


def test_a_hangup_is_ignored_where_it_was_ignored_before(parent):
    """Under nohup a closed terminal does not end the night's run."""
    one = parent(child="import time; time.sleep(0.6)", before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    one.family()
    one.process.send_signal(signal.SIGHUP)
    assert one.end() == "0 None"


def test_a_signal_while_the_child_is_started_loses_no_child(parent):
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
    eventually(lambda: all(map(gone, one.family())))


def test_signals_to_other_processes_of_the_terminal_do_not_reach_the_child(run, log):
    run(f"import os; print(os.getsid(0) == os.getpgid(0) != {os.getsid(0)})")
    assert log() == "True\n"


# --- the kernel's OOM killer -----------------------------------------------------------------------------------------

KILL = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("counts", "code", "stops", "oom"),
    [
        ([3, 4], KILL, False, True),
        ([3, 3], KILL, False, False),
        ([3, 4], "raise SystemExit(137)", False, True),
        ([3, 4], "raise SystemExit(1)", False, False),
        ([3, 4], "", False, False),
        ([3, 4], IGNORE_TERM + SLEEP, True, False),
    ],
    ids=["killed", "killed by somebody", "shell killed", "failed", "ended well", "killed by us"],
)
@pytest.mark.usefixtures("strict")
def test_the_kernel_is_blamed_for_a_kill_that_it_counted(run, monkeypatch, counts, code, stops, oom):
    remaining = iter(counts)
    monkeypatch.setattr(process, "_kernel_oom_kills", lambda: next(remaining))
    assert run(code, stops=stops).kernel_oom is oom


def test_kills_of_the_control_group_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(family, "own_group", lambda: None)
    machine = process._kernel_oom_kills()
    (tmp_path / "memory.events").write_text("low 0\noom 9\noom_kill 2\noom_group_kill 7\n")
    monkeypatch.setattr(family, "own_group", lambda: tmp_path)
    assert process._kernel_oom_kills() == machine + 2
    monkeypatch.setattr(family, "own_group", lambda: tmp_path / "absent")
    assert process._kernel_oom_kills() == machine


def test_the_control_group_of_this_process_is_a_folder_or_none():
    found = family.own_group()
    assert found is None or found.is_dir()
