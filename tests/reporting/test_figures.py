"""The paper's figures from a run: right neighbours, right similarities, files that can be opened."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_models import sentence_encoder

from pouf import EMBEDDED, Classifier, Images, Texts
from pouf.data.labelled import read_labelled
from pouf.demo import DIGITS
from pouf.reporting.figures import FIGURES, View, embed, lambda_sweep, look, nearest, similarities, write


def test_images_of_a_run(few_digits: Path, tmp_path: Path) -> None:
    labelled = read_labelled(few_digits, DIGITS, "image")
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    comparison = look(classifier, classifier, labelled.inputs, labelled.labels)
    assert comparison.before.labels.tolist() == labelled.labels
    for name, draw in FIGURES.items():
        png, svg = write(draw(comparison), tmp_path, name)
        assert Image.open(png).width > 500 and "<svg" in svg.read_text()


def test_texts_without_labels_and_names_with_markup(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(
        sentence_encoder(tmp_path / "m"), ["good $x_1$", "<b>bad</b>"], ["it is {}"]
    )
    texts = [f"the film is {word} {i} $" for i in range(6) for word in ("good", "bad", "okay")]
    comparison = look(classifier, classifier, Texts(texts))
    assert not comparison.labelled
    for name, draw in FIGURES.items():
        write(draw(comparison), tmp_path, name)


def test_what_can_not_be_read_is_left_out(few_digits: Path, tmp_path: Path) -> None:
    for i, path in enumerate(sorted(few_digits.rglob("*.png"))[:8]):
        (tmp_path / f"{i}.png").write_bytes(path.read_bytes() if i != 3 else b"broken")
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    comparison = look(classifier, classifier, Images.from_folder(tmp_path))
    assert len(comparison.before.features) == len(comparison.inputs) == 7
    assert all(comparison.inputs.read(i) for i in range(7))


def test_nearest_and_similarity_are_cosines() -> None:
    features = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), dim=1)
    view = View(features, torch.eye(2), torch.tensor([0, 1, 1]), features.softmax(1))
    assert nearest(view, 0, 2) == [0, 2] and nearest(view, 1, 9) == [1, 2, 0]
    assert similarities(view).tolist() == pytest.approx([1.0, 1.0, 0.5**0.5])


def test_t_sne_keeps_clusters_together_and_is_the_same_each_time() -> None:
    draw = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(2, 8, generator=draw), dim=1)
    labels = torch.arange(2).repeat_interleave(20)
    features = F.normalize(centres[labels] + 0.05 * torch.randn(40, 8, generator=draw), dim=1)
    view = View(features, centres, labels, (features @ centres.T).softmax(1))
    points, prototypes = embed(view)
    assert points.shape == (40, 2) and prototypes.shape == (2, 2)
    middles = torch.stack([torch.from_numpy(points[labels == k]).mean(0) for k in (0, 1)])
    within = (torch.from_numpy(points) - middles[labels]).norm(dim=1).mean()
    assert within < (middles[0] - middles[1]).norm() / 2
    assert (embed(view)[0] == points).all()


def test_the_sweep_over_lambda(tmp_path: Path) -> None:
    figure = lambda_sweep([0.1, 0.3], {"webcam": [80.0, 85.0]}, [87.5, 90.6])
    lines = figure.axes[0].get_lines()
    assert list(lines[0].get_ydata()) == [80.0, 85.0] and list(lines[1].get_ydata()) == [87.5, 90.6]
