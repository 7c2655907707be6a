"""Compute linear layers with the same input x, their LoRA adapters, and all gradients.

Layer i computes y_i = x @ W_i' + s * (x @ A_i') @ B_i'. Here ' is the transpose and s is the scale of LoRA. The shapes
are x: (tokens, in), W_i: (out, in), A_i: (rank, in), B_i: (out, rank).

`Augmented` joins base weights and adapters of all layers in one matrix: y = [x | x A'] [W | s B]' and
dx = [dy | dy s B] [W ; A]. Here | joins columns and ; joins rows. After torch.compile, x and dy are written directly
into the wider buffer, without a copy. For 4-bit layers, each pass creates the matrix (`four_bit_weights.py`).
`AdaptersOnly` computes only the adapters. The base layers can have any format.

The table counts reads and writes of activations in one Qwen3-8B layer. The hidden size is 4,096, the queries are 4,096
wide, keys and values 1,024 each, and the MLP 12,288. One unit is tokens * 4,096 values. The seven projections read 9
units and write 9.5 units. The counts come from the code that torch.compile generated for the layer (torch 2.13):

| reads and writes for the adapters                      | peft | AdaptersOnly | Augmented |
|--------------------------------------------------------|-----:|-------------:|----------:|
| forward: read x for the product with A                 |    9 |            6 |         6 |
| forward: write the product with B, read it for the sum |   19 |           19 |         0 |
| backward: write s * dy                                 |  9.5 |            0 |         0 |
| backward: read dy for the gradients of x A' and of B   |   19 |           19 |        19 |
| backward: write the product with A, read it for dx     |   18 |           12 |         0 |
| backward: read x for the gradient of A                 |    9 |            6 |         6 |
| backward: add the gradients of one input               |    8 |            8 |         0 |
| copy the outputs of attention and the next layer       |    0 |            0 |         4 |
| total                                                  | 91.5 |           70 |        35 |
| number of small matrix products                        |   42 |           33 |        16 |
Adding s * B @ A to W once per step would need fewer units. But bfloat16 would lose updates below 1/256 of a weight.
"""

from typing import Any

import torch

from ftbench.kernels.four_bit_weights import augmented_weight

# The number of extra columns of a buffer is a multiple of 64: 64 16-bit values have 128 bytes. torch.compile pads
# rows of other sizes (torch._inductor.config.padding_alignment_bytes) and then copies them for custom operations.
ALIGNED = 64
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # names of layers that read the same input


def siblings(name: str) -> tuple[str, Any]:
    """Return a key that is equal for layers with the same input, for example for q_proj, k_proj and v_proj of a decoder
    layer. `name` is the dotted name of a layer, with or without peft's suffix `.base_layer`."""
    parent, _, layer = name.removesuffix(".base_layer").rpartition(".")
    return parent, next((names for names in _SIBLINGS if layer in names), layer)


@torch.library.custom_op("ftbench::fill_columns", mutates_args=("wide",))
def fill_columns(wide: torch.Tensor, factor: torch.Tensor, width: int) -> None:
    """Set wide[:, width:] = wide[:, :width] @ factor. The shapes are wide: (tokens, width + rank), factor: (width,
    rank). This is a custom operation, because torch.compile would otherwise copy `wide`."""
    torch.mm(wide[:, :width], factor, out=wide[:, width:])


@torch.library.custom_op("ftbench::add_product", mutates_args=("total",))
def add_product(total: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> None:
    """Set total = total + x @ factor in place. The shapes are x: (tokens, rank), factor: (rank, out), total: (tokens,
    out). This is a custom operation, because torch.compile would otherwise write a second tensor (tokens, out)."""
    total.addmm_(x, factor)


class Augmented(torch.autograd.Function):
    """Return x W' + s (x A') B' (tokens, out), followed by r zero columns. W, A and B contain the weights and adapters
    of all layers. s is the scale of LoRA. r is the sum of ranks, rounded up. x is (tokens, in) or (tokens, in + r).

    The weight (out + r, in + r) is [[W, s B], [A, 0]], where B is block diagonal. `parts` contains `count` tensors from
    which `weight_of` makes the weight, then all scales, then A and B of each layer. A and B receive the gradients, but
    their values are read from the weight. The forward pass overwrites the r extra columns of x. The backward pass
    overwrites the r extra columns of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, *parts: Any) -> torch.Tensor:
        weight = weight_of(parts[:count])
        scales, *adapters = parts[count:]
        width = adapters[0].shape[1]
        out, rank = weight.shape[0] + width - weight.shape[1], weight.shape[1] - width
        room = x.new_zeros(x.shape[0], rank)
        ctx.has_room = x.shape[1] > width
        wide = x if ctx.has_room else torch.cat([x, room], 1)
        fill_columns(wide, weight[out:, :width].t(), width)
        ctx.save_for_backward(wide, *parts[:count], *adapters)
        ctx.scales, ctx.count = scales, count
        return torch.cat([wide @ weight[:out].t(), room], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wide, *parts = ctx.saved_tensors
        (dy,) = gradients
        weight, adapters = weight_of(parts[: ctx.count], dy), parts[ctx.count :]
        out = sum(b.shape[0] for b in adapters[1::2])
        width = wide.shape[1] + out - weight.shape[0]
        fill_columns(dy, weight[:out, width:], out)
        da = dy[:, out:].t() @ wide[:, :width]
        db = dy[:, :out].t() @ wide[:, width:]
        dx = dy @ weight[:, :width] if ctx.needs_input_grad[0] else None
        if dx is not None and ctx.has_room:
            dx = torch.cat([dx, dx.new_zeros(len(dx), wide.shape[1] - width)], 1)
        return dx, None, *[None] * ctx.count, None, *split_gradients(da, db, ctx.scales, adapters)


def weight_of(parts: Any, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weight of `Augmented`. `parts` contains this weight, or for 4-bit layers the arguments of
    `augmented_weight`: a, b, and the tensors of each layer. A layer with double quantization has six tensors."""
    if len(parts) == 1:
        return parts[0]
    a, b, *layers = parts
    return augmented_weight(a, b, layers, 6 if layers[1].dtype == torch.uint8 else 3, gradient)


def split_gradients(da: torch.Tensor, db: torch.Tensor, scales: Any, adapters: Any) -> list[torch.Tensor]:
    """Return the gradients of A and B of each layer, in the order of `adapters`. `da` (ranks, in) contains the
    gradients of all A. `db` (out, ranks) contains the gradients of all s * B, where s is the scale of LoRA. `ranks` is
    the sum of ranks."""
    of_adapters, rank, out = [], 0, 0
    for a, b, scale in zip(adapters[::2], adapters[1::2], scales, strict=True):
        r, n = a.shape[0], b.shape[0]
        of_adapters.append(da[rank : rank + r].to(a.dtype))
        of_adapters.append((db[out : out + n, rank : rank + r] * scale).to(b.dtype))
        rank, out = rank + r, out + n
    return of_adapters


class AdaptersOnly(torch.autograd.Function):
    """Return the adapter product s * (x @ A') @ B' (tokens, output width) of each layer for x: (tokens, in).

    `a` is A of all layers (layers * rank, in). `b` is s * B of all layers (sum of output widths, rank). `sizes` are the
    output widths. `scales_and_adapters` are the scales of all layers, then A and B of each layer. A and B receive the
    gradients, but their values are read from `a` and `b`.

    Scales and adapters are one `*` parameter because of torch.compile (torch 2.11 and 2.13, `call_apply`). Without
    gradients, it assumes that `forward` has no `ctx` if a call has n arguments and `forward` has n parameters. With a
    single layer and a separate parameter for the scales, both numbers would be 7.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: Any, *scales_and_adapters: Any
    ) -> Any:
        scales, *adapters = scales_and_adapters
        mid = x @ a.t()
        ctx.save_for_backward(x, mid, a, b, *adapters)
        ctx.sizes, ctx.scales = sizes, scales
        columns, rows = mid.split(b.shape[1], 1), b.split(sizes)
        return tuple(part @ row.t() for part, row in zip(columns, rows, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, mid, a, b, *adapters = ctx.saved_tensors
        rank = b.shape[1]
        dmid = torch.cat([dy @ row for dy, row in zip(gradients, b.split(ctx.sizes), strict=True)], 1)
        dx = dmid @ a if ctx.needs_input_grad[0] else None
        of_adapters = []
        parts = zip(adapters[::2], adapters[1::2], (dmid.t() @ x).split(rank), strict=True)
        for (a_i, b_i, da), dy, part, scale in zip(parts, gradients, mid.split(rank, 1), ctx.scales, strict=True):
            of_adapters += [da.to(a_i.dtype), (dy.t() @ part * scale).to(b_i.dtype)]
        return dx, None, None, None, None, *of_adapters
