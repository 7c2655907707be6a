"""Write random weights in bitsandbytes' NF4, the format of published 4-bit checkpoints.

Qwen3-32B takes 19 GB in NF4 and 65 GB in 16 bits, so NF4 files are written and loaded in a third of the time. Loading
and quantising 16-bit files gives the same values.
"""

from collections.abc import Collection
from typing import Any

import torch

from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import EXPERTS
from ftbench.worker.device import device
from ftbench.worker.model import vision

LAYOUT = "nf4"
HEAD = "lm_head"
CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": [HEAD],
}
SHARE = 0.27  # bytes in NF4 per byte in 16 bits: 4 bits and an 8-bit scale per 64 weights


def suits(spec: Experiment, config: Any) -> bool:
    """Return whether random weights can be written to NF4 files. This requires the default 4-bit settings, one GPU, and
    a text model without experts."""
    method: Any = spec.method
    usual = (getattr(method, "quant_type", "nf4"), getattr(method, "double_quant", True)) == ("nf4", True)
    compute = getattr(method, "compute_dtype", "bfloat16") == spec.model.dtype == "bfloat16"
    dense = not vision.reads_images(config) and not any(getattr(config, name, None) for name in EXPERTS)
    alone = spec.launch.gpus == 1 and spec.launch.framework == "trl" and not spec.optimizations.weight_offload
    return method.quantised and usual and compute and dense and alone


def quantised_names(skeleton: Any) -> set[str]:
    """Return the names of the weights that bitsandbytes quantises: all linear layers except lm_head."""
    linear = (name for name, module in skeleton.named_modules() if isinstance(module, torch.nn.Linear))
    return {f"{name}.weight" for name in linear if name != HEAD}


def quantise(tensors: dict[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file. Convert the weights in `names` to NF4, and add their scales as extra tensors."""
    from bitsandbytes.nn import Params4bit

    files: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name not in names:
            files[name] = tensor
            continue
        weight = Params4bit(tensor, requires_grad=False, quant_type="nf4", compress_statistics=True).to(device())
        files[name] = weight.data.cpu()
        state = weight.quant_state.as_dict(packed=True)
        files |= {f"{name}.{key}": value.cpu().contiguous() for key, value in state.items()}
    if device().type == "cuda":
        torch.cuda.empty_cache()  # free memory for loading the model
    return files
