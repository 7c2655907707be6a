"""Images of data sets are read, generated and batched like in trl. Unusable images are errors with file and row."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from conftest import spec_of
from ftbench.core.data_formats import BadRow
from ftbench.errors import DataError, SpecError
from ftbench.worker.data import tokens
from ftbench.worker.data.collate import Collator
from ftbench.worker.data.images import SampleImages, read
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.model import loading
from ftbench.worker.outcome import of_exception
from ftbench.worker.train import prepared

LLAVA, QWEN25, QWEN3 = MODELS = ["tiny/llava-next", "tiny/qwen2.5-vl", "tiny/qwen3-vl"]
MADE = {"name": "images", "samples": 4, "image_size": [90, 60]}
WORDS = "a leaf with brown spots"


def photo(seed=0, size=(90, 60)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def spec_with(dataset, model=QWEN3, **sections):
    spec = spec_of(model={"id": model}, **sections)
    return spec.model_copy(update={"dataset": type(spec.dataset).model_validate(dataset)})


@pytest.fixture
def reads(cache):
    """Prepare a data set for a vision model."""

    def prepare(dataset, model=QWEN3, **sections):
        spec = spec_with(dataset, model, **sections)
        return prepared(spec, loading.source_of(spec.model))

    return prepare


@pytest.fixture
def folder(tmp_path):
    """Write rows and three photographs (a.png, b.png, c.png), and return the data set."""

    def write(*rows, name="metadata.jsonl"):
        for seed, letter in enumerate("abc"):
            photo(seed).save(tmp_path / f"{letter}.png")
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return {"name": "file", "path": str(tmp_path)}

    return write


def images_of(data):
    return [[picture.open().tobytes() for picture in row[0].pictures] for row in data.train]


def batch_of(spec, data):
    pictures = [picture for row in data.train for picture in row[0].pictures]
    rows, at = [], 0
    for (sample,) in data.train:
        shown = [*range(at, at := at + len(sample.pictures))]
        rows.append({"input_ids": sample.ids, "labels": sample.labels, "lengths": [len(sample.ids)], "shown": shown})
    return Collator(spec, 0, data.longest, 1, data.pixels, pictures)(rows)


def processor_of(model, tokenizer, pixels, patch):
    """Return transformers' processor, without videos, which need torchvision."""
    import transformers

    images = pixels._processor
    if model == LLAVA:
        return transformers.LlavaNextProcessor(
            images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
            chat_template=tokenizer.chat_template,
        )  # fmt: skip
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    kind = transformers.Qwen2_5_VLProcessor if model == QWEN25 else transformers.Qwen3VLProcessor
    patch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
    return kind(images, tokenizer, chat_template=tokenizer.chat_template)


@pytest.mark.parametrize("model", MODELS)
def test_batch_equals_that_of_trls_collator(reads, folder, model, monkeypatch):
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    rows = [
        {
            "prompt": [{"role": "user", "content": "What is it?"}],
            "completion": [{"role": "assistant", "content": WORDS}],
        },
        {"prompt": [{"role": "user", "content": "And that?"}], "completion": [{"role": "assistant", "content": "ivy"}]},
    ]
    dataset = folder(*({"image": f"{letter}.png", **row} for letter, row in zip("ab", rows, strict=True)))
    tokenizer, data = reads(dataset, model)
    ours = batch_of(spec_with(dataset, model), data)
    order = [[0, 1], [1, 0]][data.train[0][0].pictures[0].source.name == "b.png"]
    theirs = DataCollatorForVisionLanguageModeling(
        processor_of(model, tokenizer, data.pixels, monkeypatch), completion_only_loss=True
    )([{"images": [photo(index)], **rows[index]} for index in order])
    answered = ours["labels"] != IGNORE
    for key in ("input_ids", "attention_mask", "pixel_values"):
        assert torch.equal(ours[key], torch.as_tensor(theirs[key])), key
    assert torch.equal(ours["labels"][answered], theirs["labels"][answered])  # trl's prompt ends before "assistant"
    for key in ("image_sizes", "image_grid_thw", "mm_token_type_ids"):
        assert (key in ours) == (key in theirs)
        assert key not in ours or torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key]))


@pytest.mark.parametrize(
    "row",
    [
        {"image": "a.png", "text": WORDS},
        {"images": ["a.png"], "caption": WORDS, "question": "What is it?"},
        {"image": "a.png", "messages": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": WORDS}]},
        {"image": "a.png", "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": WORDS}]},
        {"messages": [
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Hm?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": WORDS}]},
        ]},
    ],
)  # fmt: skip
def test_images_are_read_from_every_format(reads, folder, row):
    tokenizer, data = reads(folder(row))
    ((shown,),) = images_of(data)
    assert shown == photo(0).tobytes()
    ((sample,),) = data.train
    assert sample.ids.count(data.pixels.token) == data.description["images"]["tokens"]["total"] == 7 * 10
    assert WORDS in tokenizer.decode([label for label in sample.labels if label != IGNORE])


def test_exif_orientation_is_applied(reads, tmp_path):
    """The reference is `datasets`."""
    import datasets

    for held in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = held
        path = tmp_path / f"{held}.jpg"
        photo(held).save(path, exif=exif)
        shown = datasets.Image().decode_example({"path": str(path), "bytes": None}).convert("RGB")
        picture = read(path.name, tmp_path)
        assert (picture.width, picture.height) == shown.size == ((60, 90) if held > 4 else (90, 60))
        assert picture.open().tobytes() == shown.tobytes()
    photo(1).save(path, exif=b"Exif\0\0no such thing")
    assert read(path.name, tmp_path).open().tobytes() == Image.open(path).tobytes()


def test_16_bit_picture_keeps_its_shades(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**16, (60, 90), dtype=np.uint16)
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(values).save(tmp_path / name)
        shades = np.asarray(read(name, tmp_path).open())
        assert (shades == (values >> 8)[..., None]).all()


def test_columns_and_question_can_be_set(reads, folder):
    row = {"photo": "b.png", "finding": WORDS, "text": "not this"}
    columns = {"columns": {"image": "photo", "answer": "finding"}, "prompt": "Which disease?"}
    tokenizer, data = reads(folder(row) | columns)
    assert images_of(data) == [[photo(1).tobytes()]]
    text = tokenizer.decode(data.train[0][0].ids)
    assert "Which disease?" in text
    assert WORDS in text


def test_several_images_keep_their_order(reads, folder):
    turns = [{"role": "user", "content": "<image>, <image> and <image>?"}, {"role": "assistant", "content": WORDS}]
    _, data = reads(folder({"images": ["c.png", "a.png", "b.png"], "messages": turns}))
    assert images_of(data) == [[photo(seed).tobytes() for seed in (2, 0, 1)]]


def test_images_are_read_from_parquet_bytes(reads, tmp_path):
    import pyarrow
    import pyarrow.parquet

    stored = [{"bytes": png(photo(seed)), "path": None} for seed in range(2)]
    table = pyarrow.table({"image": stored, "text": [WORDS, "ivy"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    _, data = reads({"name": "file", "path": str(tmp_path / "a.parquet")})
    assert sorted(image for (image,) in images_of(data)) == sorted(photo(seed).tobytes() for seed in range(2))


def test_hub_data_set_with_images_is_read(reads, monkeypatch):
    """Like `beans`: an image column and named labels."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "labels": datasets.ClassLabel(names=["rust", "healthy"])})
    rows = {"image": [{"bytes": png(photo(seed)), "path": None} for seed in range(2)], "labels": [1, 0]}
    data = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *_, **__: {"AI-Lab-Makerere/beans": data, "me/mine": data}[name]
    )
    for name in ("beans", "me/mine"):
        tokenizer, ready = reads({"name": name, "samples": 2})
        texts = [tokenizer.decode(row[0].ids) for row in ready.train]
        assert sum("Describe" in text for text in texts) == 2
        assert {"rust", "healthy"} == {name for name in ("rust", "healthy") for text in texts if name in text}


def bomb():
    """Return a PNG of 70 bytes with 400 million pixels."""
    chunks = (
        (struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0), b"IHDR"),
        (zlib.compress(b""), b"IDAT"),
        (b"", b"IEND"),
    )
    made = b"\x89PNG\r\n\x1a\n"
    for data, kind in chunks:
        made += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return made


def broken(folder):
    (folder / "text.png").write_text("no image")
    whole = png(photo(0))
    (folder / "torn.png").write_bytes(whole[: len(whole) // 2])
    (folder / "bomb.png").write_bytes(bomb())
    (folder / "flat.png").write_bytes(png(photo(0, (2000, 8))))
    Image.new("RGB", (8, 8)).save(folder / "program.png", "EPS")
    Image.fromarray(np.zeros((9, 9), dtype=np.float32)).save(folder / "float.tif")
    os.mkfifo(folder / "pipe.png")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"image": "text.png"}, "text.png cannot be decoded \\(cannot identify image file\\)"),
        ({"image": "torn.png"}, "torn.png cannot be decoded"),
        ({"image": "bomb.png"}, "bomb.png cannot be decoded .*decompression bomb"),
        ({"image": "program.png"}, "EPS files are not supported"),
        ({"image": "flat.png"}, "more elongated than 200 to 1"),
        ({"image": "float.tif"}, "float.tif cannot be decoded .its values have 32 bits"),
        ({"image": "missing.png"}, "missing.png cannot be read .No such file"),
        ({"image": "pipe.png"}, "pipe.png cannot be read .not a regular file"),
        ({"image": "https://a.b/c.png"}, "is a URL: download it"),
        ({"image": 7}, "an image must be a path or bytes, not int"),
        ({"image": None}, "has no image"),
        ({"image": {"path": None, "bytes": None}}, "an image is empty"),
        ({"image": "a.png", "question": "<image> or <image>?"}, "2 markers for images, but the row has 1 image"),
        ({"image": "a.png", "text": "an <image>"}, "an answer contains an image"),
    ],
)
def test_unusable_image_is_an_error_with_file_and_row(reads, folder, tmp_path, row, why):
    broken(tmp_path)
    with pytest.raises(DataError, match=rf"metadata\.jsonl, line 2: .*{why}"):
        reads(folder({"image": "a.png", "text": WORDS}, {"text": WORDS, **row}))


def test_marker_without_an_image_is_an_error(reads, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"instruction": "What is <image>?", "output": WORDS}))
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: its text has 1 marker of images, and the row has 0 images"):
        reads({"name": "file", "path": str(path)})


def test_text_model_rejects_images(reads, folder):
    with pytest.raises(ValidationError, match="has images and tiny/qwen3 is text-only"):
        spec_of(dataset=MADE | {"mean_length": None})
    with pytest.raises(SpecError, match="the model takes only text"):
        reads(folder({"image": "a.png", "text": WORDS}), "tiny/qwen3")


def test_folder_with_two_metadata_files_is_an_error(reads, folder):
    dataset = folder({"image": "a.png", "text": WORDS})
    folder({"image": "a.png", "text": WORDS}, name="other.jsonl")
    with pytest.raises(DataError, match=r"several data files .metadata\.jsonl, other\.jsonl"):
        reads(dataset)


@pytest.mark.parametrize("model", MODELS)
def test_generated_pictures_depend_only_on_the_seed(reads, model):
    _, first = reads(MADE, model)
    _, again = reads(MADE, model)
    _, other = reads(MADE | {"seed": 7}, model)
    assert images_of(first) == images_of(again) != images_of(other)
    assert first.description == again.description
    assert first.description["hash"] != other.description["hash"]
    assert len({image for images in images_of(first) for image in images}) == 4
    assert all(
        row[0].ids.count(first.pixels.token) == first.pixels.size(row[0].pictures[0]).tokens for row in first.train
    )


def test_answers_of_tasks_are_in_the_pixels(reads):
    """The same question has the same answer wherever its cells have the same colors, and prompts carry no loss."""
    _, data = reads(MADE | {"structure": "tasks", "samples": 90, "mean_length": 20, "max_length": 300})
    known = {}
    for (row,) in data.train:
        pixels = np.asarray(row.pictures[0].open())[7::15, 11::22].reshape(-1, 3)  # one of each of the 4 x 4 cells
        cells = [(pixels // 255 @ [4, 2, 1]).tolist()]
        assert cells == [row.pictures[0].colors.tolist()]
        at = next(place for place, label in enumerate(row.labels) if label != IGNORE)
        marker = row.ids[at - 2]
        for question, answer in zip(row.ids[at - 1 :: 2], row.ids[at::2], strict=False):
            known.setdefault((marker, question), []).append((cells[0], answer))
        assert all(label == IGNORE for label in row.labels[at - 1 :: 2])
    assert len({marker for marker, _ in known}) == 3
    fixed = 0
    for seen in known.values():
        by_cell = [[(cells[place], answer) for cells, answer in seen] for place in range(16)]
        fixed += any(len({*pairs}) == len({color for color, _ in pairs}) for pairs in by_cell)
    assert fixed >= 2 * 16  # a cell of the picture decides the answer of the first two tasks


def test_generated_pictures_have_the_requested_sizes(reads):
    def shapes(kind):
        _, data = reads(MADE | {"samples": 60, "image_size": [600, 400], "image_sizes": kind, "images_per_sample": 2})
        return [(p.width, p.height) for row in data.train for p in row[0].pictures]

    assert set(shapes("fixed")) == {(600, 400)}
    for kind, upright in (("photographs", 0.5), ("documents", 0.67)):
        sizes = shapes(kind)
        assert len(sizes) == 120
        assert np.median([wide * high for wide, high in sizes]) == pytest.approx(240_000, rel=0.15)
        assert np.mean([high > wide for wide, high in sizes]) == pytest.approx(upright, abs=0.15)


def test_image_tokens_never_have_a_label():
    images = SampleImages(9, (), (2,))
    assert tokens._expand_images([5, 9, 6], [5, 9, 6], images) == ([5, 9, 9, 6], [5, IGNORE, IGNORE, 6])


def test_images_are_not_truncated(reads, folder):
    with pytest.raises(SpecError, match=r"from its images, and max_length is 32: raise dataset\.max_length"):
        reads(MADE | {"image_size": [500, 500], "max_length": 32})
    with pytest.raises(DataError, match=r"beyond max_length 12: raise .* lower optimizations\.image_size"):
        reads(folder({"image": "a.png", "text": WORDS}) | {"max_length": 12, "loss_on": "all"}, LLAVA)


def test_file_that_changes_after_the_first_read_is_an_error(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(photo(0, (20, 10))))
    picture = read("a.png", tmp_path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(BadRow, match=r"a\.png cannot be read any more"):
        picture.open()
    path.unlink()
    with pytest.raises(BadRow, match=r"a\.png cannot be read any more .*No such file"):
        picture.open()


def test_error_of_a_loader_process_is_the_runs_reason(tmp_path):
    text = "Caught BadRow in DataLoader worker process 0.\nOriginal Traceback:\nBadRow: image a.png"
    reason = of_exception(BadRow(text), "data", 3)["reason"]
    assert reason == "BadRow: image a.png (during data; see log.txt)"


@pytest.mark.parametrize(
    "answer",
    [
        "{{ ' ' + message['content'][0]['text'] + '<eos> ' }}",  # llava-v1.6-mistral-7b-hf
        "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}",
    ],
)
def test_chat_template_that_takes_only_parts_gets_parts(reads, folder, answer, monkeypatch):
    """Such a template fails or drops the text if the content is a text. trl always gives it parts."""
    load = loading.load_tokenizer
    template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}{% for part in message['content'] | "
        "selectattr('type', 'equalto', 'image') %}<image>{% endfor %}{% for part in message['content'] | "
        "selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}[/INST]{% else %}"
        f"{answer}{{% endif %}}{{% endfor %}}"
    )

    def loaded(*arguments):
        tokenizer = load(*arguments)
        tokenizer.chat_template = template
        return tokenizer

    monkeypatch.setattr(loading, "load_tokenizer", loaded)
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "<image>Hm?"), ("assistant", WORDS)]
    dialogue = [{"role": role, "content": text} for role, text in turns]
    tokenizer, data = reads(folder({"image": "a.png", "messages": dialogue}), LLAVA)
    ((sample,),) = data.train
    text = tokenizer.decode([token for token in sample.ids if token != data.pixels.token])
    assert [text.find(each.removeprefix("<image>")) >= 0 for _, each in turns] == [True] * 4
    learned = tokenizer.decode([label for label in sample.labels if label != IGNORE])
    assert learned.replace("<eos>", "").replace(" ", "") == f"Hello{WORDS}".replace(" ", "")
