"""Waiting for communication, measured with CUDA events. A clock stands in for the GPU."""

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch
import torch.distributed as dist

from ftbench.worker.profile import Waits


class Gpu:
    """Replaces events and streams. A wait of stream 0 takes 5 ms, and a wait of a communication stream 70 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms, gpu = 0.0, self

        class Stream:
            def __init__(self, number: int) -> None:
                self.number = number

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self, stream: Stream) -> None:
                self.at = gpu.ms

            def elapsed_time(self, after: "Event") -> float:
                return after.at - self.at

            def wait(self, stream: Stream | None = None) -> None:
                gpu.ms += 5 if (stream or gpu.main).number == 0 else 70

        class Work:
            def wait(self) -> bool:
                gpu.ms += 2
                return True

        self.main, self.sending = Stream(0), Stream(1)
        self.current = self.main
        monkeypatch.setattr(dist, "Work", Work)
        for name, value in {"Stream": Stream, "Event": Event, "current_stream": lambda: self.current,
                            "default_stream": lambda: self.main, "synchronize": lambda: None}.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


def test_only_waits_of_the_computing_stream_in_the_last_steps_count(monkeypatch):
    gpu = Gpu(monkeypatch)
    before = torch.cuda.Event.wait, dist.Work.wait
    waits = Waits(kept=3)
    for number in (9, 1, 2, 4):  # waits in each step; the first step is too early
        for _ in range(number):
            torch.cuda.Event().wait(gpu.main)
            torch.cuda.Event().wait(stream=gpu.sending)
            gpu.ms += 100  # computing
        gpu.current = gpu.sending
        torch.cuda.Event().wait()
        assert dist.Work().wait()
        gpu.current = gpu.main
        assert dist.Work().wait()
        waits.end_step()
    assert waits.end() == 2 * 5 + 2
    assert (torch.cuda.Event.wait, dist.Work.wait) == before
