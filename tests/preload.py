"""Imports and first calls that each forked command would repeat. The fork server imports this module once."""

import gc
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock

from tests.quick_libraries import quicken

from ftbench.spec.experiment import Experiment, resolve
from ftbench.store import rundir

MODULES = (
    "ftbench.cli", "ftbench.sweep.sweep", "ftbench.sweep.loop", "ftbench.report.build", "ftbench.report.show",
    "ftbench.launch.mock", "ftbench.estimate.api", "ftbench.worker.gpu_lock", "ftbench.worker.optimizations.liger",
    "ftbench.worker.optimizations.fused_lora", "ftbench.worker.optimizations.triton_kernels", "deepspeed",
    "ftbench.worker.optimizations.compile", "peft.tuners.lora.bnb", "multiprocessing.synchronize",
)  # fmt: skip
TINY = {
    "name": "tiny", "model": {"id": "tiny/qwen3", "weights": "random"}, "method": {"name": "lora"},
    "dataset": {"name": "synthetic", "samples": 2, "mean_length": 8, "max_length": 16, "eval_samples": 2},
}  # fmt: skip


def use_libraries(folder: Path) -> None:
    """Build a trainer and evaluate once. torch does not support a fork after a backward pass, so nothing is trained."""
    from accelerate.state import AcceleratorState, GradientState

    from ftbench.worker import methods, train
    from ftbench.worker.model import loading
    from ftbench.worker.outcome import Phases
    from ftbench.worker.training_run import TrainingRun

    spec, directory = resolve(Experiment.model_validate(TINY), None), rundir.create_at(folder / "run")
    source = loading.source_of(spec.model, spec.method, drawn=False, packed=False)
    tokenizer, data = train.prepared(spec, source)
    model = methods.load("lora").load(spec, source)
    run = TrainingRun(spec, directory, Phases(directory, "import"))
    train.build_trainer(run, model, tokenizer, data, None).evaluate()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


gc.disable()  # while modules are imported, as in the worker
for name in MODULES:
    with suppress(ImportError):
        import_module(name)
with suppress(ImportError):  # tqdm's lock is shared by forks: a run that a test kills would hold it for ever
    import_module("tqdm").tqdm.set_lock(RLock())
with TemporaryDirectory() as folder, suppress(ImportError):
    kept, os.environ["FTBENCH_CACHE"] = os.environ.get("FTBENCH_CACHE"), folder
    quicken()
    use_libraries(Path(folder))
    os.environ.pop("FTBENCH_CACHE")
    os.environ |= {"FTBENCH_CACHE": kept} if kept else {}
gc.enable()
gc.freeze()
