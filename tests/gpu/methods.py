"""The spec that the GPU tests train, and methods and optimizations as changes to it."""

import importlib.util
from pathlib import Path

import pytest

from ftbench.store import machine


def no_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return True
    import torch

    return not torch.cuda.is_available()


GPU = machine.gpu() or {}  # facts from the driver; torch can only give some of them by allocating memory on the GPU
CAPABILITY = tuple(GPU.get("compute_capability") or ())  # (9, 0) for an H100
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(no_gpu(), reason="no GPU on this machine")]


def why(document: dict) -> str:
    """The reason of a run that did not end well, and the last lines of its log."""
    log = Path(document["run_dir"], "log.txt")
    lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
    return "\n".join([str(document["summary"]["reason"]), *lines[-40:]])


def check_figures(code: int, document: dict) -> None:
    """Assert that a run of SPEC ended well with figures that are possible."""
    summary = document["summary"]
    assert (code, summary["state"]) == (0, "ok"), why(document)
    assert summary["steps"]["total"] == 24
    assert summary["tokens_per_s"]["real"] > 0
    memory = summary["memory_gb"]
    assert 0 < memory["allocated_peak"] <= memory["reserved_peak"] < memory["device_peak"]
    energy, seconds = summary["energy"], summary["steps"]["steady"] * summary["step_time_s"]["mean"]
    assert energy["mean_watts"] > 0
    if seconds > 0.5 or energy["joules"] is not None:  # the driver may not update its counter in a shorter time
        assert energy["joules"] > 0
    assert summary["model_tflops"] > 0
    assert summary["mfu"] is None or 0 < summary["mfu"] < 1


SPEC = """
model: {id: Qwen/Qwen3-0.6B, weights: random}
dataset: {name: synthetic, samples: 96, length: 512, max_length: 512}
train: {batch_size: 4}
"""
SHARED = "measure.share_gpu=on"
FULL = (  # so that gradients and states dominate the memory
    "method=full",
    "train.max_grad_norm=0",
    "train.optimizer=adamw_bnb_8bit",
    "optimizations.gradient_checkpointing=on",
    "optimizations.chunked_loss=256",
)
UNEQUAL = "dataset={name: synthetic, samples: 96, length: null, mean_length: 120, max_length: 512}"
SGD = ("train.optimizer=sgd", "train.learning_rate=10", "train.max_grad_norm=0")
METHODS = {
    "lora": (),
    "recipe-fastest-small": ("recipe=fastest-small",),
    "weight-offload": ("optimizations.gradient_checkpointing=on", "optimizations.weight_offload=on"),
    "weight-offload-chunked": (
        "optimizations.gradient_checkpointing=on",
        "optimizations.chunked_loss=on",
        "optimizations.weight_offload=on",
    ),
    "recipe-smallest-exact": ("recipe=smallest-exact",),
    "recipe-smallest": ("recipe=smallest",),
    "recipe-smallest-full": ("recipe=smallest-full",),
    "full-in-backward": (*FULL, "optimizations.optimizer_in_backward=on"),
    "full-states-away": (*FULL, "optimizations.optimizer_in_backward=offload"),
    "full-weights-away": (*FULL, "optimizations.optimizer_in_backward=offload", "optimizations.weight_offload=on"),
    "full-unclipped": FULL,
    "torchao-bf16": ("method=full", "train.optimizer=adamw_torchao_bf16"),
    "torchao-fp32": ("method=full", "train.optimizer=adamw_torchao_fp32"),
    "recipe-fastest-full": ("recipe=fastest-full",),
    "recipe-fastest-full-fp8": ("recipe=fastest-full-fp8",),
    "full-fp8": (*FULL, "optimizations.fp8=tensorwise"),
    "recipe-fastest-qlora": ("recipe=fastest-qlora",),
    "fused-lora-fp8-fast": (
        "optimizations.fused_lora=on",
        "optimizations.compile=on",
        "optimizations.fp8=tensorwise-fast",
    ),
    "experts-fused": ("model=tiny/qwen3-moe", "method.experts=on", "optimizations={fused_lora: on, compile: on}"),
    "experts-sgd": ("model=tiny/qwen3-moe", *SGD),
    "experts-graphed": ("model=tiny/qwen3-moe", "recipe=fastest", *SGD),
    "expert-adapters-sgd": ("model=tiny/qwen3-moe", "method.experts=on", *SGD),
    "expert-adapters": ("model=tiny/qwen3-moe", "method.experts=on", "recipe=fastest", *SGD),
    "gpt-oss-sgd": ("model=tiny/gpt-oss", *SGD),
    "gpt-oss-graphed": ("model=tiny/gpt-oss", "recipe=fastest", *SGD),
    "gpt-oss-varlen": ("model=tiny/gpt-oss", "optimizations={padding_free: on, attention: varlen}"),
    "gpt-oss-fastest": ("model=tiny/gpt-oss", "method.experts=on", "recipe=fastest"),
    "gpt-oss-flex": ("model=tiny/gpt-oss", "optimizations={padding_free: on, attention: flex_attention}"),
    "qlora": ("method=qlora",),
    "full": ("method=full",),
    "checkpointing": ("optimizations.gradient_checkpointing=on",),
    "qlora-checkpointing": ("method=qlora", "optimizations.gradient_checkpointing=on"),
    "compile": ("optimizations.compile=on",),
    "fp8": ("optimizations.compile=on", "optimizations.fp8=tensorwise"),
    "fused-lora": ("optimizations.fused_lora=on",),
    "fused-lora-compile": ("optimizations.fused_lora=on", "optimizations.compile=on", "optimizations.chunked_loss=on"),
    "fused-lora-dynamic": ("optimizations.fused_lora=on", "optimizations.compile=dynamic"),
    "fused-lora-qlora": ("method=qlora", "optimizations.fused_lora=on", "optimizations.gradient_checkpointing=on"),
    "fused-lora-fp8": ("optimizations.fused_lora=on", "optimizations.compile=on", "optimizations.fp8=tensorwise"),
    "kernels": ("optimizations.triton_kernels=on",),
    "kernels-compile": (
        "optimizations.triton_kernels=on",
        "optimizations.fused_lora=on",
        "optimizations.compile=on",
    ),
    "kernels-checkpointing": (
        "optimizations.triton_kernels=on",
        "optimizations.fused_lora=on",
        "optimizations.compile=on",
        "optimizations.gradient_checkpointing=on",
    ),
    "kernels-fp8": (
        "optimizations.triton_kernels=on",
        "optimizations.fused_lora=on",
        "optimizations.compile=on",
        "optimizations.fp8=tensorwise",
    ),
    "kernels-fp8-delayed": (
        "optimizations.triton_kernels=on",
        "optimizations.fused_lora=on",
        "optimizations.compile=on",
        "optimizations.fp8=tensorwise-delayed",
    ),
    "fp8-delayed-checkpointing": (
        "optimizations.compile=on",
        "optimizations.gradient_checkpointing=on",
        "optimizations.fp8=tensorwise-delayed",
    ),
    "kernels-qlora": ("method=qlora", "optimizations.triton_kernels=on", "optimizations.fused_lora=on"),
    "kernels-fastest": ("recipe=fastest", "optimizations.triton_kernels=on"),
    "eager": ("optimizations.attention=eager",),
    "fused": ("train.optimizer=adamw_torch_fused",),
    "paged-8bit": ("train.optimizer=paged_adamw_8bit",),
    "unsloth": ("method=unsloth",),
    "unsloth-lora": ("method={name: unsloth, load_in_4bit: off, use_gradient_checkpointing: off}",),
    "unsloth-graphs": ("method={name: unsloth, load_in_4bit: off, padded: on, cuda_graphs: on}",),
    "unsloth-unequal": ("method={name: unsloth, load_in_4bit: off}", UNEQUAL),
    "unsloth-padded": ("method={name: unsloth, load_in_4bit: off, padded: on}", UNEQUAL),
    "lora-unequal": (UNEQUAL,),
    "unsloth-packing": ("method={name: unsloth, load_in_4bit: off}", "optimizations.packing=on"),
    "chunked-loss": ("optimizations.chunked_loss=on",),
    "liger": ("optimizations.liger=on",),
    "compile-dynamic": ("optimizations.compile=dynamic", "optimizations.chunked_loss=on"),
    "selective": ("optimizations.gradient_checkpointing=selective",),
    "offload": ("optimizations.activation_offload=on",),
    "checkpoint-offload": ("optimizations.gradient_checkpointing=offload",),
    "qlora-16-bit": ("method={name: qlora, upcast: off}", "optimizations.gradient_checkpointing=on"),
    "small-chunks": ("optimizations.chunked_loss=256",),
    "recipe-fastest": ("recipe=fastest",),
    "recipe-fastest-fp8": ("recipe=fastest-fp8",),
    "fastest-launched": ("recipe=fastest", "optimizations.cuda_graph=off"),
    "fp8-graphed": ("recipe=fastest-fp8", "optimizations.cuda_graph=on"),
    "recipe-small": ("recipe=small",),
    "padding-free": ("optimizations.padding_free=on",),
    "varlen": ("optimizations.padding_free=on", "optimizations.attention=varlen"),
    "flex": ("optimizations.padding_free=on", "optimizations.attention=flex_attention"),
    "packing": ("optimizations.packing=on", "optimizations.attention=varlen"),
    "experts": ("model=tiny/qwen3-moe", "method.experts=on"),
    "gpt-oss": ("model=tiny/gpt-oss", "method.experts=on"),
    "gpt-oss-attention": ("model=tiny/gpt-oss",),
    "gpt-oss-mxfp4": ("model=tiny/gpt-oss", "method={name: qlora, quant_type: mxfp4, experts: on}"),
    "gpt-oss-unsloth": ("model=tiny/gpt-oss", "method=unsloth"),
}
# Methods of the ordinary call. The others are `exhaustive`: the recipes here contain the same optimizations,
# and the small recipes train Qwen3-8B.
FIRST = (
    "lora", "qlora", "full", "recipe-fastest", "recipe-fastest-fp8", "recipe-fastest-full",
    "recipe-fastest-full-fp8", "recipe-fastest-qlora", "recipe-fastest-small", "full-fp8", "checkpointing",
    "weight-offload", "full-unclipped", "full-in-backward", "full-states-away", "full-weights-away",
    "checkpoint-offload", "fp8", "kernels-checkpointing", "experts-graphed", "gpt-oss-fastest", "gpt-oss-mxfp4",
    "unsloth", "unsloth-unequal", "lora-unequal", "gpt-oss-unsloth", "small-8b", "smallest-8b",
    "smallest-exact-8b", "smallest-full-8b",
)  # fmt: skip


def cases(*names: str) -> list:
    """Return the names as cases of a test, those outside FIRST marked as exhaustive."""
    return [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in FIRST)) for name in names]


LONG = ("dataset.samples=12", "dataset.length=2048", "dataset.max_length=2048")
# The memory of a large model is checked for these.
LARGE = {
    "small-8b": ("model=Qwen/Qwen3-8B", "recipe=small", *LONG),
    "smallest-8b": ("model=Qwen/Qwen3-8B", "recipe=smallest", *LONG),
    "smallest-exact-8b": ("model=Qwen/Qwen3-8B", "recipe=smallest-exact", *LONG),
    "smallest-full-8b": ("model=Qwen/Qwen3-8B", "recipe=smallest-full", *LONG),
    "smallest-32b": ("model=Qwen/Qwen3-32B", "recipe=smallest", *LONG),
    "gpt-oss-20b": (
        "model=openai/gpt-oss-20b", "method={name: qlora, quant_type: mxfp4}", "dataset.samples=32",
    ),
    "gpt-oss-20b-experts": (
        "model=openai/gpt-oss-20b", "method={name: qlora, quant_type: mxfp4, experts: on}", "dataset.samples=32",
    ),
}  # fmt: skip
