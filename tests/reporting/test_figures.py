"""The paper's figures from a run: right neighbours, right similarities, drawings that any viewer opens."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from markupsafe import Markup
from small_models import sentence_encoder

from pouf import EMBEDDED, Classifier, Images, Texts, Vectors
from pouf.data.labels import read_labelled
from pouf.demo import DIGITS
from pouf.reporting.figures import (
    Comparison,
    FeatureView,
    _overlapping,
    compare_features,
    embed,
    histogram,
    lambda_sweep,
    line,
    nearest_to_prototype,
    neighbours,
    paper_figures,
    similarities,
    tsne,
)
from pouf.reporting.pages import write_svg

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '<script>alert(1)</script> & "quotes" ]]> var(--ink)'


def parse(figure: Markup) -> ET.Element:
    return ET.fromstring(figure)


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def points(element: ET.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, point.split(","))) for point in element.get("points").split()]


def curves(figure: Markup) -> list[ET.Element]:
    """Without the samples in the legend."""
    return [child for child in parse(figure) if child.tag == f"{SVG}polyline"]


def some_view(k: int, n: int, gap: float = 0.0) -> FeatureView:
    """Features around their prototypes; with a gap, all features on one side and all prototypes on the other."""
    draw = torch.Generator().manual_seed(0)
    prototypes, labels = F.normalize(torch.randn(k, 16, generator=draw), dim=1), torch.arange(n) % k
    features = prototypes[labels] + 0.1 * torch.randn(n, 16, generator=draw)
    away = gap * F.one_hot(torch.tensor(0), 16)
    features, prototypes = F.normalize(features + away, dim=1), F.normalize(prototypes - away, dim=1)
    return FeatureView(features, prototypes, labels, (features @ prototypes.T).softmax(1))


def test_images_of_a_run(few_digits: Path, tmp_path: Path) -> None:
    labelled = read_labelled(few_digits, DIGITS, "image")
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    comparison = compare_features(lambda: classifier, lambda: classifier, labelled.inputs, labelled.labels)
    assert comparison.before.labels.tolist() == labelled.labels
    files = {name: write_svg(figure, tmp_path / f"{name}.svg") for name, figure in paper_figures(comparison).items()}
    roots = {name: ET.parse(file).getroot() for name, file in files.items()}
    marks = [mark for mark in roots["tsne"].iter() if mark.get("class") == "p"]
    assert [int(mark.get("data-i")) for mark in marks] == [*range(150), *range(150)], "before and after"
    assert [star.findtext(f"{SVG}title") for star in roots["tsne"].iter() if star.get("class") == "star"] == [
        *DIGITS,
        *DIGITS,
    ]
    pictures = [picture.get("href") for picture in roots["neighbours"].iter(f"{SVG}image")]
    assert len(pictures) == 100 and all(picture.startswith("data:image/") for picture in pictures)
    wrong = sum(labelled.labels[i] != k for k in range(10) for i in nearest_to_prototype(comparison.before, k))
    assert wrong > 0 and texts(roots["neighbours"]).count("✗") == 2 * wrong
    mean = f"mean {similarities(comparison.before).mean():.3f}"
    assert f"zero-shot, {mean}" in texts(roots["similarity"]) and f"adapted, {mean}" in texts(roots["similarity"])
    assert "cosine similarity with the right class's prototype" in texts(roots["similarity"])


def test_texts_without_labels_and_names_with_markup(tmp_path: Path) -> None:
    names = [f"good {NASTY}", "bad"]
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "m"), names, ["it is {}"])
    data = Texts([f"{NASTY} the film is {word} {i}" for i in range(6) for word in ("good", "bad", "okay")])
    comparison = compare_features(lambda: classifier, lambda: classifier, data)
    assert not comparison.labelled
    for name, figure in paper_figures(comparison).items():
        assert "<script" not in figure
        root = ET.parse(write_svg(figure, tmp_path / f"{name}.svg")).getroot()
        assert not list(root.iter(f"{SVG}script"))
        if name == "tsne":
            titles = [title.text for title in root.iter(f"{SVG}title")]
            assert titles == names * 2, "nothing is lost"
        if name == "neighbours":
            assert "✗" not in texts(root) and "<script>alert(1)</script> &" in texts(root)
            assert max(map(len, texts(root))) <= 60, "long texts are wrapped"
        if name == "similarity":
            assert "cosine similarity with the predicted class's prototype" in texts(root)


def test_files_need_no_page_around_them(tmp_path: Path) -> None:
    file = write_svg(tsne(some_view(9, 40), [f"class {k}" for k in range(9)]), tmp_path / "new" / "map.svg")
    ground = ET.parse(file).getroot()[0]
    assert (ground.tag, ground.get("fill"), ground.get("width")) == (f"{SVG}rect", "#ffffff", "100%")
    assert "var(" not in file.read_text() and "#1b1f24" in file.read_text()


def test_what_can_not_be_read_is_left_out(few_digits: Path, tmp_path: Path) -> None:
    for i, path in enumerate(sorted(few_digits.rglob("*.png"))[:8]):
        (tmp_path / f"{i}.png").write_bytes(path.read_bytes() if i != 3 else b"broken")
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    comparison = compare_features(lambda: classifier, lambda: classifier, Images.from_folder(tmp_path))
    assert len(comparison.before.features) == len(comparison.inputs) == 7
    assert all(comparison.sample(i) for i in range(7))
    (tmp_path / "0.png").unlink()
    assert comparison.sample(0) is None and "0.png" in texts(parse(neighbours(comparison)))


def test_nearest_and_similarity_are_cosines() -> None:
    features = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), dim=1)
    view = FeatureView(features, torch.eye(2), torch.tensor([0, 1, 1]), features.softmax(1))
    assert nearest_to_prototype(view, 0, 2) == [0, 2] and nearest_to_prototype(view, 1, 9) == [1, 2, 0]
    assert similarities(view).tolist() == pytest.approx([1.0, 1.0, 0.5**0.5])


def test_t_sne_keeps_clusters_together_and_is_the_same_each_time() -> None:
    view = some_view(2, 40)
    points, prototypes = embed(view)
    assert points.shape == (40, 2) and prototypes.shape == (2, 2)
    middles = torch.stack([torch.from_numpy(points[view.labels == k]).mean(0) for k in (0, 1)])
    within = (torch.from_numpy(points) - middles[view.labels]).norm(dim=1).mean()
    assert within < (middles[0] - middles[1]).norm() / 2
    assert (embed(view)[0] == points).all()


@pytest.mark.parametrize("k", [3, 10])
def test_prototypes_far_from_all_features_are_drawn_far_from_them_unless_centred(k: int) -> None:
    def gap(centred: bool) -> float:
        """Distance of a prototype to the feature next to it, in mean distances of features to their middle."""
        features, prototypes = map(torch.from_numpy, embed(some_view(k, 100, gap=4.0), centred))
        return (torch.cdist(prototypes, features).min() / (features - features.mean(0)).norm(dim=1).mean()).item()

    assert gap(centred=False) > 0.3 and gap(centred=True) < 0.1


def test_no_colour_stands_for_two_classes() -> None:
    """The paper draws the 31 classes of Office-31 like this."""
    names = [f"name {k}" for k in range(32)]
    root = parse(tsne(some_view(32, 120), names))
    colours = [group[0].get("fill") for group in root.iter(f"{SVG}g") if group.get("transform")]
    assert len(colours) == len(set(colours)) == 32 and {*names} <= {*texts(root)}
    changed = [i % 3 == 0 for i in range(120)]
    many = parse(tsne(some_view(33, 120), [*names, "one more"], changed=changed))
    points = {int(point.get("data-i")): point.get("fill") for point in many.iter() if point.get("class") == "p"}
    assert [points[i] == "var(--after)" for i in range(120)] == changed, "more classes than colours: what changed"
    assert texts(many) == ["prediction changed", "unchanged"]


def test_names_of_prototypes_lie_on_no_star_no_point_and_no_other_name() -> None:
    names = [f"a class named {k}" for k in range(24)]
    root = parse(tsne(some_view(24, 100), names))
    named = [(float(t.get("x")), float(t.get("y")), t.text) for t in root.iter(f"{SVG}text") if t.get("paint-order")]
    stars = [points(star)[0] for star in root.iter(f"{SVG}polygon") if star.get("class") == "star"]
    dots = [mark for mark in root.iter() if mark.get("class") == "p"]
    middles = [
        (float(dot.get("cx")), float(dot.get("cy"))) if dot.get("cx") else torch.tensor(points(dot)).mean(0).tolist()
        for dot in dots
    ]
    assert 8 <= len(named) <= 24 == len(stars) and len(middles) == 100
    for x, y, name in named:
        assert all(name == other or abs(x - a) >= 3 * len(name + other) or abs(y - b) >= 12 for a, b, other in named)
        # The tip of a star is 9 above its middle, a name's baseline 4 below its own.
        assert all(abs(x - a) >= 3 * len(name) or abs(y - 4 - (b + 9)) >= 12 for a, b in stars)
        assert all(abs(x - a) >= 3 * len(name) or abs(y - 4 - b) >= 8 for a, b in middles)
    in_one_place = some_view(12, 100)._replace(prototypes=F.normalize(torch.ones(12, 16), dim=1))
    crowded = parse(tsne(in_one_place, names[:12]))
    stars = [points(star)[0] for star in crowded.iter(f"{SVG}polygon") if star.get("class") == "star"]
    alone = sum(all(star is other or math.dist(star, other) >= 10 for other in stars) for star in stars)
    names_drawn = texts(crowded)
    assert alone < 12 and all(name in names or ", " in name for name in names_drawn)
    assert sum(name in names for name in names_drawn) <= 12 + alone, (
        "beside the legend, no name stands for one of several stars in a place"
    )


def test_two_prototypes_overlapping_share_a_label() -> None:
    view = some_view(2, 60)._replace(prototypes=F.normalize(torch.ones(2, 16), dim=1))
    assert texts(parse(tsne(view, ["bad", "good"]))).count("bad, good") == 1
    assert _overlapping([(0, 0), (50, 0), (9, 0), (100, 0), (16, 0)]) == [[1], [3], [0, 2, 4]]


def test_bars_hold_every_input() -> None:
    view = some_view(3, 60)
    away = view._replace(features=F.normalize(view.features + 1, dim=1))
    figure = histogram(Comparison(view, away, Vectors(view.features), "abc", labelled=True))
    for curve, each in zip(curves(figure), (view, away), strict=True):
        places = points(curve)
        floor, left, right = places[0][1], places[0][0], places[-1][0]
        heights = torch.tensor([floor - places[1 + 2 * i][1] for i in range(40)])
        found = torch.histc(similarities(each), 40, *(  # both in the same bins
            torch.cat([similarities(view), similarities(away)]).aminmax()
        ))  # fmt: skip
        assert len(places) == 82 and left < right
        assert (heights / heights.sum() - found / 60).abs().max() < 0.01


def test_a_curve_with_the_step_that_was_chosen() -> None:
    figure = line([(1, 2.0), (2, math.nan), (10, 4.0)], 5)
    curve, _, chosen = curves(figure)
    (x1, y1), (x10, y10) = points(curve)
    assert y1 > y10, "higher values lie higher"
    across = {x for x, _ in points(chosen)}
    assert chosen.get("stroke-dasharray") != "none" and len(across) == 1
    assert across.pop() == pytest.approx(x1 + (x10 - x1) * 4 / 9, abs=0.1)
    assert {"0", "2", "10", "3"} <= {*texts(parse(figure))}, "round numbers on both axes"
    assert len(curves(line([(1, 2.0)]))) == 2 and "2" in texts(parse(line([(1, 2.0)])))


def test_axes_do_not_zoom_on_noise() -> None:
    def height(figure: Markup) -> float:
        ys = [y for _, y in points(curves(figure)[0])]
        return max(ys) - min(ys)

    noise = [(step, 0.9 + 0.001 * (step % 2)) for step in range(10)]
    assert height(line(noise)) < 10 and height(line(noise, span=(0, 1))) < 1
    assert height(line([(0, 0.0), (1, 1.0)], span=(0, 1))) > 100
    assert "↑ higher is better" in texts(parse(line(noise, good="↑ higher is better")))


def test_the_sweep_over_lambda() -> None:
    figure = lambda_sweep([0.1, 0.2, 0.3], {"webcam": [80.0, 85.0, 82.5], "dslr": [81.0, 82.0, 83.0]}, [87.5, 90.6, 90])
    webcam, dslr, paper = curves(figure)
    low, high, middle = (y for _, y in points(webcam))
    assert low > middle > high and middle == pytest.approx((low + high) / 2, abs=0.1)
    assert points(paper)[1][1] < high < points(dslr)[1][1]
    assert [curve.get("stroke-dasharray") for curve in (webcam, dslr, paper)] == ["none", "none", "5 3"]
    assert {"webcam", "dslr", "paper, chosen by labels", "lambda", "accuracy in %"} <= {*texts(parse(figure))}
    marks = re.findall(r"<(circle|polygon) ", figure)
    assert marks.count("circle") == marks.count("polygon") == 4, "three points and the legend, not by colour alone"
    assert "paper" not in lambda_sweep([0.1], {"webcam": [80.0]}, None)
    parse(lambda_sweep([], {}, None))


def test_features_that_are_all_the_same_are_one_point() -> None:
    """Those of a model whose weights are zeros. t-SNE would divide by their spread, and crash."""
    view = FeatureView(
        torch.zeros(40, 16), torch.zeros(2, 16), torch.zeros(40, dtype=torch.long), torch.full((40, 2), 0.5)
    )
    features, prototypes = embed(view)
    assert features.shape == (40, 2) and prototypes.shape == (2, 2) and not features.any() and not prototypes.any()
    parse(tsne(view, ["a", "b"]))
