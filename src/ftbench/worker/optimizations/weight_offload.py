"""Keep weights in host memory. The model is loaded into host memory (`model/loading.py`). The weights of a layer
are copied to the device before the layer computes (`kernels/weight_stream.py`). The embedding stays on the host, and
the device reads single rows of the embedding. The chunked loss copies the head to the device. Trained layers are copied
back after their update in the backward pass. The optimizer updates a trained embedding and head in host memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from ftbench.core.units import GIB
from ftbench.kernels import mixins
from ftbench.kernels.weight_stream import Copies, HostMatrix, Weight, WeightStream
from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import decoder, decoder_layers

_STREAM = "weight_stream"  # attribute of the decoder; it holds the weights of the layers


@contextmanager
def quantised_on(device: torch.device) -> Iterator[None]:
    """Make bitsandbytes quantize host tensors on the device inside the `with` block, one matrix at a time. Quantizing
    on the CPU would be much slower. The 4-bit codes are the same as for a model that is loaded on the device."""
    from bitsandbytes.nn import Params4bit

    quantise = Params4bit._quantize

    def there_and_back(self: Any, where: Any) -> Any:
        quantise(self, device)
        self.quant_state.to(where)
        self.data = self.data.to(where)
        return self

    with mock.patch.object(Params4bit, "_quantize", there_and_back):
        yield


def keep_on_host(model: Any, spec: Experiment, device: torch.device) -> Any:
    """Move a model from host memory to the device, and return it. The matrices of the layers, the embedding and the
    head stay in host memory."""
    copies = Copies(device)
    layers = ([*_matrices(layer)] for layer in decoder_layers(model))
    stream = WeightStream(layers, copies, trained=spec.method.name == "full")
    embedding, head = (part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    if spec.optimizations.chunked_loss:
        stream.head = HostMatrix(head.data, copies)
        head.data = stream.head.view
        head.fetch = stream.head.fetch
    if embedding is not head:
        embedding.data = HostMatrix(embedding.data, copies).view
    for module in model.modules():
        _to_device(module, device)
    setattr(decoder(model), _STREAM, stream)
    if hasattr(model, "hf_device_map"):
        model.hf_device_map = {"": device}
    return model


def _matrices(layer: Any) -> Iterator[Weight]:
    """Yield each matrix of a layer, with a function that replaces its tensor. For a 4-bit matrix, also yield its
    scales."""

    def attribute(owner: Any, name: str) -> Weight:
        return Weight(getattr(owner, name), lambda tensor: setattr(owner, name, tensor))

    for parameter in layer.parameters():
        if parameter.ndim >= 2:
            yield attribute(parameter, "data")
        if (state := getattr(parameter, "quant_state", None)) is not None:
            yield attribute(state, "absmax")


def _to_device(module: nn.Module, device: torch.device) -> None:
    """Move the tensors of a module, but not of its submodules, to the device. Names and tied weights stay the same."""
    for parameter in module.parameters(recurse=False):
        if (state := getattr(parameter, "quant_state", None)) is not None:
            state.to(device)
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


class _InTurn(nn.Module):
    """Mixin that loads a layer's weights before each forward pass. transformers' checkpointing calls this `__call__`
    inside the checkpoint, so recomputation also loads them. Compiled code runs later, in nn.Module's `__call__`."""

    stream: WeightStream
    index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.stream.take(self.index)
        return super().__call__(*args, **kwargs)


def apply(model: Any, spec: Experiment) -> None:
    """Make each layer load its weights before its forward pass."""
    stream = getattr(decoder(model), _STREAM)
    for index, layer in enumerate(decoder_layers(model)):
        mixins.add(_InTurn, layer, last=True)  # so that its `__call__` runs inside the checkpoint
        layer.stream, layer.index = stream, index


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return the GiB of weights on the host, of buffers on the device and copied so far, and the allocator setting."""
    if (stream := getattr(decoder(model), _STREAM, None)) is None:
        return {}
    return {
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF")),
        "weights_on_host_gb": stream.copies.held / GIB,
        "weight_buffers_gb": sum(buffer.nbytes for buffer in stream.buffers) / GIB,
        "weights_moved_gb": stream.copies.bytes / GIB,
    }


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return an error message if a layer's matrices are not in the two buffers, or were not loaded in both passes."""
    if not spec.optimizations.weight_offload:
        return []
    stream = getattr(decoder(model), _STREAM, None)
    if stream is None:
        return ["optimizations.weight_offload is on, but all weights are on the GPU"]
    sentences = []
    buffers = [buffer.untyped_storage().data_ptr() for buffer in stream.buffers]
    for index, layer in enumerate(decoder_layers(model)):
        left = [
            name for name, parameter in layer.named_parameters()
            if parameter.ndim >= 2 and (spec.method.name == "full" or not parameter.requires_grad)
            and parameter.untyped_storage().data_ptr() != buffers[index % 2]
        ]  # fmt: skip
        if left:
            sentences.append(f"optimizations.weight_offload: {left[0]} of layer {index} is not in the shared buffer")
    if min(stream.turns) < 2:
        idle = stream.turns.index(min(stream.turns))
        sentences.append(f"optimizations.weight_offload is on and layer {idle} was loaded {min(stream.turns)} times")
    if stream.head is not None and not stream.head.fetches:
        sentences.append("optimizations.weight_offload is on, but the head was not copied to the GPU for the loss")
    return sentences[:1]
