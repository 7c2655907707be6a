"""Streams, graphs and products of the worker on a GPU, each separately on a few megabytes, the least tested first. A
failing run that uses one has its cause here. About a minute, most of it imports and the compiler: `pytest
gpu/test_streams.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from methods import CAPABILITY, ON_GPU

torch = pytest.importorskip("torch", reason="training libraries are not installed")
pytestmark = [*ON_GPU, pytest.mark.timeout(120)]
BF16 = torch.finfo(torch.bfloat16).eps
WHILE = 20_000_000  # clock cycles that the device is kept busy for, about 10 ms: whoever does not wait is too early


@contextmanager
def unwaited():
    """Fails where torch waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def busy() -> None:
    torch.cuda._sleep(WHILE)


def near(found, expected, times: float = 4.0) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() < times * BF16 * other.float().norm()


@pytest.fixture
def copies():
    from ftbench.kernels.weight_stream import Copies

    return Copies(torch.device("cuda", 0))


def test_locked_host_memory_is_read_by_the_device_where_it_is(copies):
    from ftbench.kernels.weight_stream import HostMatrix

    matrix, before = torch.randn(3000, 64, dtype=torch.bfloat16), torch.cuda.memory_allocated()
    held = HostMatrix(matrix, copies)
    assert held._host.is_pinned()
    assert (held.view.device, torch.cuda.memory_allocated()) == (copies.device, before)
    ids = torch.randint(0, 3000, (500,))
    assert torch.equal(torch.nn.functional.embedding(ids.cuda(), held.view).cpu(), matrix[ids])
    with unwaited():
        busy()
        held.begin()
        assert not held._coming[1].query()  # nothing waited for the device
        fetched = held.fetch()
    assert torch.equal(fetched.cpu(), matrix)


def test_layers_take_turns_in_two_buffers_that_are_still_read(copies):
    """A layer's matrix is read late, while the following layers are already requested."""
    from ftbench.kernels.weight_stream import Weight, WeightStream

    layers, sums, put = 6, [], {}
    weights = [
        [Weight(torch.full((1024, 2048), float(n)), lambda there, n=n: put.__setitem__(n, there))]
        for n in range(layers)
    ]
    stream, order = WeightStream(weights, copies), [*range(layers), *reversed(range(layers)), *range(layers)]
    with unwaited():
        for index in order:
            stream.take(index)
            busy()
            sums.append(put[index].mean())
        assert not torch.cuda.current_stream().query()
    assert torch.stack(sums).tolist() == order


@pytest.mark.parametrize("kind", ["torch", "bitsandbytes", "torchao"])
def test_states_that_wait_in_host_memory_are_those_that_do_not(kind):
    from ftbench.kernels.host_states import HostStates

    make = {
        "torch": lambda given: torch.optim.AdamW(given, lr=0.1, fused=True),
        "bitsandbytes": lambda given: pytest.importorskip("bitsandbytes").optim.AdamW8bit(given, lr=0.1),
        "torchao": lambda given: pytest.importorskip("torchao.optim").AdamW8bit(given, lr=0.1),
    }[kind]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(512, 512, device="cuda")) for _ in range(5)]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    away, there = make(ours), make(theirs)
    states = HostStates(away.state, torch.device("cuda", 0))
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
            busy()
            states.around(one, away.step)
            there.step()
            one.grad = other.grad = None
        states.end_step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert states.bytes >= 5 * 2 * 512 * 512


@pytest.mark.parametrize("ddp", [False, True])
def test_replays_of_a_step_are_steps(ddp):
    from ftbench.worker import parallel
    from ftbench.worker.optimizations.cuda_graph import GraphedStep

    def train(model, batch, tokens):
        loss = model(batch["x"]).square().sum() / tokens
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    step, rows = GraphedStep(), []
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)) for _ in "ab"]
    layers[1].load_state_dict(layers[0].state_dict())
    models = [model.cuda() for model in layers]
    if ddp:
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        accelerator = SimpleNamespace(
            ddp_handler=SimpleNamespace(), prepare_model=torch.nn.parallel.DistributedDataParallel
        )
        graphed = SimpleNamespace(optimizations=SimpleNamespace(cuda_graph=True))
        parallel.load("ddp").attach(SimpleNamespace(accelerator=accelerator), graphed)
        models[0] = accelerator.prepare_model(models[0])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) for model in models]
    for number in range(5):
        batch, tokens = {"x": torch.randn(32, 64, device="cuda")}, torch.tensor(10.0 + number, device="cuda")
        losses = [step(train, models[0], batch, tokens), train(models[1], batch, tokens)]
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in models]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        rows.append(torch.stack([*losses, *norms]).tolist())
    if ddp:
        torch.distributed.destroy_process_group()
    assert step.replays == 5
    for ours, plain, our_norm, norm in rows:
        assert (ours, our_norm) == pytest.approx((plain, norm), rel=1e-5)


def experts(compiled: bool, rank: int):
    """Rows of experts (two have no rows), their factors, and the two thin products, compared with a loop."""
    from ftbench.kernels.expert_adapters import grouped, in_rows

    torch.manual_seed(0)
    ends = [0, 70, 71, 71, 200, 256]
    shapes = ((256, 64), (6, 64, rank), (128, rank, 6))  # as peft has the second factor
    given = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    given[2] = given[2].detach().float().requires_grad_()
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")

    def ours(rows, down, up):
        return grouped(grouped(rows, down, offsets), in_rows(up.permute(2, 1, 0).bfloat16()), offsets)

    def loop(rows, down, up):
        parts = rows.tensor_split(ends[:-1])
        return torch.cat([part @ a @ b for part, a, b in zip(parts, down, up.permute(2, 1, 0), strict=True)])

    return given, torch.compile(ours, fullgraph=True) if compiled else ours, loop


@pytest.mark.parametrize(("compiled", "rank"), [(False, 8), (False, 16), (True, 8)])
def test_adapters_of_experts_are_grouped_products_with_gradients(compiled, rank):
    given, ours, loop = experts(compiled, rank)
    ours(*given).square().sum().backward()  # compiled, tuned
    weight = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    for each in given:
        each.grad = None
    with unwaited():
        made = ours(*given)
        made.backward(weight)
    plain = [each.detach().float().requires_grad_() for each in given]
    expected = loop(*plain)
    expected.backward(weight.float())
    near([made, *(each.grad for each in given)], [expected, *(each.grad for each in plain)])


@pytest.mark.parametrize(("window", "compiled"), [(-1, False), (127, False), (127, True)])
def test_attention_with_sinks_is_gpt_osss(window, compiled):
    """Three samples, one of them empty, with a gradient per input, compared with transformers in float32."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    from ftbench.kernels.sink_attention import SinkAttention

    torch.manual_seed(0)
    shapes = ((300, 8, 64), (300, 2, 64), (300, 2, 64), (8,))
    ours = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    theirs = [part.detach().float().requires_grad_() for part in ours]
    bounds = torch.tensor([0, 100, 300, 300], dtype=torch.int32, device="cuda")
    sample = torch.arange(300, device="cuda") >= 100
    distance = torch.arange(300, device="cuda")[:, None] - torch.arange(300, device="cuda")
    seen = (distance >= 0) & (sample[:, None] == sample) & ((distance <= window) | (window < 0))
    mask = torch.zeros(300, 300, device="cuda").masked_fill(~seen, -torch.inf)

    def attend(*parts):
        return SinkAttention.apply(*parts, bounds, 200, 0.125, window)

    out = (torch.compile(attend, fullgraph=True) if compiled else attend)(*ours)
    layer = SimpleNamespace(num_key_value_groups=4, sinks=theirs[3], training=True)
    rows = [part.transpose(0, 1)[None] for part in theirs[:3]]
    expected = modeling_gpt_oss.eager_attention_forward(layer, *rows, mask, 0.125)[0][0]
    dout = torch.randn_like(out)
    out.backward(dout)
    expected.backward(dout.float())
    near([out, *(each.grad for each in ours)], [expected, *(each.grad for each in theirs)])


@pytest.mark.skipif(CAPABILITY < (8, 9), reason="no products in 8 bits")
@pytest.mark.parametrize("rows", [577, 2048])
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise-fast"])
def test_one_product_of_layers_in_8_bits_is_that_of_each(recipe, rows):
    from ftbench.worker.optimizations import fp8

    torch.manual_seed(0)
    bases = [torch.nn.Linear(512, out, bias=False, device="cuda", dtype=torch.bfloat16) for out in (512, 128, 128)]
    largest = torch.stack([base.requires_grad_(False).weight.abs().max() for base in bases]).max()
    layers = [fp8.Fp8Linear(base, recipe, largest) for base in bases]
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, 768, device="cuda", dtype=torch.bfloat16)

    def both(make):
        x.grad = None
        with unwaited():
            made = make()
            made.backward(dy)
        return made, x.grad

    apart = both(lambda: torch.cat([layer(x) for layer in layers], 1))
    joined = fp8.join(layers)  # and theirs are views of it from here on
    near(both(lambda: joined(x)), apart, times=16)  # one factor for the gradient of all, not one for each
    near(both(lambda: torch.cat([layer(x) for layer in layers], 1)), apart, times=1)


def test_the_loss_over_chunks_waits_for_nothing_under_autocast():
    from ftbench.worker.optimizations.chunked_loss import chunked_loss

    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1000, bias=False, device="cuda")
    hidden = torch.randn(2, 100, 64, device="cuda", requires_grad=True)
    labels = torch.randint(0, 1000, (2, 100), device="cuda")
    positions = torch.tensor([n for n in range(200) if n % 100], device="cuda")
    with unwaited(), torch.autocast("cuda", dtype=torch.bfloat16):
        loss = chunked_loss(hidden, labels, positions, head, size=64)
        loss.backward()
    found = [loss.detach(), hidden.grad, head.weight.grad]
    head.weight.grad = None
    plain = hidden.detach().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        head(plain[:, :-1]).flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    expected.backward()
    near(found, [expected.detach(), plain.grad, head.weight.grad])


def test_mxfp4_is_written_out_by_one_kernel_as_it_is_step_by_step():
    from torch._dynamo.utils import counters

    from ftbench.worker.model import mxfp4

    counters.clear()
    for shape in ((32, 5760, 90), (32, 2880, 90), (4, 5760, 90)):
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(100, 140, shape, dtype=torch.uint8, device="cuda")
        wide = mxfp4.dequantise(blocks, scales, torch.bfloat16)
        assert torch.equal(wide[:2].cpu(), mxfp4.dequantise(blocks[:2].cpu(), scales[:2].cpu(), torch.bfloat16))
    assert counters["stats"]["unique_graphs"] <= 2


def test_mxfp4_products_on_the_gpu_are_those_of_the_cpu():
    from ftbench.worker.model import mxfp4

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (8, 256, 4, 16), dtype=torch.uint8)
    scales = torch.full((8, 256, 4), 120, dtype=torch.uint8)
    ends = torch.tensor([0, 7, 7, 30, 31, 50, 63, 64], dtype=torch.int32)
    found = []
    for place in ("cpu", "cuda"):
        rows = torch.linspace(-1, 1, 64 * 128).view(64, 128).bfloat16().to(place).requires_grad_()
        result = mxfp4._FrozenProduct.apply(rows, blocks.to(place), scales.to(place), ends.to(place))
        result.float().square().sum().backward()
        found.append((result.detach().cpu().float(), rows.grad.cpu().float()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(ours.abs().max()))


def test_a_step_that_waits_for_the_device_cannot_be_recorded_and_says_why():
    """In a separate process, because a failed recording leaves CUDA in an unknown state."""
    done = subprocess.run([sys.executable, "-c", WAITING_STEP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"cannot be recorded \(.*captur", done.stdout)


WAITING_STEP = """
import torch
from ftbench.errors import NotAppliedError
from ftbench.worker.optimizations.cuda_graph import GraphedStep

def train(model, batch, tokens):
    loss = model(batch["x"]).sum()
    loss.item()
    return loss

try:
    GraphedStep()(train, torch.nn.Linear(8, 8).cuda(), {"x": torch.ones(4, 8, device="cuda")}, torch.tensor(1))
except NotAppliedError as error:
    print(error)
"""


def test_offloaded_inputs_are_right_and_their_memory_is_free_although_the_cpu_is_ahead():
    from torch.utils.checkpoint import checkpoint

    from ftbench.kernels.host_offload import HostTensors

    def layer(inputs):
        busy()
        return inputs * inputs.cos()

    def train(function):
        inputs = torch.linspace(0, 1, 1 << 24, device="cuda", requires_grad=True)  # 64 MiB, as each layer's input
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, values = torch.cuda.memory_reserved(), inputs
        for _ in range(12):
            values = function(layer, values, use_reentrant=False)
        values.sum().backward()
        return inputs.grad, (torch.cuda.max_memory_reserved() - before) / inputs.nbytes

    expected, on_device = train(checkpoint)
    train(HostTensors().around(checkpoint))  # allocates the pinned memory, which waits for the device
    found, away = train(HostTensors().around(checkpoint))
    assert torch.equal(found, expected)
    assert on_device >= 13
    assert away < 10  # not one buffer for each of the 12 layers
