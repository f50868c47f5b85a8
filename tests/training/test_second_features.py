"""Features of another encoder refine what zero-shot says; a run teaches a smaller model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cli_runner import one_line_error, pouf
from helpers import REVIEWS, groups
from PIL import Image
from small_models import sentence_encoder, vision_model
from transformers import AutoModel

from pouf import Classifier, InputError, Vectors
from pouf.data.labels import Teacher
from pouf.inference.encode import FeatureStore, InferenceConfig
from pouf.integrations.onnx import export_onnx
from pouf.models.load import load_feature_encoder
from pouf.postprocess.clusters import second_space
from pouf.training.teachers import second_opinion
from pouf.validation.diagnostics import share

QUICK = {"steps": 40, "snapshots": 4}


def task() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Classifier]:
    """A first space in which classes overlap, a second one without names in which they lie apart."""
    features, prototypes = groups(n=240, spread=0.3, apart=0.3)
    labels = torch.arange(240) % 6
    noise = torch.randn(240, 12, generator=torch.Generator().manual_seed(3))
    second = F.one_hot(labels, 12).float() + 0.25 * noise
    return features, second, labels, Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.1)


def test_a_second_space_refines_and_the_result_predicts_without_it() -> None:
    features, second, labels, clf = task()

    def right(classifier: Classifier) -> float:
        return share(classifier.predict_proba(features).argmax(1) == labels)

    scores = clf.scores(clf.encode(clf.data(features)))
    refined, weight = second_space(scores, second)
    assert share(refined.argmax(1) == labels) > share(scores.logits.argmax(1) == labels) + 0.1
    assert 0.3 < weight < 0.95 and torch.allclose(refined.sum(1), torch.ones(240))
    alone, taught = (clf.adapt(features, settings=QUICK, second_features=each) for each in (None, second.numpy()))
    assert right(taught.at("last")) > right(alone.at("last")) + 0.02


def test_a_space_without_the_classes_has_no_part_and_two_classes_keep_their_shares() -> None:
    features, _, labels, clf = task()
    scores = clf.scores(clf.encode(clf.data(features)))
    noise = torch.randn(240, 64, generator=torch.Generator().manual_seed(5))
    refined, weight = second_space(scores, noise)
    assert weight < 0.1 and share(refined.argmax(1) == labels) > share(scores.logits.argmax(1) == labels) - 0.02
    two, prototypes = groups(present=2, k=2, spread=0.6)
    rows = torch.arange(120)[torch.arange(120) % 8 != 1]
    pair = Classifier.from_vectors(prototypes, ["a", "b"], temperature=0.1)
    scores = pair.scores(pair.encode(pair.data(two[rows])))
    own = (scores.logits * 2).softmax(1).mean(0)  # at T = 0.05
    assert torch.allclose(second_space(scores, two[rows])[0].mean(0), own, atol=0.01)
    known = torch.tensor([0.9, 0.1])
    assert torch.allclose(second_space(scores, two[rows], known)[0].mean(0), known, atol=0.01)


def test_a_file_by_ids_is_put_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    features, second, _, clf = task()
    order = torch.randperm(240, generator=torch.Generator().manual_seed(0))
    np.savez(tmp_path / "second.npz", features=second[order].numpy(), ids=[str(i) for i in order.tolist()])
    data, inference = Vectors(features.numpy()), InferenceConfig()
    by_id, by_order = (
        second_opinion(given, clf, data, inference) for given in (tmp_path / "second.npz", second.numpy())
    )
    assert torch.allclose(by_id.probabilities, by_order.probabilities, atol=1e-5)


def test_answers_of_a_teacher_stay_and_teach_their_neighbours_in_the_second_space() -> None:
    features, second, labels, clf = task()
    prototypes = clf.fixed_prototypes()[[1, 0, 2, 3, 4, 5]]
    swapped = Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.1)
    answers = F.one_hot(labels, 6).float()
    answers[160:] = 0  # not answered
    data, inference = Vectors(features.numpy()), InferenceConfig()
    alone, both = (
        second_opinion(second.numpy(), swapped, data, inference, teacher=teacher).probabilities.argmax(1)
        for teacher in (None, Teacher(answers))
    )
    assert torch.equal(both[:160], labels[:160])
    assert share(both[160:] == labels[160:]) > share(alone[160:] == labels[160:]) + 0.1


@pytest.mark.parametrize(
    ("rows", "ids", "words"),
    [
        (239, None, "239 rows for 240 inputs"), (240, [*range(239), 7], "'7' occurs twice"),
        (240, [*range(239), "x"], "no input has the id 'x'"), (239, [*range(239)], "'239' has none"),
    ],
)  # fmt: skip
def test_bad_second_features_are_refused(tmp_path: Path, rows: int, ids: list | None, words: str) -> None:
    features, second, _, clf = task()
    lists = {} if ids is None else {"ids": [str(name) for name in ids]}
    np.savez(tmp_path / "second.npz", features=second[:rows].numpy(), **lists)
    with pytest.raises(InputError, match=words):
        clf.adapt(features, settings=QUICK, second_features=tmp_path / "second.npz")


@pytest.mark.parametrize("kind", ["dinov2", "resnet"])
def test_a_vision_model_without_a_text_side_is_a_second_space(
    kind: str, tmp_path: Path, tiny: Classifier, pictures: list[Image.Image]
) -> None:
    folder = vision_model(tmp_path / kind, kind)
    encoder = load_feature_encoder(folder)
    images = tiny.data(pictures)
    features = FeatureStore(encoder, InferenceConfig()).features(images).features
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(**encoder.prepare(pictures[:2])).last_hidden_state
    expected = hidden.mean(1) if kind == "dinov2" else hidden.mean((2, 3))
    assert torch.allclose(features[:2], expected, atol=1e-5)
    by_name, by_matrix = (
        second_opinion(given, tiny, images, InferenceConfig()) for given in (folder, features.numpy())
    )
    assert torch.allclose(by_name.probabilities, by_matrix.probabilities, atol=1e-4)
    vectors, _, _, clf = task()
    with pytest.raises(InputError, match="reads images, the inputs are vectors"):
        second_opinion(folder, clf, clf.data(vectors), InferenceConfig())


def test_a_run_teaches_a_smaller_model_on_the_command_line(tmp_path: Path) -> None:
    sentence_encoder(tmp_path / "large", kind="mpnet")
    sentence_encoder(tmp_path / "small")
    texts = [f"{text} {more}" for text in REVIEWS for more in ("film", "food", "book")]
    (tmp_path / "texts.csv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
    common = ("--steps", 3, "--json")
    pouf(
        "adapt", "texts.csv", "--classes", "good,bad", "--model", tmp_path / "large", "--tune", "prototypes", *common,
        "--second-features", tmp_path / "small", "--windows", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    said = pouf("distil", "run", "--model", tmp_path / "small", "--out", "student", *common, cwd=tmp_path)
    facts = json.loads(said.stdout)
    assert facts["held_back"] == 4 and 0 <= facts["agreement"] <= 1
    assert facts["student"]["parameters"] < facts["teacher"]["parameters"] and facts["student"]["seconds"] > 0
    assert json.loads((tmp_path / "student" / "details/run.json").read_text())["distilled"]["held_back"] == 4
    assert json.loads((tmp_path / "student" / "details/plan.json").read_text())["teacher"]["answers"] == 20
    student = Classifier.from_pretrained(tmp_path / "student")
    assert student.backbone.windows, "as its teacher"
    long = [" ".join(texts), *texts]
    session = pytest.importorskip("onnxruntime").InferenceSession(
        str(export_onnx(student, tmp_path / "onnx").folder / "classifier.onnx")
    )
    found = torch.from_numpy(session.run(None, {n: t.numpy() for n, t in student.backbone.prepare(long).items()})[0])
    assert torch.allclose(found, student.predict_proba(long), atol=1e-4)
    error = one_line_error(pouf("distil", "run", "--model", "no/such/folder", "--out", "other", cwd=tmp_path, code=2))
    assert "no model folder" in error
