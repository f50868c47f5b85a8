"""`pouf figures`, and the figure of `pouf bench run lambda`, as a user runs them."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runner import pouf as command

from pouf import EMBEDDED, Classifier
from pouf.bench.standins import make_data
from pouf.demo import DIGITS

SVG = "{http://www.w3.org/2000/svg}"
Pouf = Callable[..., dict[str, ET.Element]]


@pytest.fixture
def pouf(tmp_path: Path, in_folder: Callable[[Path], None]) -> Pouf:
    """The drawings that a command writes, by the names of their files."""
    in_folder(tmp_path)

    def run(*arguments: object) -> dict[str, ET.Element]:
        files = [Path(file) for file in json.loads(command(*arguments, "--json", cwd=tmp_path).stdout)["files"]]
        assert {*files} <= {*files[0].parent.iterdir()} and not list(files[0].parent.glob("*.png"))
        return {file.name: ET.parse(file).getroot() for file in files if file.suffix == ".svg"}

    return run


def words(root: ET.Element) -> list[str | None]:
    return [text.text for text in root.iter(f"{SVG}text")]


def test_pouf_figures_writes_three_drawings(pouf: Pouf, few_digits: Path) -> None:
    Classifier.from_pretrained(EMBEDDED, DIGITS).save_pretrained("run")
    drawn = pouf("figures", "run", few_digits, "--labelled")
    assert drawn.keys() == {"tsne.svg", "neighbours.svg", "similarity.svg"} and Path("figures/tsne.svg").is_file()
    assert all(root.tag == f"{SVG}svg" for root in drawn.values())
    assert sum(mark.get("class") == "p" for mark in drawn["tsne.svg"].iter()) == 300
    assert words(drawn["tsne.svg"]).count("nine") >= 2 and {"zero-shot", "adapted"} <= {*words(drawn["tsne.svg"])}
    assert len(list(drawn["neighbours.svg"].iter(f"{SVG}image"))) == 100 and "✗" in words(drawn["neighbours.svg"])
    assert any("right class" in word for word in words(drawn["similarity.svg"]))

    def places(root: ET.Element) -> list[str | None]:
        return [circle.get("cx") for circle in root.iter(f"{SVG}circle")]

    centred = pouf("figures", "run", few_digits, "--labelled", "--centred", "--out", "centred")
    assert places(centred["tsne.svg"]) != places(drawn["tsne.svg"])
    assert any("centred" in word for word in words(centred["tsne.svg"]))
    unlabelled = pouf(
        "figures", "run", few_digits, "--out", "unlabelled", "--only", "neighbours", "--classes", "Two,fi"
    )
    assert unlabelled.keys() == {"neighbours.svg"} and not Path("unlabelled/tsne.svg").exists()
    assert words(unlabelled["neighbours.svg"]) == ["zero-shot", "adapted", "two", "five"], "in the order given; no ✗"


def test_pouf_bench_draws_the_sweep_over_lambda(pouf: Pouf) -> None:
    make_data(Path("data"))
    settings = ("--methods", "0.1,0.3", "--seeds", 0, "--set", "steps=1", "--out", "swept")
    drawn = pouf("bench", "run", "lambda", "--data", "data", "--model", EMBEDDED, *settings)
    assert drawn.keys() == {"lambda.svg"} and "office31:webcam" in words(drawn["lambda.svg"])
    curve, _sample = drawn["lambda.svg"].iter(f"{SVG}polyline")
    assert len(curve.get("points", "").split()) == 2, "a place for each lambda"
