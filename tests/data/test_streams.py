"""More than fits into memory: large JSONL files, tar archives, streams."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from helpers import train
from PIL import Image
from small_models import sentence_encoder

from pouf import EMBEDDED, Classifier, Images, InputError, Recipe, Stream, Texts
from pouf.data.texts import LargeTexts
from pouf.demo import DIGITS

ROWS = [{"text": f"a cat number {i} " * (1 + i % 4), "label": "x" * (i % 3)} for i in range(40)]
RECIPE = Recipe(steps=3, batch_size=8, augment="none", temperature=0.1).with_settings(**{"optimisation.lr": 1e-3})


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """To be read line by line, as those that are larger; some of its lines can't be."""
    file = tmp_path / "large.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    lines[5:5] = ["{broken", "", json.dumps({"other": 1}), json.dumps({"text": " "})]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_large_file_reads_as_a_small_one(large: Path, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["good", "bad"])
    by_line, whole = LargeTexts(large, ("text",)), Texts.from_file(large)
    found, expected = classifier.encode(by_line), classifier.encode(whole)
    assert not isinstance(whole, LargeTexts)
    assert found.indices == expected.indices and torch.allclose(found.features, expected.features, atol=1e-5)
    assert by_line.skipped == whole.skipped
    assert [by_line.digest(i) for i in found.indices] == [whole.digest(i) for i in found.indices]
    assert list(by_line.ids) == list(whole.ids)


def test_a_large_files_order_is_that_of_its_texts_and_of_nothing_else(large: Path, tmp_path: Path) -> None:
    """Rows in another order and with other labels: the same texts come in the same order."""
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"label": "y", "text": row["text"]}) for row in reversed(ROWS)))
    orders = []
    for file in (large, other):
        data = LargeTexts(file, ("text",))
        unread = {5, 6, 7, 8} if file == large else set()
        orders.append([data.read(index) for index in data.content_order() if index not in unread])
    assert orders[0] == orders[1]


def test_a_large_file_without_the_column_is_an_error(large: Path) -> None:
    with pytest.raises(InputError, match=r"no column 'review', only: text, label"):
        LargeTexts(large, ("review",))


def test_a_large_file_can_be_trained_on(large: Path, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["good", "bad"])
    settings = RECIPE.with_settings(steps=8, **{"compute.workers": 1})
    assert len(train(classifier, LargeTexts(large, ("text",)), settings).history) == 8


@pytest.fixture
def archives(tmp_path: Path, few_digits: Path) -> Path:
    """The digits in two archives, as WebDataset writes them: a label file beside each picture."""
    paths = sorted(few_digits.rglob("*.png"))
    for number in range(2):
        with tarfile.open(tmp_path / f"shard-{number}.tar", "w") as archive:
            for i, path in enumerate(paths[number::2]):
                archive.add(path, f"{i:05d}.png")
                label = path.parent.name.encode()
                entry = tarfile.TarInfo(f"{i:05d}.cls")
                entry.size = len(label)
                archive.addfile(entry, io.BytesIO(label))
    return tmp_path


def test_archives_hold_the_same_pictures_as_the_folder(archives: Path, few_digits: Path, tiny: Classifier) -> None:
    folder, packed = Images.from_folder(few_digits), Images.from_folder(archives)
    assert len(packed) == len(folder) == 150 and packed.ids[0] == "shard-0.tar/00000.png"
    # Put in order by their contents, they are the same and give the same training.
    one = [folder.digest(i) for i in folder.content_order()]
    assert one == [packed.digest(i) for i in packed.content_order()]
    weights = []
    for data in (folder, packed):
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        train(classifier, data, RECIPE)
        weights.append(torch.cat([p.detach().flatten() for p in classifier.parameters()]))
    assert torch.equal(*weights)


def test_a_single_archive_is_a_folder_too(archives: Path) -> None:
    assert len(Images.from_folder(archives / "shard-1.tar")) == 75


def test_an_archive_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no archive at all")
    with pytest.raises(InputError, match="not a readable tar archive"):
        Images.from_folder(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "b.tar", "w"):
        pass
    with pytest.raises(InputError, match="no images in"):
        Images.from_folder(tmp_path / "b.tar")


def test_a_stream_is_drawn_from_its_buffer_and_starts_anew() -> None:
    stream = Stream(lambda: (f"text {i}" for i in range(50)), "text", buffer=20)
    batches = stream.random_batches(5, torch.Generator().manual_seed(0))
    read = [[stream.read(draw.position) for draw in next(batches)] for _ in range(30)]
    assert all(len(set(batch)) == 5 for batch in read[:6])
    assert {text for batch in read for text in batch} == {f"text {i}" for i in range(50)}
    assert [int(text.split()[1]) for text in read[0]] != sorted(int(text.split()[1]) for text in read[0])
    assert len(stream.waiting) <= 26, "nothing that was used is kept"


@pytest.mark.parametrize("tune", ["full", "prompt"])
def test_a_stream_of_the_datasets_package_can_be_trained_on(tune: str, pictures: list[Image.Image]) -> None:
    datasets = pytest.importorskip("datasets")

    def rows():
        for i, picture in enumerate(pictures):
            yield {"picture": picture, "label": i}

    dataset = datasets.IterableDataset.from_generator(rows)
    stream = Stream.from_dataset(dataset, "picture", "image", buffer=8)
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    settings = RECIPE.with_settings(**{"tuner.name": tune, "compute.workers": 2})
    assert len(train(classifier, stream, settings).history) == 3
    with pytest.raises(InputError, match=r"no known end: take some of it with take\(n\)"):
        classifier.encode(stream)
    assert len(classifier.predict(stream.take(5))) == 5


def test_columns_of_the_datasets_package_are_data_as_they_are(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ["a cat", "a dog", "the sea"], "label": [0, 1, 0]})
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path), ["good", "bad"])
    assert classifier.predict(dataset["text"]) == classifier.predict(["a cat", "a dog", "the sea"])
    with pytest.raises(InputError, match="no column 'review', only: text, label"):
        Stream.from_dataset(dataset.to_iterable_dataset(), "review", "text")


def test_a_stream_that_is_never_readable_ends() -> None:
    stream = Stream(lambda: ["a.jpg", "b.jpg"], "image", buffer=10)
    with pytest.raises(InputError, match=r"none of the first .* samples of the stream can be read: expected an image"):
        train(Classifier.from_pretrained(EMBEDDED, DIGITS), stream, RECIPE)


def test_a_stream_that_can_be_opened_once_loses_nothing(tmp_path: Path, pictures: list[Image.Image]) -> None:
    once = iter(pictures)
    stream = Stream(lambda: once, "image", buffer=2)
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    with pytest.raises(InputError, match="must start from the first sample"):
        classifier.adapt(stream, recipe=RECIPE, settings={"batch_size": 2, "steps": 50}, output=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "details/run.json").read_text())["status"] == "failed"
    Classifier.from_pretrained(tmp_path / "run")


def test_an_empty_stream_is_an_error_and_a_wrong_sample_is_skipped() -> None:
    with pytest.raises(InputError, match="the stream is empty"):
        next(Stream(list, "text").random_batches(2, torch.Generator()))
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    mixed = Stream(lambda: [Image.new("RGB", (8, 8)), "a text", Image.new("RGB", (9, 9))], "image", buffer=2)
    assert len(train(classifier, mixed, RECIPE.with_settings(batch_size=2)).history) == 3
    assert mixed.skipped
