"""Training on samples with few label tokens."""

from __future__ import annotations

from typing import Any

import torch

from conftest import spec_of
from ftbench.worker.model.parts import decoder_layers
from ftbench.worker.optimizations import chunked_loss


def require_few_tokens(plain: Any, ours: Any, ids: torch.Tensor, compile: bool) -> None:
    """Train both models with SGD: `plain` with the loss of transformers, and `ours` with chunked_loss. Require equal
    losses and weights, and that the last `o_proj` and MLP of `ours` compute four tokens. `ids` is (2, length)."""
    length = ids.shape[1]
    labels = torch.full_like(ids, -100)
    labels[0, 3], labels[1, 1:3] = ids[0, 3], ids[1, 1:3]
    positions = torch.tensor([3, length + 1, length + 2, 0], device=ids.device)  # 0 fills a batch with few labels
    spec = spec_of(optimizations={"chunked_loss": True, "fixed_shape": True})
    chunked_loss.apply(ours, spec)
    assert chunked_loss.skip_unread(ours, spec)
    counts: list[int] = []
    for layer in decoder_layers(ours):
        if compile:
            layer.compile()
        else:
            for module in (layer.self_attn.o_proj, layer.mlp):
                module.register_forward_hook(lambda *given: counts.append(int((given[2] != 0).any(-1).sum())))
    (loss, weights), (our_loss, our_weights) = (
        _trained(model, input_ids=ids, labels=labels, use_cache=False, **more)
        for model, more in ((plain, {}), (ours, {"label_positions": positions}))
    )
    assert compile or counts == [*[ids.numel()] * 2 * (len(decoder_layers(ours)) - 1), 4, 4] * 2
    last = decoder_layers(ours)[-1]
    assert [len(module.rows) for module in (last.self_attn.o_proj, last.mlp)] == [4, 4]
    torch.testing.assert_close(our_loss, loss)
    # Twenty times the error of float32 against float64 on a CPU, because a GPU adds in another order.
    torch.testing.assert_close(our_weights, weights, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5, rtol=1e-4)


def _trained(model: Any, **batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss of the second SGD step, and the trained weights after it."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    return loss.detach(), [each.detach() for each in trained]
