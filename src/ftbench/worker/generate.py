"""Generate answers to fixed prompts before and after training, and write samples.json.

The answers come from the plain model: uncompiled layers, no gradient checkpointing, no fused loss, attention that
supports padding. Everything is restored afterwards, including the random state, so that training is the same with and
without answers.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from ftbench.spec.experiment import Experiment, Generate
from ftbench.store.rundir import RunDir, write_json
from ftbench.worker.data.tokens import name_errors, render
from ftbench.worker.methods import unsloth
from ftbench.worker.model.parts import base_model, decoder_layers
from ftbench.worker.optimizations import chunked_loss, fp8
from ftbench.worker.optimizations.fused_lora import BesideGroup

SCHEMA = 1
_NO_PADDING = ("varlen", "flex_attention")  # the first needs unpadded batches, the second recompiles for every length


class Answers:
    """The answers of a run.

    samples.json has `settings`, `seconds` and `prompts`, a list of `{id, prompt, before, after, tokens, stop}`.
    `after` is null until training is done.
    """

    def __init__(self, spec: Experiment, directory: RunDir, tokenizer: Any) -> None:
        self._spec, self._directory, self._tokenizer = spec, directory, tokenizer
        self._seconds: dict[str, float] = {}
        self._rows: list[dict[str, Any]] = []

    def generate(self, model: Any, when: str) -> None:
        """Answer all prompts in one batch and write samples.json. `when` is `before` or `after`."""
        settings: Any = self._spec.measure.generate
        if not self._rows:
            self._rows = [
                prompt.model_dump() | {"before": None, "after": None, "tokens": {}, "stop": {}}
                for prompt in settings.prompts
            ]
        start = time.monotonic()
        devices = [model.device] if model.device.type == "cuda" else []
        with plain(model, self._spec), torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(settings.seed)
            count, answers = answer(model, self._tokenizer, settings)
        self._seconds[when] = time.monotonic() - start
        for row, tokens, (text, new, stop) in zip(self._rows, count, answers, strict=True):
            row["tokens"] |= {"prompt": tokens, when: new}
            row["stop"][when] = stop
            row[when] = text
        shared = {"settings": settings.model_dump(exclude={"prompts"}), "seconds": self._seconds}
        write_json(self._directory.samples, {"schema": SCHEMA, **shared, "prompts": self._rows})
        gc.collect()
        if model.device.type == "cuda":  # training starts with an empty pool, as without answers
            torch.cuda.empty_cache()


def answer(model: Any, tokenizer: Any, settings: Generate) -> tuple[list[int], list[tuple[str, int, str]]]:
    """Answer all prompts in one left-padded batch.

    Return the number of tokens of each prompt, and the text, number of tokens and stop reason (`end`, `length` or
    `time`) of each answer.
    """
    texts = [_rendered(tokenizer, prompt.prompt) for prompt in settings.prompts]
    ids = [tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"] for text in texts]
    longest, filler = max(map(len, ids)), tokenizer.pad_token_id or 0
    rows = torch.tensor([[filler] * (longest - len(row)) + row for row in ids], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=model.device)
    ends = _ends(model, tokenizer)
    generated = model.generate(input_ids=rows, attention_mask=mask, generation_config=_config(settings, ends, filler))
    answers = []
    for new in generated[:, longest:].tolist():
        stop = next((index for index, token in enumerate(new) if token in ends), None)
        content = new if stop is None else new[:stop]
        reason = "end" if stop is not None else "length" if len(new) == settings.max_new_tokens else "time"
        answers.append((tokenizer.decode(content, skip_special_tokens=True), len(content), reason))
    return [len(row) for row in ids], answers


def _rendered(tokenizer: Any, prompt: str) -> str:
    if not tokenizer.chat_template:
        return prompt
    with name_errors("measure.generate"):
        return render(tokenizer, [{"role": "user", "content": prompt}], answer=True)


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids of the end tokens: the model's (gpt-oss has several), or the tokenizer's."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]


def _config(settings: Generate, ends: list[int], filler: int) -> GenerationConfig:
    """Return the generation settings. They override all defaults of the published model."""
    sampling = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        max_time=settings.max_seconds,
        do_sample=not settings.greedy,
        **({} if settings.greedy else sampling),
        num_beams=1,
        repetition_penalty=1.0,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=filler,
    )


@contextmanager
def plain(model: Any, spec: Experiment) -> Iterator[None]:
    """Prepare the model for generation in a block."""
    with ExitStack() as undo:
        if spec.method.name == "unsloth":
            unsloth.prepare_generation(model, spec, undo)
        else:
            _without_training(model, undo)
        _without_compiled_layers(model, undo)
        _without_fused_loss(model, undo)
        _with_plain_products(model, undo)
        _with_attention_for_padding(model, undo)
        yield


def _without_training(model: Any, undo: ExitStack) -> None:
    """Switch to eval mode, except for bitsandbytes' 4-bit layers, which would repack their weights on a CPU."""
    for module in model.modules():
        undo.callback(setattr, module, "training", module.training)
    model.eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True


def _without_compiled_layers(model: Any, undo: ExitStack) -> None:
    for layer in decoder_layers(model):
        compiled, layer._compiled_call_impl = layer._compiled_call_impl, None
        undo.callback(setattr, layer, "_compiled_call_impl", compiled)


def _without_fused_loss(model: Any, undo: ExitStack) -> None:
    """Restore the model's forward method, because that of the chunked loss does not support generation."""
    base = base_model(model)
    if chunked_loss.is_on(base):
        undo.callback(setattr, base, "forward", base.__dict__.pop("forward"))


def _with_plain_products(model: Any, undo: ExitStack) -> None:
    """Compute products in 16 bits, because 8-bit products need more rows than the one that generation adds."""
    for module in model.modules():
        if fp8.multiplies_in_8_bits(module):
            module.forward = module.forward_in_16_bits
            undo.callback(module.__dict__.pop, "forward")
        if isinstance(module, BesideGroup):
            undo.callback(setattr, module, "joined", module.joined)
            module.joined = (None,)


def _with_attention_for_padding(model: Any, undo: ExitStack) -> None:
    base = base_model(model)
    used = base.config.get_text_config()._attn_implementation
    if used in _NO_PADDING:
        base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
        undo.callback(base.set_attn_implementation, used)
