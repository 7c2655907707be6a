import pytest

from ftbench.core.rows import StepRow, header, to_csv
from ftbench.launch import live, progress
from ftbench.launch.progress import START_S, Progress, Watchdog
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import WAITING, RunDir, write_json
from ftbench.store.steps import StepsTail

ROWS = [StepRow(step=i, phase="train", step_time_s=0.5, loss=2.0 - i / 10, throttle="名前") for i in range(1, 5)]


class Clock:
    """A monotonic clock that tests move."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def moves(self, by):
        self.now += by


@pytest.fixture
def clock(monkeypatch):
    moved = Clock()
    monkeypatch.setattr(progress.time, "monotonic", moved)
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


def test_file_cut_at_any_byte_gives_complete_rows(tmp_path):
    path = tmp_path / "steps.csv"
    rows = ROWS[:2]
    whole = (header() + "".join(map(to_csv, rows))).encode()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        tail = StepsTail(path)
        first = tail.read()
        assert first == rows[: max(0, whole[:cut].count(b"\n") - 1)], f"cut at byte {cut}"
        path.write_bytes(whole)
        assert first + tail.read() == rows, f"cut at byte {cut}"


# --- progress --------------------------------------------------------------------------------------------------------


def test_text_after_a_step(run):
    reader = Progress(run)
    append(run, StepRow(step=7, phase="train", progress_ratio=0.35, step_time_s=0.5, real_tokens=1000,
                        peak_memory_gb=12.3, loss=1.5))  # fmt: skip
    reader.poll()
    assert reader.text() == "step 7 of 20 · 2,000 tokens/s · loss 1.500 · 35 % · 12.3 GiB"


def test_remaining_time_uses_recent_steps(run, clock):
    """The first step takes 60 s, the others 2 s each. After the tenth, 90 steps remain."""
    reader = Progress(run)
    append(run, *(StepRow(step=i, phase="train", progress_ratio=i / 100, elapsed_time_sec=58.0 + 2 * i)
                  for i in range(1, 11)))  # fmt: skip
    reader.poll()
    assert reader.left_s() == pytest.approx(180.0)
    clock.moves(1.5)
    reader.poll()
    assert reader.left_s() == pytest.approx(178.5)
    assert reader.text() == "step 10 of 100 · about 2 min 58 s left · 10 %"
    append(run, *(StepRow(step=i, phase="train", progress_ratio=i / 100, elapsed_time_sec=78.0 + 4 * (i - 10))
                  for i in range(11, 41)))  # fmt: skip
    reader.poll()
    assert reader.left_s() == pytest.approx(60 * 4.0)


def test_only_training_steps_are_counted(run):
    reader = Progress(run)
    append(run, ROWS[0], StepRow(step=1, phase="evaluate", step_time_s=99.0))
    reader.poll()
    append(run, StepRow(step=2, phase="train", step_time_s=3.0), ROWS[2])
    reader.poll()
    assert (reader.steps, reader.last.step, reader.slowest_s) == (3, 3, 3.0)


def test_changed_is_the_time_of_the_last_change(run, clock):
    reader = Progress(run)
    begin = clock.now
    clock.moves(10)
    reader.poll()
    assert reader.changed == begin
    for write in (
        lambda: phase(run, "load"),
        lambda: append(run, ROWS[0]),
        lambda: run.log.write_text("downloading weights"),
        lambda: run.log.write_text("still downloading weights"),
        lambda: phase(run, "load", "train"),
    ):
        clock.moves(10)
        write()
        reader.poll()
        assert reader.changed == clock.now
        before = clock.now
        clock.moves(10)
        reader.poll()
        assert reader.changed == before


# --- the watchdog ----------------------------------------------------------------------------------------------------


class Watched:
    """A run under a watchdog."""

    def __init__(self, run, clock, deadline=None, **sections):
        spec = Experiment.model_validate({"name": "x", "model": {"id": "tiny/qwen3", "weights": "random"}} | sections)
        self.run, self.clock, self.reader = run, clock, Progress(run)
        self.watchdog = Watchdog(spec, self.reader, deadline)

    def trains(self, *times):
        phase(self.run, "load", "train")
        append(self.run, *(StepRow(step=i, phase="train", step_time_s=s) for i, s in enumerate(times, start=1)))
        self.look()

    def look(self):
        self.reader.poll()
        return self.watchdog.check()

    def patience(self):
        """Return the seconds without progress until it stops the run."""
        limit = self.watchdog.limit_s()
        begin = self.reader.changed
        self.clock.now = begin + limit
        assert self.look() is None
        self.clock.now = begin + limit + 1
        assert self.look().state == "timeout"
        return limit


@pytest.fixture
def watched(run, clock):
    return lambda **more: Watched(run, clock, **more)


def test_waiting_for_the_gpu_does_not_count(watched):
    run = watched(launch={"timeout_s": 60.0, "no_step_s": 30.0})
    phase(run.run, "import", WAITING)
    for _ in range(5):
        run.clock.now += 25
        assert run.look() is None
    phase(run.run, "import", WAITING, "load")
    assert run.look() is None
    run.clock.now += 31
    assert run.look().state == "timeout"


def test_limit_before_the_third_step(watched):
    assert watched().patience() == START_S


@pytest.mark.parametrize("compiled", [False, True])
def test_limit_after_slow_steps(watched, compiled):
    run = watched(optimizations={"compile": compiled})
    run.trains(60.0, 50.0, 55.0)
    assert run.patience() == pytest.approx(1200.0)
    run.trains(50.0, 90.0)
    assert run.patience() == pytest.approx(1800.0)


@pytest.mark.parametrize("times", [(), (1.0, 0.1, 0.1)])
def test_no_step_s_is_used_directly(watched, times):
    run = watched(launch={"no_step_s": 5})
    if times:
        run.trains(*times)
    assert run.patience() == 5


def test_reason_names_the_step_and_the_phase(watched, clock):
    run = watched()
    clock.moves(1801)
    assert run.look().reason == "no progress for 30 min 01 s before the first step (launch.no_step_s)"
    run.trains(1.0, 0.1, 0.1)
    clock.moves(301)
    assert run.look().reason == "no progress for 5 min 01 s after step 3 in train (launch.no_step_s)"


@pytest.mark.parametrize("patience", ["auto", "off", 9999])
def test_timeout_stops_a_run_with_progress(watched, clock, patience):
    run = watched(launch={"timeout_s": 60, "no_step_s": patience})
    clock.moves(60)
    run.trains(1.0)
    assert run.look() is None
    clock.moves(1)
    run.trains(1.0)
    assert run.look() == progress.Stop("timeout", "not finished after launch.timeout_s = 60 seconds")


def test_deadline_of_the_sweep_interrupts_the_run(watched, clock):
    run = watched(deadline=clock.now + 100, launch={"no_step_s": "off"})
    clock.moves(100)
    assert run.look() is None
    clock.moves(1)
    assert run.look() == progress.Stop("interrupted", "the sweep's time budget ran out")


@pytest.mark.parametrize("width", [80, 110])
def test_progress_of_a_sweep_keeps_speed_loss_and_time_left(run, width):
    """On a terminal with 80 columns, and in a log, where a time is before the line."""
    append(run, *(StepRow(step=i, phase="train", progress_ratio=i / 90, elapsed_time_sec=30.0 * i, step_time_s=30.0,
                          real_tokens=99_000, loss=2.0, peak_memory_gb=9.0) for i in range(1, 5)))  # fmt: skip
    reader = Progress(run)
    reader.poll()
    line = live.fitting(f"  method=lora train.batch_size=4: {reader.text()} · 61 min 00 s so far", width)
    assert len(line) <= width
    assert "size=4: step 4 of 90 · 3,300 tokens/s · loss 2.000 · about 43 min 00 s left" in line


def test_lines_of_a_log_have_at_most_120_columns(capsys):
    view = live.LiveView(0.001)
    view._shown -= 1
    view.show(["lora: step 4 of 90" + " · 3,300 tokens/s" * 9])
    assert 80 < len(capsys.readouterr().err.strip()) <= 120
