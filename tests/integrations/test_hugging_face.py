"""What people of the Hugging Face libraries try first: push, fetch, pipelines, datasets, and a card that tells."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from helpers import REVIEWS, groups, train
from hub_server import environment_for
from huggingface_hub import ModelCard
from PIL import Image
from sentence_transformers import SentenceTransformer
from small_models import masked_lm, sentence_encoder
from transformers import pipeline

from pouf import EMBEDDED, Classifier, Images, InputError, Output, Recipe, Stream, Texts
from pouf.demo import DIGITS
from pouf.model_card import base_licence
from pouf.tuners import tune

FULL = Recipe(steps=2, batch_size=8, augment="none").with_settings(
    {"optimisation.lr": 1e-3, "optimisation.name": "adamw"}
)
CLOZE = {"templates": ["{text} It was [MASK]."], "words": ["terrible", "great"]}

ROUND_TRIP = """
import json, sys
from pouf import Classifier
classifier = Classifier.from_pretrained(sys.argv[1])
address = classifier.push_to_hub("me/digits", private=True, commit_message="Digits")
again = Classifier.from_pretrained("me/digits")
said = [c.predict_proba(sys.argv[2:]).tolist() for c in (classifier, again)]
print(json.dumps({"address": address, "said": said, "classes": again.classes}))
"""


def test_a_classifier_is_pushed_and_fetched_again(hub: Any, few_digits: Path, tmp_path: Path) -> None:
    """In a process of its own: the address of the hub is read once."""
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    classifier.adapt(few_digits, recipe="fast", settings={"steps": 3}, output=Output(tmp_path / "run", report=False))
    environment = environment_for(hub, tmp_path / "home")
    images = [str(path) for path in sorted(few_digits.rglob("*.png"))[:5]]
    command = [sys.executable, "-c", ROUND_TRIP, str(tmp_path / "run"), *images]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["said"][0] == result["said"][1]
    assert result["classes"] == list(DIGITS)
    assert "/me/digits/commit/" in result["address"]
    pushed = {file.name for file in (tmp_path / "hub" / "me" / "digits").iterdir()}
    # Neither data nor predictions nor the report, which shows data.
    assert pushed == {"pouf.json", "weights.safetensors", "postprocessor.safetensors", "README.md"}
    assert ("POST", "/api/repos/create") in hub.asked


def test_what_others_could_not_load_is_not_pushed(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["bad", "good"])
    tune(classifier, Recipe().with_settings({"tuner.name": "layernorm"}).tuner)
    with pytest.raises(InputError, match=r"a folder on this machine.*push with merge=True"):
        classifier.push_to_hub("me/reviews")


def test_a_name_that_is_no_run_says_so_without_a_network() -> None:
    with pytest.raises(InputError, match="no run folder 'me/nothing', and it can't be fetched from the hub"):
        Classifier.from_pretrained("me/nothing")
    for path in ("nothing", "./a/b", "/a/b", "a/b/c"):
        with pytest.raises(InputError, match=r"no run folder '[^']*': expected"):
            Classifier.from_pretrained(path)


@pytest.fixture(scope="module")
def adapted_clip(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Classifier, Path]:
    classifier, run = Classifier.from_pretrained(EMBEDDED, DIGITS), tmp_path_factory.mktemp("clip") / "run"
    classifier = classifier.adapt(few_digits, recipe=FULL, output=Output(run, report=False)).at("last")
    classifier.save_pretrained(run.with_name("last"))
    return classifier, run.with_name("last")


def test_a_tuned_clip_opens_in_the_zero_shot_pipeline(adapted_clip: tuple[Classifier, Path], few_digits: Path) -> None:
    classifier, run = adapted_clip
    paths = sorted(few_digits.rglob("*.png"))[::15]
    pipe = pipeline("zero-shot-image-classification", model=str(run))
    answers = pipe([str(path) for path in paths], candidate_labels=list(DIGITS), hypothesis_template="a photo of a {}.")
    probabilities = classifier.predict_proba(paths)
    assert [answer[0]["label"] for answer in answers] == classifier.predict(paths)
    assert [answer[0]["score"] for answer in answers] == pytest.approx(probabilities.max(1).values.tolist(), abs=1e-4)
    before = Classifier.from_pretrained(EMBEDDED, DIGITS).predict_proba(paths)
    assert not torch.allclose(before, probabilities, atol=1e-2)


def test_a_tuned_masked_lm_opens_in_fill_mask(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(masked_lm(tmp_path / "model", "roberta"), ["bad", "good"], **CLOZE)
    train(classifier, Texts(REVIEWS), FULL.with_settings(snapshots=0))
    classifier.save_pretrained(tmp_path / "run")
    pipe = pipeline("fill-mask", model=str(tmp_path / "run"), targets=[" terrible", " great"])
    for text in REVIEWS:
        best = pipe(f"{text} It was{pipe.tokenizer.mask_token}.")[0]
        assert best["token_str"].strip() == {"bad": "terrible", "good": "great"}[classifier.predict(text)]


def test_a_tuned_sentence_encoder_opens_in_sentence_transformers(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["bad", "good"])
    before = classifier.features(REVIEWS)
    train(classifier, Texts(REVIEWS), FULL.with_settings(snapshots=0))
    classifier.save_pretrained(tmp_path / "run")
    vectors = torch.from_numpy(SentenceTransformer(str(tmp_path / "run"), device="cpu").encode(REVIEWS))
    assert torch.allclose(F.normalize(vectors, dim=1), classifier.features(REVIEWS), atol=1e-5)
    assert not torch.allclose(before, classifier.features(REVIEWS), atol=1e-3)


def test_the_card_of_a_run_tells_what_it_is(adapted_clip: tuple[Classifier, Path], few_digits: Path) -> None:
    _, run = adapted_clip
    card = ModelCard.load(run / "README.md")
    assert card.data.library_name == "pouf" and card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "zero-shot-image-classification"
    n = len(list(few_digits.rglob("*.png")))
    verdict = json.loads((run.with_name("run") / "details/verdict.json").read_text())
    for line in (
        "10 classes from pouf/tiny-clip",
        f"- data: {n} inputs, without labels", "- seven\n", "`a photo of a {}.`", verdict["message"], "lr = 0.001",
        "## Limits", "Licence: apache-2.0", "{{POUF}: Prompt-Oriented", "tuner `full`", "on which both agree",
        "Hardware and emissions\n\nNot measured: [to be filled in]",
    ):  # fmt: skip
        assert line in card.text, line
    assert str(few_digits) not in card.content, "where the data lie is nobody's business"


def test_a_card_that_was_edited_stays(adapted_clip: tuple[Classifier, Path], tmp_path: Path) -> None:
    _, run = adapted_clip
    classifier = Classifier.from_pretrained(run)
    assert classifier.model_card is not None
    classifier.model_card = classifier.model_card.replace("Not measured: [to be filled in]", "One laptop, an hour.")
    classifier.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text((tmp_path / "README.md").read_text() + "\nMore.\n")
    classifier = Classifier.from_pretrained(tmp_path)  # no part that was damaged
    assert "One laptop" in str(classifier.model_card) and str(classifier.model_card).endswith("More.\n")


def test_classifiers_that_were_not_adapted_and_vectors_have_cards_too(tmp_path: Path) -> None:
    features, prototypes = groups()
    vectors = Classifier.from_vectors(prototypes, [f"class {i}" for i in range(6)])
    vectors.save_pretrained(tmp_path / "before")
    text = (tmp_path / "before" / "README.md").read_text()
    assert "- class 3\n" in text and "## Verdict" not in text
    vectors.adapt(features, settings={"steps": 2}, output=Output(tmp_path / "run", report=False))
    assert "- data: 120 inputs" in (tmp_path / "run" / "model/README.md").read_text()


@pytest.mark.parametrize(
    ("readme", "licence"),
    [("---\nlicense: mit\n---\n", "mit"), ("no metadata", None), ("---\nlicense: [\n---\n", None), (None, None)],
)
def test_the_licence_is_what_the_base_models_own_card_says(
    tmp_path: Path, readme: str | None, licence: str | None
) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    assert base_licence(str(tmp_path)) == licence


def test_a_dataset_of_images_streamed_or_not(few_digits: Path, tiny: Classifier) -> None:
    paths = sorted(few_digits.rglob("*.png"))
    rows = {"label": [0] * len(paths), "image": [Image.open(path).convert("RGB") for path in paths]}
    dataset = Dataset.from_dict(rows)
    assert tiny.predict(dataset) == tiny.predict(paths)
    streamed = dataset.to_iterable_dataset()
    assert isinstance(tiny.data(streamed), Stream)
    for given in (streamed, streamed.map(lambda row: row)):  # one that knows its columns, and one that does not
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        result = classifier.adapt(given, recipe=FULL)
        assert len(result.history) == 2
    with pytest.raises(InputError, match=r"take\(n\)"):
        tiny.predict(streamed)


@pytest.mark.parametrize("embedded", [True, False], ids=["bytes", "paths"])
def test_a_dataset_whose_images_are_not_decoded(embedded: bool, few_digits: Path, tiny: Classifier) -> None:
    paths = sorted(few_digits.rglob("*.png"))[:12]
    rows = [{"bytes": path.read_bytes(), "path": None} if embedded else str(path) for path in paths]
    dataset = Dataset.from_dict({"image": rows}).cast_column("image", datasets.Image(decode=False))
    assert set(dataset[0]["image"]) == {"bytes", "path"}
    assert tiny.predict(dataset) == tiny.predict(paths)
    stream = tiny.data(dataset.to_iterable_dataset())
    assert isinstance(stream, Stream) and tiny.predict(stream.take(12)) == tiny.predict(paths)
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    assert len(classifier.adapt(stream, recipe=FULL).history) == 2


def test_an_undecoded_image_that_is_none_is_skipped(few_digits: Path, tiny: Classifier) -> None:
    good = sorted(few_digits.rglob("*.png"))[0].read_bytes()
    given = [{"bytes": content, "path": None} for content in (good, b"no image", None, good)]
    data = tiny.data(given)
    predictions = tiny.infer(data)
    assert predictions.indices == [0, 3] and list(predictions.skipped) == [1, 2]


@pytest.mark.parametrize("form", ["torch", "numpy", "transform"])
def test_a_dataset_in_the_format_of_another_library(form: str, few_digits: Path, tiny: Classifier) -> None:
    """As it is left behind by a training loop of one's own."""
    pictures = [Image.open(path).convert("RGB") for path in sorted(few_digits.rglob("*.png"))[:12]]
    dataset = Dataset.from_dict({"image": pictures})
    if form == "transform":
        given = dataset.with_transform(lambda rows: {"image": [255 - np.asarray(each) for each in rows["image"]]})
        assert tiny.predict(given) == tiny.predict([255 - np.asarray(each) for each in pictures])
        return
    assert tiny.predict(dataset.with_format(form)) == tiny.predict(pictures)
    streamed = tiny.data(dataset.to_iterable_dataset().with_format(form))
    assert isinstance(next(iter(streamed.open())), Image.Image)


def test_a_table_of_arrow(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path), ["bad", "good"])
    table = Dataset.from_dict({"text": REVIEWS, "label": [0] * len(REVIEWS)}).with_format("arrow")[:]
    assert classifier.predict(table) == classifier.predict(REVIEWS)


def test_a_streamed_dataset_of_pairs(tmp_path: Path) -> None:
    words = {"templates": ["{text_a}? [MASK], {text_b}"], "words": ["no", "yes"]}
    classifier = Classifier.from_pretrained(masked_lm(tmp_path / "model", "roberta"), ["no", "yes"], **words)
    pairs = Dataset.from_dict({"text_a": REVIEWS, "text_b": REVIEWS[::-1]})
    assert next(iter(classifier.data(pairs.to_iterable_dataset()).open())) == (REVIEWS[0], REVIEWS[-1])
    with pytest.raises(InputError, match="has no column text_a and text_b"):
        classifier.data(Dataset.from_dict({"text": REVIEWS}).to_iterable_dataset())


def test_a_dataset_of_images_needs_no_memory_for_all(few_digits: Path) -> None:
    dataset = Dataset.from_dict({"image": [Image.open(path) for path in sorted(few_digits.rglob("*.png"))[:20]]})
    assert isinstance(Classifier.from_pretrained(EMBEDDED, DIGITS).data(dataset), Images)
