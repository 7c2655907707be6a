import os

import pytest

from ftbench.core.rows import StepRow, header, to_csv
from ftbench.launch import follow
from ftbench.launch.follow import COMPILE_S, START_S, STEP_S, Follower, Watchdog
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import WAITING, RunDir, write_json
from ftbench.store.steps import StepsTail, StepsWriter

ROWS = [StepRow(step=i, phase="train", step_time_s=0.5, loss=2.0 - i / 10, throttle="名前") for i in range(1, 5)]


class Clock:
    """A monotonic clock that moves when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def moves(self, by):
        self.now += by


@pytest.fixture
def clock(monkeypatch):
    moved = Clock()
    monkeypatch.setattr(follow.time, "monotonic", moved)
    return moved


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def phase(run, *names):
    write_json(run.phases, {"phases": [{"name": name, "start_s": 0.0} for name in names]})


def append(run, *rows):
    with run.steps.open("a", encoding="utf-8") as file:
        file.write("".join([*([] if file.tell() else [header()]), *map(to_csv, rows)]))


# --- the tail of steps.csv -------------------------------------------------------------------------------------------


def test_a_tail_gives_each_row_once(tmp_path):
    tail, writer = StepsTail(tmp_path / "steps.csv"), StepsWriter(tmp_path / "steps.csv")
    assert tail.read() == []
    for row in ROWS:
        writer.append([row])
        assert tail.read() == [row]
        assert tail.read() == []
    writer.close()


def test_a_tail_of_a_file_that_is_not_there_yet_is_empty(tmp_path):
    tail = StepsTail(tmp_path / "steps.csv")
    assert tail.read() == []
    append(RunDir(tmp_path), *ROWS)
    assert tail.read() == ROWS


def test_a_file_cut_at_any_byte_gives_its_whole_rows_now_and_the_others_later(tmp_path):
    path = tmp_path / "steps.csv"
    whole = (header() + "".join(map(to_csv, ROWS))).encode()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        tail = StepsTail(path)
        first = tail.read()
        assert first == ROWS[: max(0, whole[:cut].count(b"\n") - 1)], f"cut at byte {cut}"
        path.write_bytes(whole)
        assert first + tail.read() == ROWS, f"cut at byte {cut}"


def test_a_file_that_grows_byte_by_byte_gives_each_row_once(tmp_path):
    tail, found = StepsTail(tmp_path / "steps.csv"), []
    with (tmp_path / "steps.csv").open("wb", buffering=0) as file:
        for byte in (header() + "".join(map(to_csv, ROWS))).encode():
            file.write(bytes([byte]))
            found += tail.read()
    assert found == ROWS


@pytest.mark.parametrize("garbage", [b"\xff\x00", b"not a row", b"", b'5,"an open quote', b"x" * 100_000])
def test_garbage_between_two_rows_spoils_neither(tmp_path, garbage):
    path, lines = tmp_path / "steps.csv", [header().encode(), *(to_csv(row).encode() for row in ROWS)]
    path.write_bytes(b"".join([*lines[:3], garbage + b"\n", *lines[3:]]))
    assert StepsTail(path).read() == ROWS
    tail = StepsTail(path)
    path.write_bytes(b"".join(lines[:3]))
    assert tail.read() == ROWS[:2]
    with path.open("ab") as file:
        file.write(b"".join([garbage + b"\n", *lines[3:]]))
    assert tail.read() == ROWS[2:]


# --- what a run's files say ------------------------------------------------------------------------------------------


def test_a_run_without_files_is_starting(run):
    follower = Follower(run)
    follower.poll()
    assert (follower.text(), follower.phase, follower.last, follower.steps) == ("starting", "", None, 0)


def test_before_its_first_step_a_run_is_in_its_phase(run):
    follower = Follower(run)
    phase(run, "import", "prepare_data")
    follower.poll()
    assert follower.text() == "prepare data"


def test_after_a_step_a_run_says_where_it_is(run):
    follower = Follower(run)
    append(run, StepRow(step=7, phase="train", progress_ratio=0.35, step_time_s=0.5, real_tokens=1000,
                        peak_memory_gb=12.3, loss=1.5))  # fmt: skip
    follower.poll()
    assert follower.text() == "step 7 of 20 · 35 % · 2,000 tokens/s · 12.3 GiB · loss 1.500"


def test_the_rest_is_reckoned_by_recent_steps_and_goes_down_between_them(run, clock):
    """A first step of 60 s compiled; the others take 2 s each, of which 90 are left after the tenth."""
    follower = Follower(run)
    append(run, *(StepRow(step=i, phase="train", progress_ratio=i / 100, elapsed_time_sec=58.0 + 2 * i)
                  for i in range(1, 11)))  # fmt: skip
    follower.poll()
    assert follower.left_s() == pytest.approx(180.0)
    clock.moves(1.5)
    follower.poll()
    assert follower.left_s() == pytest.approx(178.5)
    assert follower.text().endswith("about 2 min 58 s left")
    append(run, *(StepRow(step=i, phase="train", progress_ratio=i / 100, elapsed_time_sec=78.0 + 4 * (i - 10))
                  for i in range(11, 41)))  # fmt: skip
    follower.poll()
    assert follower.left_s() == pytest.approx(60 * 4.0)


@pytest.mark.parametrize("row", [{"progress_ratio": 1e-300}, {"progress_ratio": None}, {"elapsed_time_sec": None}])
def test_without_what_it_is_reckoned_by_nothing_is_said_of_the_rest(run, row):
    follower = Follower(run)
    known = {"phase": "train", "progress_ratio": 0.1, "elapsed_time_sec": 1.0}
    append(run, *(StepRow(**known | row | {"step": step}) for step in (1, 2)))
    follower.poll()
    assert follower.left_s() is None
    assert "left" not in follower.text()


def test_after_the_last_step_a_run_says_what_it_does_then(run):
    follower = Follower(run)
    append(run, StepRow(step=20, phase="train", progress_ratio=1.0))
    phase(run, "train", "save")
    follower.poll()
    assert follower.text() == "step 20 of 20 · 100 % · save"


def test_what_a_step_does_not_know_is_left_out(run):
    follower = Follower(run)
    append(run, StepRow(step=7, phase="train"))
    follower.poll()
    assert follower.text() == "step 7"


def test_steps_are_counted_and_evaluations_are_not(run):
    follower = Follower(run)
    append(run, ROWS[0], StepRow(step=1, phase="evaluate", step_time_s=99.0))
    follower.poll()
    append(run, StepRow(step=2, phase="train", step_time_s=3.0), ROWS[2])
    follower.poll()
    assert (follower.steps, follower.last.step, follower.slowest_s) == (3, 3, 3.0)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"phases": []}', '{"phases": [{}]}'])
def test_a_file_of_phases_that_says_nothing_is_no_trouble(run, content):
    follower = Follower(run)
    run.phases.write_text(content)
    follower.poll()
    assert follower.text() == "starting"


def test_what_has_changed_is_known_by_the_files_and_not_by_looking(run, clock):
    follower = Follower(run)
    begin = clock.now
    clock.moves(10)
    follower.poll()
    assert follower.changed == begin
    for write in (
        lambda: phase(run, "load"),
        lambda: append(run, ROWS[0]),
        lambda: run.log.write_text("fetching weights"),
        lambda: run.log.write_text("fetching weights, still"),
        lambda: phase(run, "load", "train"),
    ):
        clock.moves(10)
        write()
        follower.poll()
        assert follower.changed == clock.now
        before = clock.now
        clock.moves(10)
        follower.poll()
        assert follower.changed == before


def test_a_file_of_the_same_size_is_changed_by_its_time(run, clock):
    follower = Follower(run)
    phase(run, "load")
    follower.poll()
    clock.moves(10)
    os.utime(run.phases, (1, 1))  # a clock that was set back
    follower.poll()
    assert follower.changed == clock.now


def test_half_a_row_is_a_sign_of_life_and_no_step(run, clock):
    follower = Follower(run)
    clock.moves(10)
    run.steps.write_text(header() + to_csv(ROWS[0])[:9])
    follower.poll()
    assert (follower.changed, follower.steps) == (clock.now, 0)


def test_a_log_line_in_the_middle_of_training_is_no_sign_of_life(run, clock):
    follower = Follower(run)
    phase(run, "train")
    follower.poll()
    before = clock.now
    clock.moves(10)
    run.log.write_text("a warning, again")
    follower.poll()
    assert follower.changed == before


# --- the watchdog ----------------------------------------------------------------------------------------------------


class Watched:
    """A run under a watchdog, as it is polled."""

    def __init__(self, run, clock, deadline=None, **sections):
        spec = Experiment.model_validate({"name": "x", "model": {"id": "tiny/qwen3", "weights": "random"}} | sections)
        self.run, self.clock, self.follower = run, clock, Follower(run)
        self.watchdog = Watchdog(spec, self.follower, deadline)

    def trains(self, *times):
        phase(self.run, "load", "train")
        append(self.run, *(StepRow(step=i, phase="train", step_time_s=s) for i, s in enumerate(times, start=1)))
        self.look()

    def look(self):
        self.follower.poll()
        return self.watchdog.check()

    def patience(self):
        """Seconds without change after which it says stop, found by waiting."""
        limit = self.watchdog.limit_s()
        begin = self.follower.changed
        self.clock.now = begin + limit
        assert self.look() is None
        self.clock.now = begin + limit + 1
        assert self.look().state == "timeout"
        return limit


@pytest.fixture
def watched(run, clock):
    return lambda **more: Watched(run, clock, **more)


def test_waiting_for_another_run_is_not_this_runs_time(watched):
    run = watched(launch={"timeout_s": 60.0, "no_step_s": 30.0})
    phase(run.run, "import", WAITING)
    for _ in range(5):
        run.clock.now += 25
        assert run.look() is None
    phase(run.run, "import", WAITING, "load")
    assert run.look() is None
    run.clock.now += 31
    assert run.look().state == "timeout"


def test_before_the_third_step_a_run_may_take_long(watched):
    assert watched().patience() == START_S


@pytest.mark.parametrize("times", [[], [100.0], [100.0, 1.0]])
def test_two_steps_teach_nothing(watched, times):
    run = watched()
    run.trains(*times)
    assert run.patience() == START_S


def test_three_quick_steps_teach_the_least_that_is_waited_for(watched):
    run = watched()
    run.trains(1.0, 0.1, 0.1)
    assert run.patience() == STEP_S


def test_where_a_new_shape_means_compiling_again_more_is_waited_for(watched):
    run = watched(optimizations={"compile": True})
    run.trains(1.0, 0.1, 0.1)
    assert run.patience() == COMPILE_S


@pytest.mark.parametrize("compiled", [False, True])
def test_slow_steps_teach_patience(watched, compiled):
    run = watched(optimizations={"compile": compiled})
    run.trains(60.0, 50.0, 55.0)
    assert run.patience() == pytest.approx(1200.0)
    run.trains(50.0, 90.0)
    assert run.patience() == pytest.approx(1800.0)


def test_after_training_a_run_may_take_long_again(watched):
    run = watched()
    run.trains(1.0, 0.1, 0.1)
    phase(run.run, "load", "train", "save")
    run.look()
    assert run.patience() == START_S


def test_a_run_that_moves_is_never_ended(watched, clock):
    run = watched()
    for step in range(1, 50):
        run.trains(1.0, 0.1, 0.1)
        clock.moves(STEP_S - 1)
        assert run.look() is None, step


@pytest.mark.parametrize("times", [(), (1.0, 0.1, 0.1)])
def test_a_number_is_taken_as_it_is(watched, times):
    run = watched(launch={"no_step_s": 5})
    if times:
        run.trains(*times)
    assert run.patience() == 5


@pytest.mark.parametrize("times", [(), (1.0, 0.1, 0.1)])
def test_off_waits_for_ever(watched, clock, times):
    run = watched(launch={"no_step_s": False})
    if times:
        run.trains(*times)
    clock.moves(1e9)
    assert (run.watchdog.limit_s(), run.look()) == (None, None)


def test_what_stood_still_and_where_is_told(watched, clock):
    run = watched()
    clock.moves(1801)
    assert run.look().reason == "nothing moved for 30 min 01 s before the first step (launch.no_step_s)"
    run.trains(1.0, 0.1, 0.1)
    clock.moves(301)
    assert run.look().reason == "nothing moved for 5 min 01 s after step 3 in train (launch.no_step_s)"


@pytest.mark.parametrize("patience", ["auto", "off", 9999])
def test_a_run_whose_time_is_up_is_ended_though_it_moves(watched, clock, patience):
    run = watched(launch={"timeout_s": 60, "no_step_s": patience})
    clock.moves(60)
    run.trains(1.0)
    assert run.look() is None
    clock.moves(1)
    run.trains(1.0)
    assert run.look() == follow.Stop("timeout", "not done after launch.timeout_s = 60 seconds")


def test_a_run_is_interrupted_when_the_sweep_has_no_time_left(watched, clock):
    run = watched(deadline=clock.now + 100, launch={"no_step_s": "off"})
    clock.moves(100)
    assert run.look() is None
    clock.moves(1)
    assert run.look() == follow.Stop("interrupted", "the sweep's time budget ran out")


def test_a_run_that_had_its_own_time_is_a_timeout_though_the_sweep_has_none_left(watched, clock):
    run = watched(deadline=clock.now + 100, launch={"timeout_s": 60})
    clock.moves(101)
    assert run.look().state == "timeout"
