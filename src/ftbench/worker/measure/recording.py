"""The recorder of this process, and the memory peaks of its phases: the same for every training loop."""

import torch

from ftbench.spec.experiment import Experiment
from ftbench.store.machine import handle_of, nvml_module
from ftbench.store.rundir import RunDir, gpus_of, read_json
from ftbench.store.steps import StepsWriter
from ftbench.worker import parallel
from ftbench.worker.device import device
from ftbench.worker.measure.contention import GpuLoad, HostLoad, own_processes
from ftbench.worker.measure.meters import meters
from ftbench.worker.measure.phases import Phases
from ftbench.worker.measure.recorder import Recorder
from ftbench.worker.measure.sampler import Sampler


def watch_memory(phases: Phases) -> None:
    """Let each phase from here on say the memory peak within it."""
    _, memory = meters(device())

    def peaks() -> dict[str, float]:
        values = memory.read()
        memory.reset()
        return {name: values[name] for name in ("peak_memory_gb", "peak_reserved_gb") if name in values}

    phases.read_peaks = peaks


def recorder_of(spec: Experiment, directory: RunDir) -> Recorder:
    """Return the recorder of this process, with samples of the host and of the GPU that trains."""
    gpu, host = device(), HostLoad()
    nvml = nvml_module() if gpu.type == "cuda" else None
    handle = nvml and handle_of(nvml, f"GPU-{torch.cuda.get_device_properties(gpu).uuid}")
    if handle is None:
        sampler = Sampler(others=[host])
    else:
        before = gpus_of(read_json(directory.machine))[gpu.index].get("process_ids") or ()
        sampler = Sampler(nvml, handle, [host, GpuLoad(nvml, handle, own_processes(nvml, handle, before))])
    rank = parallel.rank()
    share = None if rank is None else rank * spec.launch.shares // spec.launch.ranks
    writer, count_graphs = StepsWriter(directory.steps), bool(spec.optimizations.compile)
    return Recorder(writer, gpu, sampler, count_graphs, rank or 0, share)
