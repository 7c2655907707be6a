"""The launcher for trl: start ftbench's worker, which trains with trl's trainers."""

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from ftbench.errors import MissingError
from ftbench.launch import ranks
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.optimizations.compute import DELAYED
from ftbench.store import machine
from ftbench.store.rundir import RunDir

BITSANDBYTES = ("adamw_bnb_8bit", "paged_adamw_8bit")  # optimizers of bitsandbytes
NEEDED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")

_FLASH = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}


def problems(spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
    """Return error messages for settings that do not work on a GPU of this compute capability (None: no GPU)."""
    problems = machine_incompatibilities(spec, capability)
    attention = spec.optimizations.attention
    module, package = _FLASH.get(attention, ("", ""))
    if module and not problems and not _installed(module) and not _installed("kernels"):
        problems.append(
            f"optimizations.attention {attention}: {package} is not installed: pip install it, or pip install kernels, "
            "or use sdpa"
        )
    return problems


def devices(spec: Experiment, visible: str | None) -> list[dict[str, Any]]:
    """Return the GPUs of this machine that the spec trains on."""
    return machine.gpus(visible, spec.launch.gpus_of_node)


def command(spec: Experiment, run: RunDir) -> list[str]:
    """Return the command that starts the worker. With several ranks, the command starts `launch/ranks.py`, which starts
    one worker per rank.

    `-P` removes the current directory from sys.path. Otherwise, Python could import a user's `random.py`.
    """
    worker = [sys.executable, "-P", "-m", "ftbench.worker", str(run.path.resolve())]
    return ranks.around(worker, spec, run) if spec.launch.gpus > 1 else worker


def environment(inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
    """Return the environment variables for the worker.

    Only the requested GPUs are visible. Otherwise, transformers would train on all GPUs with nn.DataParallel. GPUs have
    the same numbers as in nvidia-smi. Telemetry and logging are off. With weight_offload, the allocator extends blocks.
    """
    foreign = (*ranks.VARIABLES, *(ranks.MEETING if spec.launch.nodes == 1 else ()))
    env = {name: value for name, value in inherited.items() if name not in foreign}
    env |= {"WANDB_DISABLED": "true", "WANDB_MODE": "disabled", "DISABLE_MLFLOW_INTEGRATION": "TRUE"}
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    visible = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(spec.launch.gpus_of_node))))
    env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: spec.launch.gpus_of_node])
    if spec.optimizations.weight_offload and "PYTORCH_ALLOC_CONF" not in env:
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", **env}


def check_installed(spec: Experiment) -> None:
    """Raise MissingError with the install command if a package is missing. Do not import the packages."""
    method, optimizer, on = spec.method, spec.train.optimizer, spec.optimizations
    needs = {  # {module: (whether the spec needs it, the extra of ftbench that installs it)}
        **dict.fromkeys(NEEDED, (True, "train")),
        "bitsandbytes": ((method.quantised and not method.mxfp4) or optimizer in BITSANDBYTES, "train"),
        "PIL": (spec.dataset.has_images, "train"),
        "triton": (on.triton_kernels or on.fp8 == DELAYED, "train"),
        "liger_kernel": (on.liger, "liger"),
        "torchao": ("torchao" in optimizer, "torchao"),
        "unsloth": (method.name == "unsloth", "unsloth"),
        "deepspeed": (spec.launch.strategy.startswith("zero"), "deepspeed"),
    }
    missing = {name: extra for name, (needed, extra) in needs.items() if needed and not _installed(name)}
    if missing:
        raise MissingError(
            f"training needs {', '.join(missing)}, which this Python ({sys.executable}) does not have: "
            f"pip install 'ftbench[{','.join(dict.fromkeys(missing.values()))}]'"
        )


@cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
