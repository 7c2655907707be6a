"""`train.report_to` logs each row to the requested services only."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing

import pytest

from commands import Command, write_spec
from ftbench.core.rows import StepRow
from ftbench.errors import MissingError, SpecError
from ftbench.launch import trl
from ftbench.spec.experiment import SERVICES, Experiment
from ftbench.spec.identity import fingerprint
from ftbench.spec.load import load
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.measure import reporter
from ftbench.worker.measure.reporter import Reporter, logs_of
from waiting import eventually, free_ports

MODEL = {"id": "tiny/qwen3", "weights": "random"}


def spec_with(report_to: object) -> Experiment:
    return Experiment.model_validate({"name": "a", "model": MODEL, "train": {"report_to": report_to}})


def installed(service: str) -> object:
    there = importlib.util.find_spec(service) is not None
    return pytest.param(service, marks=pytest.mark.skipif(not there, reason=f"{service} is not installed"))


# --- the spec --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "services"), [
    (None, ()), (False, ()), ("none", ()), ([], ()), ("wandb", ("wandb",)),
    (["mlflow", "trackio"], ("mlflow", "trackio")),
])  # fmt: skip
def test_report_to_accepts_a_name_or_a_list(value, services):
    assert spec_with(value).train.report_to == services
    assert Experiment.model_validate({"name": "a", "model": MODEL}).train.report_to == ()


def test_unknown_service_is_an_error_with_the_known_ones(tmp_path):
    with pytest.raises(SpecError) as refused:
        load(write_spec(tmp_path, train={"report_to": ["tensorbord"]}))
    assert "train.report_to: 'tensorbord' is not allowed; did you mean tensorboard?" in str(refused.value)
    assert all(name in str(refused.value) for name in SERVICES)


def test_report_to_does_not_change_the_fingerprint():
    assert fingerprint(spec_with("wandb"), "NVIDIA H200") == fingerprint(spec_with(None), "NVIDIA H200")


def test_missing_package_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setattr(trl.importlib.util, "find_spec", lambda name: None if name == "trackio" else name)
    with pytest.raises(MissingError) as raised:
        trl.check_installed(spec_with(["tensorboard", "trackio"]))
    assert "train.report_to needs trackio, which" in str(raised.value)
    assert "pip install trackio, or leave it out" in str(raised.value)


def test_environment_does_not_enable_a_service():
    shell = {"WANDB_DISABLED": "false", "WANDB_MODE": "online", "DISABLE_MLFLOW_INTEGRATION": "FALSE"}
    off = trl.environment(shell, spec_with(None))
    assert (off["WANDB_DISABLED"], off["WANDB_MODE"], off["DISABLE_MLFLOW_INTEGRATION"]) == ("true", "disabled", "TRUE")
    assert trl.environment({}, spec_with(["tensorboard"]))["WANDB_MODE"] == "disabled"


def test_requested_service_keeps_the_shells_settings():
    environment = trl.environment({"WANDB_MODE": "offline"}, spec_with(["wandb", "mlflow"]))
    assert environment["WANDB_MODE"] == "offline"
    assert "WANDB_DISABLED" not in environment
    assert "DISABLE_MLFLOW_INTEGRATION" not in environment


# --- rows ------------------------------------------------------------------------------------------------------------


def test_row_is_logged_with_rates_and_without_unknown_values():
    row = StepRow(step=3, phase="train", rank=0, step_time_s=0.5, real_tokens=100, samples=4, peak_memory_gb=1.5,
                  data_time_s=0.01, throttle="none")  # fmt: skip
    assert logs_of(row) == {
        "step_time_s": 0.5, "real_tokens": 100, "samples": 4, "peak_memory_gb": 1.5, "data_time_s": 0.01,
        "tokens_per_s": 200.0, "samples_per_s": 8.0,
    }  # fmt: skip


def test_evaluation_names_have_a_prefix():
    assert logs_of(StepRow(step=3, phase="evaluate", loss=2.0)) == {"eval_loss": 2.0}


# --- a service that is slow or broken --------------------------------------------------------------------------------


class Service(reporter.TrainerCallback):
    """Record events and threads. Fail in the event `fails_in`, and wait for `gate` before logs."""

    def __init__(self, fails_in: str = "", gate: threading.Event | None = None) -> None:
        self.events, self.threads, self.fails_in, self.gate = [], set(), fails_in, gate

    def _record(self, event, state, **values):
        self.threads.add(threading.get_ident())
        if self.gate and event == "on_log":
            assert self.gate.wait(300)
        if event == self.fails_in:
            raise ConnectionError("no route")
        self.events.append((event, state.global_step, values.get("logs")))

    def on_train_begin(self, args, state, control, **values):
        self._record("on_train_begin", state, **values)

    def on_log(self, args, state, control, **values):
        self._record("on_log", state, **values)

    def on_train_end(self, args, state, control, **values):
        self._record("on_train_end", state, **values)


class State:
    global_step, epoch = 0, 0.0


def started(*services: Service) -> Reporter:
    found = Reporter(list(services), [f"service {i}" for i in range(len(services))])
    found.on_train_begin(None, State(), None)
    return found


def test_rows_are_logged_in_order_by_one_thread():
    service = Service()
    found = started(service)
    found.rows([StepRow(step=1, loss=3.0), StepRow(step=2, loss=2.0)])
    assert found.finish() == []
    assert service.events == [("on_train_begin", 0, None), ("on_log", 1, {"loss": 3.0}), ("on_log", 2, {"loss": 2.0}),
                            ("on_train_end", 0, None)]  # fmt: skip
    assert len(service.threads) == 1
    assert threading.get_ident() not in service.threads


def test_slow_service_does_not_block():
    service = Service(gate=threading.Event())
    found = started(service)
    found.rows([StepRow(step=i, loss=1.0) for i in range(1, 6)])  # returns while the service waits
    assert [event for event, *_ in service.events] == ["on_train_begin"]
    service.gate.set()
    assert found.finish() == []
    assert len(service.events) == 7


def test_failing_service_is_a_warning():
    broken, fine = Service(fails_in="on_log"), Service()
    found = started(broken, fine)
    found.rows([StepRow(step=7, loss=1.0), StepRow(step=8, loss=1.0)])
    (problem,) = found.finish()
    assert problem == "train.report_to: service 0 failed after step 7 (ConnectionError: no route)"
    assert [step for event, step, _ in fine.events if event == "on_log"] == [7, 8]


def test_service_that_does_not_start_fails_the_run():
    with pytest.raises(MissingError, match=r"service 0 did not start .* remove it from train\.report_to"):
        started(Service(fails_in="on_train_begin"))


# --- real ones -------------------------------------------------------------------------------------------------------

TRAINS = {
    "model": MODEL,
    "dataset": {"name": "synthetic", "samples": 12, "mean_length": 20, "max_length": 64, "eval_samples": 2},
}


@pytest.fixture
def trained(tmp_path, cache, monkeypatch):
    """Run with services and environment variables."""

    def run(report_to, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        spec = write_spec(tmp_path, **TRAINS, train={"batch_size": 2, "report_to": report_to})
        with Command(spec, tmp_path / "out", cwd=tmp_path) as command:
            command.finish()
        assert command.code == 0, command.stderr
        assert not [w for w in command.summary()["warnings"] if "report_to" in w]
        return command.run

    return run


@pytest.mark.slow
def test_rows_are_in_tensorboards_event_file(trained):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trained("tensorboard")
    (file,) = (run.path / "tensorboard").glob("events.out.tfevents.*")
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    rows = [row for row in read_steps(run.steps)[0] if row.phase == "train"]
    assert len(rows) == 6
    for name in ("loss", "step_time_s", "data_time_s", "peak_memory_gb", "real_tokens", "grad_norm"):
        scalars = events.Scalars(f"train/{name}")
        assert [scalar.step for scalar in scalars] == [row.step for row in rows]
        assert [scalar.value for scalar in scalars] == pytest.approx([getattr(row, name) for row in rows], rel=1e-6)
    rates = [scalar.value for scalar in events.Scalars("train/tokens_per_s")]
    assert rates == pytest.approx([row.real_tokens / row.step_time_s for row in rows], rel=1e-6)
    (evaluated,) = events.Scalars("eval/loss")
    assert evaluated.value == pytest.approx(next(r.loss for r in read_steps(run.steps)[0] if r.phase == "evaluate"))
    assert len(events.Scalars("train/train_runtime")) == 1


@pytest.mark.slow
def test_nothing_is_logged_by_default(trained, tmp_path):
    run = trained([], TENSORBOARD_LOGGING_DIR=tmp_path / "tb", WANDB_MODE="online")
    assert read_json(run.spec_json)["train"]["report_to"] == []
    assert not (run.path / "tensorboard").exists()
    assert not (tmp_path / "tb").exists()
    assert not (tmp_path / "wandb").exists()


def step_times(run):
    return pytest.approx([row.step_time_s for row in read_steps(run.steps)[0] if row.phase == "train"])


def wandb_records(path):
    """Yield the records of an offline run: a LevelDB log after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, begun = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        begun, place = begun + data[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):  # a complete record, or its last part
            yield Record.FromString(begun)
            begun = b""


@pytest.mark.slow
@pytest.mark.parametrize("service", [installed("wandb")])
def test_rows_are_in_wandbs_offline_run(trained, service):
    run = trained(service, WANDB_MODE="offline")
    (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
    items = [item for record in wandb_records(file) for item in record.history.item]
    logged = [item.value_json for item in items if "train/step_time_s" in (item.key, *item.nested_key)]
    assert list(map(float, logged)) == step_times(run)


@pytest.fixture
def mlflow_server(tmp_path):
    """The address of a local MLflow server with a new database."""
    (port,) = free_ports(1)
    database = f"sqlite:///{tmp_path / 'mlflow.db'}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1",
               "--backend-store-uri", database, "--artifacts-destination", str(tmp_path / "artifacts")]  # fmt: skip
    with (tmp_path / "server.txt").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"

    def answers():
        try:
            return urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        eventually(answers, f"MLflow's server: {tmp_path / 'server.txt'}")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("service", [installed("mlflow")])
def test_rows_are_on_mlflows_server(trained, mlflow_server, service):
    import mlflow

    run = trained(service, MLFLOW_TRACKING_URI=mlflow_server)
    client = mlflow.MlflowClient(mlflow_server)
    (logged,) = client.search_runs(["0"])
    assert [metric.value for metric in client.get_metric_history(logged.info.run_id, "step_time_s")] == step_times(run)
    assert logged.info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.parametrize("service", [installed("trackio")])
def test_rows_are_in_trackios_database(trained, tmp_path, service):
    run = trained(service, TRACKIO_DIR=tmp_path / "trackio", HF_HUB_OFFLINE="1")
    (database,) = (tmp_path / "trackio").rglob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = [json.loads(metrics) for (metrics,) in connection.execute("SELECT metrics FROM metrics ORDER BY id")]
    assert [row["train/step_time_s"] for row in rows if "train/step_time_s" in row] == step_times(run)


def test_report_to_is_serialized_as_a_list(tmp_path):
    assert json.loads(spec_with("wandb").model_dump_json())["train"]["report_to"] == ["wandb"]
