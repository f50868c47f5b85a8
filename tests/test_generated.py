"""Generated inputs through every reader and every command: a result, a skip or one clear line, never a traceback.

Quick: 25 inputs for each kind. All of them, some 5,000: pytest -m slow tests/test_generated.py
"""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from cli_runner import pouf
from helpers import groups
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save as to_safetensors

from pouf import Classifier, Images, InputError, Output, Recipe, Texts, Vectors, read_labelled
from pouf.data.class_names import check_classes, read_classes
from pouf.errors import Unreadable
from pouf.inference.cache import FeatureCache
from pouf.models.templates import Cloze, check_templates, read_templates
from pouf.recipe import Optimisation, TunerSettings
from pouf.reporting.html import read_review
from pouf.runs.folder import Run
from pouf.validation.review import NO_CLASS, read_answers

Draw = Any  # what `st.data().draw` is
FEATURES, PROTOTYPES = groups(present=3, k=3, n=24, d=8)
NAMES = ["cat", "dog", "sea"]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run over vectors, with its data beside it."""
    folder = tmp_path_factory.mktemp("generated")
    np.save(folder / "x.npy", FEATURES.numpy())
    np.savez(folder / "p.npz", prototypes=PROTOTYPES.numpy(), names=np.array(NAMES))
    np.savez(folder / "l.npz", features=FEATURES.numpy(), label=np.array(NAMES)[np.arange(24) % 3])
    classifier = Classifier.from_vectors(folder / "p.npz")
    classifier.adapt(
        folder / "x.npy", output=Output(folder / "run", report=False), settings={"steps": 2, "snapshots": 1}
    )
    pouf("review", "run", "--n", 6, cwd=folder)
    return folder


def damaged(draw: Draw, content: bytes) -> bytes:
    """Bytes that were this file once, or never."""
    kind = draw(st.sampled_from(["any", "cut", "flipped", "inserted", "twice", "without a part"]))
    start = draw(st.integers(0, max(len(content) - 1, 0)))
    if kind == "any":
        return draw(st.binary(max_size=300))
    if kind == "cut":
        return content[:start]
    if kind == "flipped":
        changed = bytearray(content)
        for position in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
            changed[position] ^= 1 << (position % 8)
        return bytes(changed)
    if kind == "inserted":
        return content[:start] + draw(st.binary(min_size=1, max_size=20)) + content[start:]
    return content + content if kind == "twice" else content[:start] + content[start + draw(st.integers(1, 50)) :]


def array_bytes(kind: str) -> bytes:
    stream = io.BytesIO()
    if kind == "npy":
        np.save(stream, FEATURES.numpy())
    elif kind == "npz":
        np.savez(stream, features=FEATURES.numpy(), label=np.arange(24) % 3)
    elif kind == "safetensors":
        return to_safetensors({"features": FEATURES})
    else:
        pyarrow.parquet.write_table(pyarrow.table({"embedding": FEATURES.tolist(), "label": NAMES * 8}), stream)
    return stream.getvalue()


def vectors_of_any_bytes(draw: Draw, folder: Path, run: Path) -> None:
    kind = draw(st.sampled_from(["npy", "npz", "safetensors", "parquet"]))
    file = folder / f"x.{kind}"
    file.write_bytes(damaged(draw, array_bytes(kind)))
    data = Vectors.from_file(file)
    predictions = Classifier.from_vectors(PROTOTYPES, NAMES).infer(data)
    assert predictions.log_probabilities.isfinite().all()
    assert len(predictions.indices) + len(data.skipped) == len(data)


DTYPES = ["<f4", ">f4", "<f2", ">f8", "<i8", "<U3", "?", "<c8", "object", "f16"]


def arrays_of_any_kind(draw: Draw, folder: Path, run: Path) -> None:
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    values = draw(st.lists(st.sampled_from([0.0, 1.0, -2.5, math.nan, math.inf, 1e300, 1e-320]), min_size=1))
    with np.errstate(all="ignore"):
        array = np.resize(np.array(values), shape).astype(draw(st.sampled_from(DTYPES)))
    given_as = draw(st.sampled_from(["array", "list", "features", "prototypes"]))
    if given_as == "prototypes":
        Classifier.from_vectors(array, NAMES).predict(FEATURES)
        return
    data = array if given_as == "array" else array.tolist() if given_as == "list" else Vectors(array)
    p = Classifier.from_vectors(PROTOTYPES, NAMES).predict_proba(data)
    assert p.isfinite().all()


TABLE = 'text,label\n"a cat, big",cat\ndog,dog\n"sea ""blue""",sea\n'
ROWS = [{"text": "a cat", "label": "cat"}, {"text": "dog\n", "label": "dog"}, {"text": "sea 👩‍🔬", "label": "sea"}]
PARQUET = io.BytesIO()
pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": ["cat", "dog"]}), PARQUET)
TEXTS = {
    "csv": TABLE.encode(),
    "tsv": TABLE.replace(",", "\t").encode(),
    "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "json": json.dumps(ROWS).encode(),
    "parquet": PARQUET.getvalue(),
    "txt": b"one\ntwo\n\nthree",
}


def files_of_texts(draw: Draw, folder: Path, run: Path) -> None:
    kind = draw(st.sampled_from(list(TEXTS)))
    file = folder / f"t.{kind}"
    file.write_bytes(damaged(draw, TEXTS[kind]))
    texts = Texts.from_file(file)
    for index in range(len(texts)):
        try:
            sample = texts.read(index)
        except Unreadable:
            continue
        assert isinstance(sample, str) and sample.strip() and sample.encode()
        texts.digest(index)
    texts.content_order()


def labels_and_answers(draw: Draw, folder: Path, run: Path) -> None:
    kind = draw(st.sampled_from(list(TEXTS)))
    file = folder / f"t.{kind}"
    if draw(st.booleans()):
        file.write_bytes(damaged(draw, TEXTS[kind]))
        labelled = read_labelled(file, NAMES, "text")
        assert len(labelled.labels) == len(labelled.inputs)
    else:
        content = TEXTS[kind].replace(b"text", b"id  " if kind == "parquet" else b"id")
        file.write_bytes(damaged(draw, content))
        assert set(read_answers(file, NAMES).values()) <= {*NAMES, NO_CLASS}


def lists_of_names(draw: Draw, folder: Path, run: Path) -> None:
    if draw(st.booleans()):
        names = draw(st.lists(st.text(max_size=12) | st.integers() | st.none(), max_size=6))
        assert len(check_classes(names)) == len(names) >= 2
        return
    kind = draw(st.sampled_from(list(CLASS_FILES)))
    content = CLASS_FILES[kind].encode(draw(st.sampled_from(ENCODINGS)), "replace")
    (folder / f"names.{kind}").write_bytes(damaged(draw, content))
    names = read_classes(str(folder / f"names.{kind}")).names
    # What is written into a run can be read again.
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    assert read_classes(str(folder / "classes.txt")).names == names


CLASS_FILES = {
    "txt": "cat\nStraße\n\nكلب\n",
    "csv": 'class,description\ncat,an animal\ncat,"small, furry"\ndog,\n',
    "json": '{"cat": ["an animal", "small"], "dog": "loud"}',
    "toml": 'cat = "an animal"\n[classes]\ndog = ["loud"]\n',
}
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp1256"]


def templates(draw: Draw, folder: Path, run: Path) -> None:
    (folder / "templates.txt").write_bytes(damaged(draw, b"a photo of a {}.\nthe {}\n"))
    check_templates(read_templates([str(folder / "templates.txt")]))
    words = draw(st.lists(st.lists(st.text(max_size=5), max_size=3).map(tuple), min_size=2, max_size=3))
    cloze = Cloze(draw(st.text(max_size=30).map(lambda text: f"{text} {{text}} [MASK]")), tuple(words))
    cloze.fill("any text", "<mask>")


def recipes(draw: Draw, folder: Path, run: Path) -> None:
    if draw(st.booleans()):
        (folder / "r.toml").write_bytes(damaged(draw, Recipe.default("vector").to_toml().encode()))
        recipe = Recipe.load(folder / "r.toml")
    else:
        numbers = st.floats() | st.integers() | st.text(max_size=5)
        recipe = Recipe(
            steps=draw(st.integers(-1, 2**64)), seed=draw(st.integers(-1, 2**64)), temperature=draw(numbers),
            optimisation=Optimisation(momentum=draw(numbers), lr=draw(numbers)),
            tuner=TunerSettings(context=draw(st.text(max_size=20))),
        )  # fmt: skip
    (folder / "again.toml").write_text(recipe.to_toml(), encoding="utf-8", newline="")
    assert Recipe.load(folder / "again.toml") == recipe


def picture_bytes(kind: str) -> bytes:
    stream = io.BytesIO()
    image = Image.effect_noise((24, 16), 60).convert("L" if kind == "TIFF" else "RGB")
    image.save(stream, kind)
    return stream.getvalue()


PICTURES = {kind: picture_bytes(kind) for kind in ("JPEG", "PNG", "GIF", "TIFF", "BMP", "WEBP")}


def pictures_of_any_bytes(draw: Draw, folder: Path, run: Path) -> None:
    content = damaged(draw, PICTURES[draw(st.sampled_from(list(PICTURES)))])
    (folder / "a.png").write_bytes(content)
    images = Images.from_folder(folder)
    try:
        image = images.read(0, draw(st.sampled_from([None, 4])))
    except Unreadable as error:
        assert str(error)
    else:
        assert image.mode == "RGB" and min(image.size) > 0
    images.digest(0)


def archives(draw: Draw, folder: Path, run: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for name, content in PICTURES.items():
            entry = tarfile.TarInfo(f"../{name}.png")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    (folder / "a.tar").write_bytes(damaged(draw, (folder / "a.tar").read_bytes()))
    images = Images.from_folder(folder / "a.tar")
    for index in range(len(images)):
        try:
            images.read(index)
        except Unreadable as error:
            assert str(error)


def caches(draw: Draw, folder: Path, run: Path) -> None:
    cache, digests = FeatureCache(folder / "cache"), [bytes([i]) * 16 for i in range(24)]
    cache.open("model").put(digests, FEATURES)
    file = draw(st.sampled_from(sorted(cache.folder.rglob("*.npy"))))
    file.write_bytes(damaged(draw, file.read_bytes()))
    cached = cache.open("model")
    cached.check(digests)
    known = [digest for digest in digests if digest in cached]
    if known:
        assert torch.equal(cached.get(known), FEATURES[[digests.index(digest) for digest in known]])


def run_folders(draw: Draw, folder: Path, run: Path) -> None:
    """Files of a run that were damaged or edited: an error, or the predictions that were there before."""
    there = shutil.copytree(run / "run", folder / "run")
    files = sorted(file for file in there.rglob("*") if file.is_file() and file.suffix in (".json", ".safetensors"))
    file = draw(st.sampled_from(files))
    if file.suffix == ".json" and draw(st.booleans()):
        facts = json.loads(file.read_text())
        facts[draw(st.sampled_from(sorted(facts)))] = draw(JSON)
        file.write_text(json.dumps(facts))
    else:
        file.write_bytes(damaged(draw, file.read_bytes()))
    Run(there)
    read_review(there)
    p = Classifier.from_pretrained(there).predict_proba(FEATURES)
    assert p.isfinite().all()
    if file.suffix == ".safetensors":
        assert torch.equal(p, Classifier.from_pretrained(run / "run").predict_proba(FEATURES))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)

STRANGE = st.sampled_from(
    ["", " ", "-1", "0", "1", "nan", "inf", "1e400", "9" * 30, "[/]", "[bold]", "\x1b[31m", "a,b", "a,a", "é",
     "x" * 300, "run", "x.npy", "l.npz", "p.npz", "missing.npy", "cpu", "cuda:99", "last", "full", "0.5,0.5",
     "0.2,0.3,0.5", "adamw", "none", "estimated", "\u202egnp", "out.csv", "out.jsonl", "[MASK]", "{}", "{text} [MASK]"]
)  # fmt: skip
OPTIONS = {
    "predict": ["--out", "--use", "--abstain", "--unknown", "--batch-size", "--workers", "--device", "--text-column"],
    "evaluate": ["--batch-size", "--label-column", "--workers", "--device", "--text-column"],
    "report": ["--labelled", "--out", "--label-column", "--workers"],
    "review": ["--n", "--seed", "--answers", "--workers"],
    "adapt": ["--classes", "--prior", "--temperature", "--seed", "--lr", "--batch-size", "--recipe", "--method",
              "--tune", "--lambda", "--optimizer", "--views", "--chunk", "--workers", "--shots", "--words",
              "--template", "--model", "--max-length", "--augment", "--precision", "--revision"],
    "search": ["--lrs", "--lambdas", "--seed", "--prior", "--batch-size", "--method"],
    "bench run": ["--tasks", "--methods", "--seeds", "--set", "--unlabelled", "--limit", "--jobs"],
    "figures": ["--labelled", "--centred", "--out", "--workers"],
}  # fmt: skip
FLAGS = ("--unknown", "--labelled", "--centred")
ADAPT = ["--features", "x.npy", "--prototypes", "p.npz", "--steps", "1", "--no-report"]
GIVEN = {
    "predict": ["run", "x.npy"], "evaluate": ["run", "l.npz"], "report": ["run", "x.npy"], "review": ["run", "x.npy"],
    "figures": ["run", "x.npy"], "adapt": ADAPT, "search": [*ADAPT, "--lrs", "0.01"],
    "bench run": ["images", "--data", "run", "--model", "pouf/tiny-clip"],
}  # fmt: skip
WITHOUT_MUCH_WORK = [name for name in OPTIONS if name not in ("report", "figures", "search")]


def commands(draw: Draw, folder: Path, run: Path, kinds: list[str] = WITHOUT_MUCH_WORK) -> None:
    command = draw(st.sampled_from(kinds))
    arguments = list(GIVEN[command])
    if draw(st.integers(0, 3)) == 0:
        arguments[draw(st.integers(0, len(arguments) - 1))] = draw(STRANGE)
    for option in draw(st.lists(st.sampled_from(OPTIONS[command]), unique=True, min_size=1, max_size=3)):
        arguments += [option] if option in FLAGS else [option, draw(STRANGE)]
    for name in ("x.npy", "p.npz", "l.npz"):
        shutil.copyfile(run / name, folder / name)
    shutil.copytree(run / "run", folder / "run", dirs_exist_ok=True)
    if command in ("adapt", "search"):
        arguments += ["--out", "new"]
    expected = (
        pouf(*command.split(), *arguments, "--no-cache", cwd=folder, code=None)
        if command != "bench run"
        else pouf(*command.split(), *arguments, "--out", "new", cwd=folder, code=None)
    )
    assert expected.returncode in (0, 1, 2), expected
    assert "Traceback" not in expected.stderr and "This is a bug" not in expected.stderr, expected
    assert "\x1b[31m" not in expected.stderr + expected.stdout and "\u202e" not in expected.stderr + expected.stdout
    if expected.returncode:
        assert re.search(r"^error: \S", expected.stderr, re.M), expected


def all_commands(draw: Draw, folder: Path, run: Path) -> None:
    commands(draw, folder, run, list(OPTIONS))


CASES: dict[str, Callable[[Draw, Path, Path], None]] = {
    case.__name__: case
    for case in (
        vectors_of_any_bytes, arrays_of_any_kind, files_of_texts, labels_and_answers, lists_of_names, templates,
        recipes, pictures_of_any_bytes, archives, caches, run_folders, commands,
    )
}  # fmt: skip


def generate(case: Callable[[Draw, Path, Path], None], n: int, run: Path, tmp_path: Path) -> int:
    """Run a case on n inputs; what is refused with a clear line is fine."""
    met = 0

    @settings(
        max_examples=n, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )  # fmt: skip
    @given(st.data())
    def one(data: st.DataObject) -> None:
        nonlocal met
        met += 1
        folder = tmp_path / str(met)
        folder.mkdir()
        try:
            case(data.draw, folder, run)
        except InputError as error:
            assert str(error).strip()
        shutil.rmtree(folder)

    one()
    return met


@pytest.mark.parametrize("case", CASES)
def test_some_generated_inputs(case: str, run: Path, tmp_path: Path) -> None:
    assert generate(CASES[case], 26, run, tmp_path) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "all_commands"])
def test_many_generated_inputs(case: str, run: Path, tmp_path: Path) -> None:
    n = {"commands": 300, "all_commands": 100}.get(case, 440)
    assert generate(CASES.get(case, all_commands), n, run, tmp_path) >= n - 1
