"""Small data in exactly the layouts of the paper's, so that every command can be tried offline in minutes.

The images are scikit-learn's handwritten digits in several styles, which the embedded model can read: each data set has
a `classes.txt` that names them. The texts are made from a few words, and the masked language model beside them is tiny
and untrained: what the language commands print from them means nothing.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from pouf.bench.tasks import IMAGE_SETS, TASKS, Task
from pouf.demo import DIGITS

IMAGES_PER_CLASS = 12  # in a domain
TEXTS_PER_CLASS = 80
GOOD, BAD = ("good", "great", "fine", "lovely"), ("bad", "terrible", "poor", "dull")
THINGS = ("film", "book", "meal", "song", "car", "city", "story", "game", "room", "view", "host", "trip")
LM = "tiny-lm"


def _rotated(image: Image.Image) -> Image.Image:
    return image.rotate(12, fillcolor=0)


def _noisy(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(int(np.asarray(image, dtype=np.int64).sum())).normal(0, 24, np.asarray(image).shape)
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


STYLES: list[Callable[[Image.Image], Image.Image]] = [
    lambda image: image,
    lambda image: image.resize((16, 16)).filter(ImageFilter.GaussianBlur(0.8)),
    _noisy,
    _rotated,
    lambda image: ImageOps.autocontrast(image, cutoff=20),
    lambda image: image.point(lambda value: int(value * 0.6)),
]


def make_data(folder: str | Path) -> Path:
    """Write the image data sets, the language tasks and a tiny masked language model."""
    folder = Path(folder)
    for name in ("office31", "office-home", "domainnet"):
        _image_set(folder, name)
    for task in TASKS.values():
        _language_task(folder, task)
    _tiny_lm(folder / LM)
    return folder


def _image_set(folder: Path, name: str) -> None:
    from sklearn.datasets import load_digits

    digits, image_set = load_digits(), IMAGE_SETS[name]
    base = folder / image_set.folder
    base.mkdir(parents=True, exist_ok=True)
    (base / "classes.txt").write_text("".join(f"{digit}\n" for digit in DIGITS), encoding="utf-8")
    for number, domain in enumerate(image_set.domains.values()):
        listed: list[str] = []
        for label, digit in enumerate(DIGITS):
            target = base / domain / image_set.inside / digit
            target.mkdir(parents=True, exist_ok=True)
            # Each domain has digits of its own.
            for i in np.flatnonzero(digits.target == label)[
                number * IMAGES_PER_CLASS : (number + 1) * IMAGES_PER_CLASS
            ]:
                pixels = (digits.images[i] * (255 / 16)).round().astype(np.uint8)
                STYLES[number](Image.fromarray(pixels)).convert("RGB").save(target / f"{i:04d}.jpg", quality=95)
                listed.append(f"{domain}/{digit}/{i:04d}.jpg {label}")
        if image_set.lists:
            for split, lines in (("train", listed[::2]), ("test", listed[1::2])):
                (base / f"{domain}_{split}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _language_task(folder: Path, task: Task) -> None:
    """The files of GLUE and LM-BFF: tab-separated with a header or without, or comma-separated."""
    draw = random.Random(task.name)
    base = folder / task.layout.folder
    base.mkdir(parents=True, exist_ok=True)
    named = [column for column in task.layout.columns if isinstance(column, str)]
    raw = task.raw or task.labels
    for split in ("train", task.layout.test):
        rows = []
        for label in range(len(raw)):
            for _ in range(TEXTS_PER_CLASS if split == "train" else TEXTS_PER_CLASS // 4):
                score = f"{5 * label / (len(raw) - 1):.1f}" if task.scale is not None else raw[label]
                rows.append((_texts(task, label, len(raw), draw), score))
        draw.shuffle(rows)
        if named:
            lines = [[*named, str(task.layout.label)], *([*texts, score] for texts, score in rows)]
            file, delimiter = base / f"{split}.tsv", "\t"
        elif isinstance(task.layout.label, int) and task.layout.label == 1:  # CoLA: source, label, mark, text
            lines = [["made", score, "", *texts] for texts, score in rows]
            file, delimiter = base / f"{split}.tsv", "\t"
        else:
            lines = [[score, *texts] for texts, score in rows]
            file, delimiter = base / f"{split}.csv", ","
        with file.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, delimiter=delimiter, lineterminator="\n").writerows(lines)


def _texts(task: Task, label: int, labels: int, draw: random.Random) -> tuple[str, ...]:
    thing, number = draw.choice(THINGS), draw.randrange(10_000)
    mood = draw.choice(GOOD if label >= labels / 2 else BAD)
    first = f"the {thing} in place {number} was {mood} ."
    if not task.pair:
        return (first,)
    other = draw.choice(GOOD if label == labels - 1 else BAD)
    return first, f"people found the {thing} {other} that day ."


def _tiny_lm(folder: Path) -> None:
    """An untrained BERT whose vocabulary knows the words of the texts, of the templates and of the labels."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    words = {word for task in TASKS.values() for word in task.words.values()}
    words |= {*GOOD, *BAD, *THINGS, *"the in place was people found that day It This is".split()}
    words |= {*"?.,:!", *"0123456789"}
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)])}
    bare = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    bare.normalizer = normalizers.Sequence([])
    bare.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    marks = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    bare.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=512,
    )  # fmt: skip
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = BertForMaskedLM(config)
    torch.random.set_rng_state(generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "stand-in.json").write_text(json.dumps({"about": "untrained: its predictions mean nothing"}) + "\n")
