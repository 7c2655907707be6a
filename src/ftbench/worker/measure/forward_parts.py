"""The parts of a forward pass over images and text, marked by hooks: encoder and projector, decoder, head and loss."""

from typing import Any

from ftbench.worker.measure.recorder import Recorder
from ftbench.worker.model.parts import base_model, decoder
from ftbench.worker.model.vision import reads_images


def watch(model: Any, recorder: Recorder) -> None:
    """Let a recorder know where the parts of each forward pass end. Text alone has none."""
    base = base_model(model)
    if not reads_images(base.config):
        return
    inner = base.base_model
    encoder = getattr(inner, "vision_tower", None) or inner.visual
    projector = getattr(inner, "multi_modal_projector", encoder)  # Qwen's is within its encoder
    for first, last, name in ((encoder, projector, "vision_s"), (decoder(model), decoder(model), "language_s")):
        first.register_forward_pre_hook(lambda *_: recorder.mark_part(None))
        last.register_forward_hook(lambda *_, name=name: recorder.mark_part(name))
    base.register_forward_hook(lambda *_: recorder.mark_part("loss_s"))
