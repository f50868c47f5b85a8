"""Names as paths: prompts of the ancestors, sums of probabilities, and parents as answers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cli_runner import pouf
from helpers import REVIEWS
from small_models import sentence_encoder

from pouf import Classifier, read_labelled
from pouf.data.class_names import Taxonomy
from pouf.inference.encode import InferenceConfig
from pouf.validation.selective import unreliable

PATHS = ("animal/dog", "animal/cat", "vehicle/road/car", "vehicle/road/van", "vehicle/ship", "stone")


def test_only_names_with_a_common_ancestor_are_paths() -> None:
    for flat in (("cat", "dog"), ("TCP/IP", "HTTP"), ("and/or", "9/11"), ("/a", "/b"), ("a//b", "a//c")):
        assert Taxonomy.from_names(flat) is None
    found = Taxonomy.from_names(PATHS)
    assert found.members == {"animal": [0, 1], "vehicle": [2, 3, 4], "vehicle/road": [2, 3]}
    assert found.texts(2) == ("car", "road", "vehicle") and found.texts(5) == ("stone",)
    assert [found.parent(name) for name in ("vehicle/road/car", "vehicle/road", "vehicle", "stone")] == [
        "vehicle/road", "vehicle", None, None,
    ]  # fmt: skip
    p = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.1, 0.1]])
    assert torch.allclose(found.sums(p), torch.tensor([[0.3, 0.6, 0.5]]))


def test_prototypes_are_means_over_the_names_of_the_ancestors(tmp_path: Path) -> None:
    folder = sentence_encoder(tmp_path / "encoder")
    flat, paths = (Classifier.from_pretrained(folder, names, ["it is {}"]) for names in
                   (("good", "bad", "film"), ("film/good", "film/bad")))  # fmt: skip
    with torch.no_grad():
        good, bad, film = flat.prototypes()
        expected = F.normalize(torch.stack([good + film, bad + film]), dim=1)
        assert torch.allclose(paths.prototypes(), expected, atol=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taxonomy")
    sentence_encoder(folder / "encoder")
    classifier = Classifier.from_pretrained(folder / "encoder", ["film/good", "film/bad", "weather"], ["it is {}"])
    data = folder / "texts.csv"
    data.write_text("text\n" + "".join(f'"{text}"\n' for text in REVIEWS))
    classifier.adapt(data, settings={"steps": 2, "snapshots": 1}, output=folder / "run")
    return folder


def test_predictions_and_report_have_the_sums(run: Path) -> None:
    pouf("predict", "run", "texts.csv", "--out", "p.csv", "--probabilities", "--quiet", cwd=run)
    rows = list(csv.DictReader((run / "p.csv").open()))
    for row in rows:
        assert float(row["p_film"]) == pytest.approx(float(row["p_film/good"]) + float(row["p_film/bad"]), abs=2e-6)
        parent = "film" if row["class"].startswith("film/") else ""
        assert row["parent"] == parent and row["parent_probability"] == (row["p_film"] if parent else "")
    page = (run / "run" / "report.html").read_text()
    assert 'id="groups"' in page and "<td>film</td>" in page


def test_what_is_unsure_of_the_class_is_answered_with_the_parent() -> None:
    axes = torch.eye(8)
    prototypes = torch.stack([axes[0], axes[0] + 0.01 * axes[2], axes[1]])  # dog and wolf can't be told apart
    noise = 0.1 * torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    features = axes[torch.arange(40) % 2] + noise
    classifier = Classifier.from_vectors(prototypes, ("animal/dog", "animal/wolf", "stone"))
    data = classifier.data(features)
    found = unreliable(classifier, classifier, data, classifier.encode(data), 0.05, InferenceConfig())
    guess = classifier.predict(features)
    assert found.parents and set(found.parents.values()) == {"animal"}
    assert all(guess[index].startswith("animal/") for index in found.parents)
    assert not found.parents.keys() & set(found.left_out), "an answer is an answer"
    flat = Classifier.from_vectors(prototypes, ("dog", "wolf", "stone"))
    alone = unreliable(flat, flat, data, flat.encode(data), 0.05, InferenceConfig())
    assert alone.parents == {} and set(alone.left_out) == {*found.left_out, *found.parents}


def test_folders_within_folders_are_paths(few_digits: Path, tmp_path: Path) -> None:
    picture = next(few_digits.rglob("*.png")).read_bytes()
    for name in ("animal/dog", "animal/cat", "stone"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.png").write_bytes(picture)
    labelled = read_labelled(tmp_path, ["animal/dog", "animal/cat", "stone"], "image")
    names = ("animal/dog", "animal/cat", "stone")
    assert [labelled.labels[labelled.inputs.ids.index(f"{name}/1.png")] for name in names] == [
        0, 1, 2,
    ]  # fmt: skip
