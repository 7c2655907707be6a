"""Create models with random weights from a seed, save them once, and load them like published weights.

The seed of a tensor is computed from the model's seed and the tensor's name. So files can be written in parallel, and
the same spec gives the same weights on every machine.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig

from ftbench.errors import MissingError, SpecError
from ftbench.facts import architecture
from ftbench.spec.experiment import Model
from ftbench.spec.reading import read_config
from ftbench.store.machine import cache_dir, cache_error
from ftbench.worker.device import device
from ftbench.worker.model import mxfp4, nf4, vision
from ftbench.worker.model.tokenizer import IMAGE, build_tokenizer

FORMAT = 1  # part of the cache key: increase it when the same spec gives other weights
SHARD_BYTES = 4 * 10**9
_IN_16_BITS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]  # as published
_CHUNK = 64 * 2**20  # elements per generator: bounds memory and lets large tensors use several cores
_HOST = torch.device("cpu")
_LARGE = 10**9  # models with more elements are created on the GPU, which takes seconds instead of a minute


def materialise(model: Model, layout: str | None = None, weights: bool = True) -> Path:
    """Return the directory with the random weights. Create it if it does not exist.

    With `layout="mxfp4"`, the experts of gpt-oss have the published format. With `layout="nf4"`, linear layers are
    quantised. Without `weights`, write only configuration and tokenizer: `fill` or `RandomStateDict` creates the
    weights later. Raise MissingError if the cache cannot be written.
    """
    config = configuration(model)
    special = [*([layout] if layout else []), *([] if weights else ["no weights"])]
    parts = [FORMAT, _shape(model), model.dtype, model.seed, *special]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    name = "".join(c if c.isalnum() or c in ".-" else "-" for c in model.id)
    folder = cache_dir() / "models" / f"{name}-{key.hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    try:
        with _locked(folder):
            if not folder.is_dir():
                _make(folder, config, model, layout, weights)
    except (OSError, SafetensorError) as error:
        raise cache_error(folder.parent, error) from None
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let only one process at a time create this model. The lock of a dead process is released."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, config: Any, model: Model, layout: str | None, weights: bool) -> None:
    """Write the files to a temporary folder, then rename the folder. First delete what a killed process left."""
    unfinished = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        _describe(unfinished, config, model, layout)
        if weights:
            _write(unfinished, config, model, layout)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _shape(model: Model) -> dict[str, Any]:
    """Return the model's configuration as a dictionary, from ftbench's table or the user's config.json."""
    return read_config(Path(model.path)) if model.path else architecture(model.id)


def configuration(model: Model) -> Any:
    """Return transformers' configuration object. Raise SpecError if transformers does not support the model's shape."""
    shape = dict(_shape(model))
    for key in ("quantization_config", "torch_dtype", "dtype", "auto_map"):
        shape.pop(key, None)
    try:
        return AutoConfig.for_model(**shape)
    except (ValueError, TypeError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise SpecError(f"model: {model.id}: transformers cannot build this shape ({reason})") from None


def _describe(folder: Path, config: Any, model: Model, layout: str | None) -> None:
    """Write config.json, the tokenizer, and the image processor of a vision model."""
    config.architectures = [vision.architecture(config)]
    config.dtype = model.dtype
    if layout:
        experts = {"quant_method": layout, "modules_to_not_convert": _IN_16_BITS}
        config.quantization_config = dict(nf4.CONFIG) if layout == nf4.LAYOUT else experts
    reads_images = vision.reads_images(config)
    tokenizer = build_tokenizer(int(config.get_text_config().vocab_size), reads_images)
    tokenizer.save_pretrained(folder)
    if reads_images:
        config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
        vision.processor_of(config).save_pretrained(folder)
    config.save_pretrained(folder)


def fill(module: Any, seed: int, std: float) -> None:
    """Set every weight of an uninitialized model to the random values that `materialise` would write."""
    state = module.state_dict()
    with ThreadPoolExecutor(os.cpu_count()) as pool, torch.no_grad():
        for names in _shards({name: each.nbytes for name, each in state.items()}):
            for name, drawn in _draw(pool, {name: state[name] for name in names}, std, seed).items():
                state[name].copy_(drawn)


def deviation(config: Any) -> float:
    """Return the standard deviation of random weights: `initializer_range` of the configuration, or 0.02."""
    return float(getattr(config.get_text_config(), "initializer_range", 0.02))


class RandomStateDict(Mapping[str, torch.Tensor]):
    """State dict that creates random weights when they are read, 4 GB at a time. Adapters are read from `state`.
    Weights of large models are created on the GPU. The same seed gives different values on a GPU and a CPU."""

    def __init__(self, state: Mapping[str, torch.Tensor], model: Model) -> None:
        config = configuration(model)
        self._state, self._seed, self._std = state, model.seed, deviation(config)
        self._tensors, self._tied = _tensors(_skeleton(config, model, None))
        self._shards = list(_shards({name: each.nbytes for name, each in self._tensors.items()}))
        self._drawn: dict[str, torch.Tensor] = {}
        large = sum(each.numel() for each in self._tensors.values()) > _LARGE
        self._device = device() if large else _HOST

    def __getitem__(self, key: str) -> torch.Tensor:
        name = key.removeprefix("base_model.model.").replace(".base_layer", "")  # prefix and suffix of peft
        name = self._tied.get(name, name)
        if ".lora_" in name:
            return self._state[key]
        if name not in self._drawn:
            names = next(shard for shard in self._shards if name in shard)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                wanted = {each: self._tensors[each] for each in names}
                self._drawn = _draw(pool, wanted, self._std, self._seed, self._device)
        return self._drawn[name].to(self._state[key].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _skeleton(config: Any, model: Model, layout: str | None) -> Any:
    """Return the model on the meta device, which has shapes but no values."""
    with torch.device("meta"), mxfp4.as_experts() if layout == "mxfp4" else nullcontext():
        return vision.auto_class(config).from_config(config, dtype=getattr(torch, model.dtype))


def _tensors(skeleton: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return {name: meta tensor} without tied tensors, and {name of a tied tensor: name of the tensor that it uses}."""
    tied = dict(getattr(skeleton, "_tied_weights_keys", None) or {}) if skeleton.config.tie_word_embeddings else {}
    return {name: each for name, each in skeleton.state_dict().items() if name not in tied}, tied


def _write(folder: Path, config: Any, model: Model, layout: str | None) -> None:
    skeleton = _skeleton(config, model, layout)
    tensors, _ = _tensors(skeleton)
    packed = nf4.quantised_names(skeleton) if layout == nf4.LAYOUT else set[str]()
    sizes = {name: each.nbytes for name, each in tensors.items()}
    total = sum(round(size * nf4.SHARE) if name in packed else size for name, size in sizes.items())
    _check_space(folder, total)
    std = deviation(config)
    shards = list(_shards(sizes))
    index: dict[str, str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool, ThreadPoolExecutor(1) as writer:
        written: Future[dict[str, str]] | None = None
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            shard = _draw(pool, {name: tensors[name] for name in names}, std, model.seed)
            if written:
                index |= written.result()  # at most two shards in memory
            written = writer.submit(_save, shard, folder / file, packed)
        if written:
            index |= written.result()
    described = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(described))


def _save(shard: dict[str, torch.Tensor], file: Path, packed: Collection[str]) -> dict[str, str]:
    """Write tensors to a file. Convert the weights named in `packed` to NF4. Return {tensor name: file name}."""
    tensors = nf4.quantise(shard, packed) if packed else shard
    save_file(tensors, file, {"format": "pt"})
    return dict.fromkeys(tensors, file.name)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed * 1.02 > free:
        raise MissingError(
            f"{folder.parent}: the random weights take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free; "
            "set FTBENCH_CACHE to a larger disk"
        )


def _shards(sizes: dict[str, int]) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if shard and filled + size > SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _draw(
    pool: ThreadPoolExecutor, like: dict[str, torch.Tensor], std: float, seed: int,
    where: torch.device = _HOST,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return random tensors with the names, shapes and dtypes of `like`. Create them in parallel on the device `where`.

    Norms are ones and biases are zeros, as transformers initializes them. Other weights are normally distributed with
    standard deviation `std`. MXFP4 codes are uniformly distributed, and their scale gives a deviation close to `std`.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[tuple[str, torch.Tensor]] = []
    for name, each in like.items():
        out = tensors[name] = torch.empty(each.shape, dtype=each.dtype, device=where)
        if each.ndim == 1 and name.endswith(".weight"):
            out.fill_(1)
        elif name.endswith("bias"):
            out.zero_()
        elif name.endswith("_scales"):
            out.fill_(mxfp4.scale_for(std))
        else:
            starts = range(0, out.numel(), _CHUNK)
            pieces += [(f"{seed}/{name}/{start}", out.view(-1)[start : start + _CHUNK]) for start in starts]
    if where.type == "cuda":  # not in threads, which would use the memory of the first GPU
        for name, piece in pieces:
            _normal(name, piece, std)
        return tensors
    for future in [pool.submit(_normal, name, piece, std) for name, piece in pieces]:
        future.result()
    return tensors


def _normal(name: str, piece: torch.Tensor, std: float) -> None:
    seed = hashlib.sha256(name.encode()).digest()[:8]
    generator = torch.Generator(piece.device).manual_seed(int.from_bytes(seed, "little"))
    if piece.dtype == torch.uint8:
        piece.view(torch.int64).random_(-(2**63), None, generator=generator)  # eight bytes per draw
    else:
        drawn = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
        piece.copy_(drawn.normal_(0, std, generator=generator))
