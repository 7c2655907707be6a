"""Compute linear layers with adapters that read the same input, y_i = x W_i' + s (x A_i') B_i', and their gradients.

The table counts passes over the activations of a Qwen3-8B layer (hidden 4,096, heads 4,096 and 2 x 1,024 wide, MLP
12,288). A unit is tokens x 4,096 values. The inputs of the seven projections have 9 units, and their outputs have 9.5.
The numbers come from the code that torch.compile generated for a layer (torch 2.13):

| reads and writes for the adapters                      | peft | beside | augmented |
|--------------------------------------------------------|-----:|-------:|----------:|
| forward: x read for A                                  |    9 |      6 |         6 |
| forward: product with B written, read by the add       |   19 |     19 |         0 |
| backward: gradient times s written                     |  9.5 |      0 |         0 |
| backward: gradient read for B and for its gradient     |   19 |     19 |        19 |
| backward: product with A written, read by the add      |   18 |     12 |         0 |
| backward: x read for A's gradient                      |    9 |      6 |         6 |
| backward: gradients of one input added up              |    8 |      8 |         0 |
| outputs of attention and the next layer copied         |    0 |      0 |         4 |
| sum                                                    | 91.5 |     70 |        35 |
| small products                                         |   42 |     33 |        16 |

`augmented` includes the adapters in the base product: y = [x | x A'] [W | s B]' and dx = [dy | dy s B] [W ; A], with
the layers that share x as one matrix. The code that computes x or dy writes into the wider buffer (torch.compile turns
a torch.cat of it into a view). `beside` leaves the base product to the base layer, which can have any format (fp8, 4
bits). An in-place addmm_ would need as many passes as `beside`. Adding s B A to W once per step would need fewer
passes. But the model would learn less, because bfloat16 loses updates below 1/256 of a weight.
"""

from typing import Any

import torch

# Extra columns of a buffer: 128 bytes in a 16-bit type. If rows are not a multiple of them, torch.compile pads GPU
# buffers (torch._inductor.config.padding_alignment_bytes) and copies them for custom operations.
ALIGNED = 64
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # names of layers that read the same input


def siblings(name: str) -> tuple[str, Any]:
    """Return a key that all layers with the same input share. `name` is the dotted name of a layer or its base
    layer."""
    parent, _, own = name.removesuffix(".base_layer").rpartition(".")
    return parent, next((names for names in _SIBLINGS if own in names), own)


@torch.library.custom_op("ftbench::fill_columns", mutates_args=("wide",))
def fill_columns(wide: torch.Tensor, factor: torch.Tensor, width: int) -> None:
    """Multiply the first `width` columns of `wide` by `factor`, and write the product into the columns after them. This
    is a custom operation because torch.compile would copy all of `wide` to write a part of it."""
    torch.mm(wide[:, :width], factor, out=wide[:, width:])


@torch.library.custom_op("ftbench::add_product", mutates_args=("total",))
def add_product(total: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> None:
    """Add the product of two thin matrices to `total` in place. torch.addmm with a new output would copy `total`."""
    total.addmm_(x, factor)


class Augmented(torch.autograd.Function):
    """Compute the outputs of all layers, tokens x (out + r), from tokens x in. The last r columns are unused until the
    backward pass.

    `weight` is [[W, s B], [A, 0]], (out + r) x (in + r). B is block diagonal. The next arguments are the scales, then
    A and B of each layer in turn, which get gradients but are not read. The incoming gradient is overwritten. x is
    overwritten too if it has the extra columns.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *scales_and_adapters: Any) -> torch.Tensor:
        scales, *adapters = scales_and_adapters
        width = adapters[0].shape[1]
        out, rank = weight.shape[0] + width - weight.shape[1], weight.shape[1] - width
        room = x.new_zeros(x.shape[0], rank)
        ctx.has_room = x.shape[1] > width
        wide = x if ctx.has_room else torch.cat([x, room], 1)
        fill_columns(wide, weight[out:, :width].t(), width)
        ctx.save_for_backward(wide, weight, *adapters)
        ctx.scales = scales
        return torch.cat([wide @ weight[:out].t(), room], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wide, weight, *adapters = ctx.saved_tensors
        (dy,) = gradients
        out = sum(b.shape[0] for b in adapters[1::2])
        width = wide.shape[1] + out - weight.shape[0]
        fill_columns(dy, weight[:out, width:], out)
        da = dy[:, out:].t() @ wide[:, :width]
        db = dy[:, :out].t() @ wide[:, width:]
        dx = dy @ weight[:, :width] if ctx.needs_input_grad[0] else None
        if dx is not None and ctx.has_room:
            dx = torch.cat([dx, dx.new_zeros(len(dx), wide.shape[1] - width)], 1)
        return dx, None, None, *split_gradients(da, db, ctx.scales, adapters)


def split_gradients(da: torch.Tensor, db: torch.Tensor, scales: Any, adapters: Any) -> list[torch.Tensor]:
    """Split the gradients of A (rank x in) and B (out x rank) of all layers into the gradients of each adapter, in
    order."""
    of_adapters, rank, out = [], 0, 0
    for a, b, scale in zip(adapters[::2], adapters[1::2], scales, strict=True):
        r, n = a.shape[0], b.shape[0]
        of_adapters.append(da[rank : rank + r].to(a.dtype))
        of_adapters.append((db[out : out + n, rank : rank + r] * scale).to(b.dtype))
        rank, out = rank + r, out + n
    return of_adapters


class Beside(torch.autograd.Function):
    """Compute, from tokens x in, the values that the adapters of each layer add to its product.

    `a` contains A of all layers, (layers r) x in. `b` contains s B of all layers, out x r. `sizes` are the output
    widths of the layers. The next arguments are the scales, then A and B of each layer in turn, which get
    gradients but are not read.

    The scales are passed together with the adapters to change the number of arguments. Without gradients, torch.compile
    assumes that `forward` has no context if a call has as many arguments as `forward` has parameters (torch 2.11 and
    2.13, `call_apply`). With one layer these counts would be equal.
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
