"""Runs that fail or are killed: exit code, state with reason, finished steps, no processes left."""

from __future__ import annotations

import resource
import signal
import subprocess

import psutil
import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

from commands import ENDLESS, TINY, Command, write_spec
from ftbench.errors import DataError, MissingError, NotAppliedError
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.steps import read_steps
from ftbench.worker.data.prepare import prepare
from ftbench.worker.outcome import of_exception
from waiting import eventually, fill

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("cache")]
LONG_PREPARATION = {**ENDLESS, "dataset": {"name": "synthetic", "samples": 50_000, "length": 512}}


def assert_kept(command: Command, at_least: int) -> None:
    """The steps finished before the end are in steps.csv, every line whole and none missing, and are summarised."""
    steps, warnings = read_steps(command.run.steps)
    assert warnings == []
    assert [row.step for row in steps] == list(range(1, len(steps) + 1))
    assert len(steps) >= at_least
    assert command.summary()["steps"]["total"] == len(steps)


def assert_over(command: Command, code: int, state: str) -> None:
    """Check exit code, state, stdout, and that no traceback and no process is left."""
    assert command.code == code, command.stderr
    assert command.children() == []
    assert command.state()["state"] == state
    assert rundir.read_state(command.run)["state"] == state
    assert command.state()["reason"]
    assert command.document()["state"] == command.summary()["state"] == state
    assert "Traceback" not in command.stdout + command.stderr
    assert not command.run.reserve.exists()


# --- Ctrl-C and kill -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, False), (signal.SIGINT, 1)])
def test_a_signal_during_training_keeps_the_finished_steps(tmp_path, number, processes):
    spec = write_spec(tmp_path, **ENDLESS, optimizations={"loader_processes": processes})
    with Command(spec, tmp_path / "out") as command:
        command.wait_for_steps(20)
        seen = len(command.steps())
        command.send(number)
        command.finish()
    assert_over(command, 130, "interrupted")
    assert_kept(command, at_least=seen)


@pytest.mark.parametrize("phase", ["import", "prepare_data"])
def test_ctrl_c_before_training_ends_at_once(tmp_path, phase):
    with Command(write_spec(tmp_path, **LONG_PREPARATION), tmp_path / "out", cold=phase == "import") as command:
        command.wait_for_phase(phase)
        command.send(signal.SIGINT)
        command.finish()
    assert_over(command, 130, "interrupted")
    assert_kept(command, at_least=0)
    assert command.phase() == phase


def test_a_signal_after_the_training_keeps_the_result(tmp_path):
    spec = write_spec(tmp_path, **{**ENDLESS, "train": {"batch_size": 2, "max_steps": 8}})
    with Command(spec, tmp_path / "out") as command:
        while command.process.poll() is None and '"ok"' not in "".join(
            path.read_text() for path in command.out.glob("*/*/state.json")
        ):
            pass
        command.send(signal.SIGTERM)
        command.finish()
    assert command.state()["state"] == command.summary()["state"] == "ok"


def test_a_terminated_training_process_was_interrupted(tmp_path):
    """A batch system's TERM reaches every process of a job, and the training process may be the first to end."""
    with Command(write_spec(tmp_path, **LONG_PREPARATION), tmp_path / "out") as command:
        command.wait_for_phase("prepare_data")
        child = command.worker()
        child.terminate()
        command.finish()
    assert_over(command, 130, "interrupted")
    assert command.state()["reason"] == "interrupted during prepare_data"


def test_a_killed_training_process_is_an_error_that_names_the_signal(tmp_path):
    with Command(write_spec(tmp_path, **ENDLESS), tmp_path / "out") as command:
        command.wait_for_steps(20)
        seen = len(command.steps())
        child = command.worker()
        child.kill()
        command.finish()
    assert_over(command, 1, "error")
    assert "SIGKILL" in command.state()["reason"]
    assert_kept(command, at_least=seen)


def test_kill_9_of_ftbench_leaves_no_process_and_a_readable_run(tmp_path, ftbench):
    with Command(write_spec(tmp_path, **ENDLESS), tmp_path / "out") as command:
        command.wait_for_steps(20)
        seen = len(command.steps())
        command.send(signal.SIGKILL)
        eventually(lambda: not command.children(), "a process has outlived ftbench")
        steps, _ = read_steps(command.run.steps)
        assert [row.step for row in steps] == list(range(1, len(steps) + 1))
        assert len(steps) >= seen
        command.process.wait()
    assert command.state()["state"] == "running"
    assert rundir.read_state(command.run)["state"] == "interrupted"
    code, report, _ = ftbench("report", command.run.path)
    assert code == 0
    assert "interrupted" in report
    assert "ftbench was killed" in report


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_timeout_is_a_separate_state(tmp_path):
    with Command(write_spec(tmp_path, **ENDLESS, launch={"timeout_s": 1}), tmp_path / "out") as command:
        command.finish()
    assert_over(command, 1, "timeout")
    assert "launch.timeout_s = 1 seconds" in command.state()["reason"]


def allow_little_memory() -> None:
    """Limit the addresses of this process and its run to 768 MiB more than it has."""
    limit = psutil.Process().memory_info().vms + 3 * 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def test_running_out_of_host_memory_is_a_result(tmp_path):
    """The limit is enough for a small run, but not for 100,000 tokens."""
    spec = write_spec(
        tmp_path,
        dataset={"name": "synthetic", "samples": 96, "length": 1024},
        train={"batch_size": 96, "max_steps": 1},
    )
    with Command(spec, tmp_path / "out", before=allow_little_memory) as command:
        command.finish()
    assert_over(command, 1, "oom")
    oom = command.summary()["oom"]
    assert oom["kind"] == "host"
    assert oom["bytes_requested"] > 2**20
    assert (oom["phase"], oom["step"]) == ("forward", 1)
    assert command.summary()["step_time_s"] == {}


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_run_with_an_error_message(tmp_path, small_disk):
    with Command(write_spec(tmp_path, **ENDLESS), small_disk) as command:
        command.wait_for_steps(20)
        seen = len(command.steps())
        fill(small_disk)
        command.finish()
    assert command.code == 3, command.stderr
    assert command.children() == []
    assert rundir.read_state(command.run)["state"] == "error"
    assert "no space left" in command.state()["reason"]
    assert "write elsewhere" in command.state()["reason"]
    assert "Traceback" not in command.stdout + command.stderr
    assert len(command.steps()) >= seen
    assert command.summary()["steps"]["total"] == len(command.steps())


def test_a_nearly_full_or_read_only_disk_is_refused_at_the_start(tmp_path, small_disk, ftbench):
    (small_disk / "filler").write_bytes(b"\0" * 20 * 2**20)
    command = ("run", write_spec(tmp_path), "--out", small_disk / "out")
    few = f"ftbench: {small_disk}: only 20 MiB free; free some, or write elsewhere with --out\n"
    assert ftbench(*command) == (3, "", few)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert ftbench(*command) == (3, "", f"ftbench: {small_disk}: cannot be written; choose another place with --out\n")


# --- bad data --------------------------------------------------------------------------------------------------------


FINE = b'{"instruction": "Say yes.", "output": "Yes."}\n'
HEADER = b"instruction,input,output\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", FINE * 2 + b"[1]\n", ", line 3: must be an object"),
        ("a.jsonl", FINE * 2 + '{"instruction": "是"'.encode("shift_jis", "replace") + b"\x90}\n", ": is not UTF-8"),
        ("a.jsonl", FINE + b'{"instruction": "Say yes."}\n', ", line 2: `output` is missing (format alpaca)"),
        ("a.jsonl", FINE + b'{"instruction": "Say yes.", "output": 3}\n', ", line 2: `output` is int, not text"),
        ("a.jsonl", b'{"riddle": "?", "way": "!"}\n', ", line 1: columns riddle, way match no format"),
        ("a.jsonl", FINE + b'{"instruction": \n', ", line 2: not JSON (column 16: Expecting value)"),
        ("a.json", b"[" + FINE + b"x]", ": not JSON (Expecting ',' delimiter: line 2"),
        ("a.csv", HEADER + b"Say yes.,,Yes.\nSay no.,No.\n", ", line 3: must have 3 fields, as the header names"),
        ("a.csv", HEADER + b'"Two\nlines",,Yes.\nSay no.,,\n', ", line 4: `output` is empty"),
        ("a.csv", b"", ": is empty"),
        ("a.parquet", b"PAR1 but not really", ", row 1 or later: cannot be read"),
        ("a.txt", b"Say yes.", ": .txt is not supported"),
    ],
)
def test_a_data_file_that_cannot_be_used_names_file_and_line(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    values = {"name": "bad", "model": TINY, "dataset": {"name": "file", "path": str(path)}}
    spec = Experiment.model_validate(values)
    with pytest.raises(DataError) as raised:
        prepare(spec, tokenizer=None, vocab_size=2048)
    assert str(raised.value).startswith(f"{path}{said}")
    assert of_exception(raised.value, "prepare_data", None)["exit_code"] == 2


# --- exceptions ------------------------------------------------------------------------------------------------------


def real(message: str) -> BaseException:
    """The exception that torch itself raises for running out of device memory."""
    return torch.OutOfMemoryError(message)


@pytest.mark.parametrize(
    ("error", "kind", "asked"),
    [
        (real("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"), "allocator", 2 * 2**30),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
         "host", 4096),
        (RuntimeError("CUDA error: out of memory"), "driver", None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "cublas", None),
        (MemoryError(), "host", None),
    ],
)  # fmt: skip
def test_out_of_memory_errors_contain_phase_and_size(error, kind, asked):
    found = of_exception(error, "backward", 7)
    assert found["state"] == "oom"
    assert found["oom"] == {"kind": kind, "bytes_requested": asked, "phase": "backward", "step": 7}
    assert found["reason"].startswith(f"out of memory ({kind}) in backward of step 7")


def test_torch_errors_for_host_memory_are_recognized():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    found = of_exception(raised.value, "load", None)
    assert found["oom"] == {"kind": "host", "bytes_requested": 2**60, "phase": "load", "step": None}


@pytest.mark.parametrize("error", [DataError("data.csv, line 3: bad"), MissingError("no GPU"), NotAppliedError("fp8")])
def test_user_errors_keep_message_and_exit_code(error):
    assert of_exception(error, "load", None) == {
        "state": "error", "reason": str(error), "exit_code": error.exit_code,
    }  # fmt: skip
