"""One contract: Python and the command line take the same decisions and end at the same predictions, bit for bit."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runner import pouf, report_text
from helpers import REVIEWS, Steps, groups
from PIL import Image
from small_models import masked_lm, sentence_encoder

from pouf import EMBEDDED, METHODS, Adaptation, Classifier, Images, InputError, Recipe, Shots, Texts, Vectors
from pouf.data.base import Subset
from pouf.demo import DIGITS
from pouf.runs.folder import Run
from pouf.validation.checkpoints import ZERO_SHOT

CLOZE = "{text} it was [MASK]."


def build(kind: str, folder: Path, few_digits: Path) -> tuple[Classifier, Path, list[object]]:
    """A classifier, a file or folder of data for it, and the options that describe both on the command line."""
    if kind == "image":
        options = ["--model", EMBEDDED, "--images", few_digits, "--classes", ",".join(DIGITS)]
        return Classifier.from_pretrained(EMBEDDED, DIGITS), few_digits, options
    if kind == "vector":
        features, prototypes = groups()
        np.savez(folder / "f.npz", features=features.numpy())
        np.savez(folder / "p.npz", prototypes=prototypes.numpy(), names=np.array(list("abcdef")))
        options = ["--features", folder / "f.npz", "--prototypes", folder / "p.npz"]
        return Classifier.from_vectors(folder / "p.npz"), folder / "f.npz", options
    (folder / "texts.txt").write_text("\n".join(f"{text} {i}" for i, text in enumerate(REVIEWS * 4)) + "\n")
    classes = ["bad", "good"]
    usual = ["--texts", folder / "texts.txt", "--classes", ",".join(classes)]
    if kind == "text":
        model = sentence_encoder(folder / "encoder")
        return Classifier.from_pretrained(model, classes), folder / "texts.txt", ["--model", model, *usual]
    model = masked_lm(folder / "lm", "roberta")
    options = ["--model", model, *usual, "--template", CLOZE]
    return Classifier.from_pretrained(model, classes, [CLOZE]), folder / "texts.txt", options


KINDS = ("image", "text", "cloze", "vector")
# Learning rate and lambda, at which nothing survives, and such that do no harm.
DESTROYED = {"image": (10.0, 10.0), "text": (0.1, 0.0), "cloze": (0.03, 10.0), "vector": (1.0, 10.0)}
GENTLE = {"image": (1e-2, 0.3), "text": (1e-6, 3.0), "cloze": (1e-6, 0.6), "vector": (1e-3, 0.3)}


@pytest.mark.parametrize("fate", ["destroyed", "gentle"])
@pytest.mark.parametrize("kind", KINDS)
def test_python_and_command_line_predict_the_same_bit_for_bit(
    kind: str, fate: str, few_digits: Path, tmp_path: Path
) -> None:
    classifier, data, options = build(kind, tmp_path, few_digits)
    zero_shot = classifier.predict_proba(data)
    lr, information = (DESTROYED if fate == "destroyed" else GENTLE)[kind]
    steps = 16 if fate == "destroyed" else 3
    result = classifier.adapt(
        data,
        refine=False,
        settings={
            "optimisation.lr": lr, "steps": steps, "batch_size": 24, "snapshots": 3, "augment": "none",
            "objective.information": information,
        },
    )  # fmt: skip
    classifier = result.classifier
    (tmp_path / "mine.toml").write_text("snapshots = 3\n")
    said = pouf(
        "adapt", *options, "--recipe", tmp_path / "mine.toml", "--lr", lr, "--steps", steps, "--batch-size", 24,
        "--lambda", information, "--augment", "none", "--no-refine", "--out", "run", "--no-report", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    there = Classifier.from_pretrained(tmp_path / "run")
    assert json.loads(said.stdout)["verdict"] == str(result.verdict) == str(Run(tmp_path / "run").verdict)
    assert torch.equal(classifier.predict_proba(data), there.predict_proba(data))
    if fate == "destroyed":
        assert result.verdict.advised == "zero-shot" and "Do not trust" in said.stderr
        assert torch.equal(classifier.predict_proba(data), zero_shot)
        pouf("predict", "run", data, "--out", "p.csv", "--quiet", cwd=tmp_path)
        with (tmp_path / "p.csv").open() as stream:
            assert [row["class"] for row in csv.DictReader(stream)] == classifier.predict(data)
        classifier = result.at("last")
        assert not torch.allclose(classifier.predict_proba(data), zero_shot, atol=1e-3), "it takes a call that says so"
        assert torch.equal(
            Classifier.from_pretrained(tmp_path / "run", use="last").predict_proba(data), classifier.predict_proba(data)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_one_default_per_kind_behind_both_doors(kind: str, few_digits: Path, tmp_path: Path) -> None:
    classifier, data, options = build(kind, tmp_path, few_digits)
    steps = Steps()
    settings = {"steps": 1, "snapshots": 0}
    result = classifier.adapt(data, settings=settings, callbacks=[steps])
    classifier = result.classifier

    def fitted(recipe: Recipe) -> Recipe:
        recipe = recipe.with_settings(settings)
        if len(classifier.classes) > recipe.keep_shares_max_classes:
            return recipe
        rate = recipe.optimisation.lr * recipe.keep_shares_lr_factor
        return recipe.with_settings({"postprocess": "shares", "optimisation.lr": rate, "keep_shares_lr_factor": 1.0})

    on_cpu = Recipe.preset("light", kind) if kind == "cloze" else Recipe.default(kind)
    expected = fitted(on_cpu)
    assert result.recipe == expected
    pouf("adapt", *options, "--steps", 1, "--out", "run", "--no-report", "--quiet", cwd=tmp_path)
    written = Recipe.load(tmp_path / "run" / "details/recipe.toml")
    assert written == expected.with_settings(snapshots=4)
    assert steps.ended == [result] and len(steps.steps) == 1
    (tmp_path / "mine.toml").write_text("steps = 1\n")
    pouf("adapt", *options, "--recipe", "mine.toml", "--out", "two", "--no-report", "--quiet", cwd=tmp_path)
    from_file = Recipe.load(tmp_path / "two" / "details/recipe.toml")
    assert from_file == fitted(Recipe.default(kind)).with_settings(snapshots=4), "what a file leaves out is the kind's"


def test_a_run_is_all_there_after_one_call(few_digits: Path, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    recipe = Recipe.load("demo").with_settings(steps=8, snapshots=4, batch_size=48)
    result = classifier.adapt(few_digits, recipe=recipe, output=tmp_path / "run", seed=3)
    classifier = result.classifier
    assert isinstance(result, Adaptation) and result.recipe.seed == 3
    assert result.files == {name: tmp_path / "run" / file for name, file in
                            (("run", ""), ("predictions", "predictions.csv"), ("report", "report.html"))}  # fmt: skip
    with (tmp_path / "run" / "predictions.csv").open() as stream:
        assert [row["class"] for row in csv.DictReader(stream)] == classifier.predict(few_digits)
    assert str(result.verdict) in report_text(tmp_path / "run" / "report.html")
    for use in ("last", "chosen", "zero-shot", "advised"):
        classifier = result.at(use)
        loaded = Classifier.from_pretrained(tmp_path / "run", use=use)
        assert torch.equal(loaded.predict_proba(few_digits), classifier.predict_proba(few_digits)), use
    assert not list((tmp_path / "run").rglob("*.partial"))
    assert {each.name for each in (tmp_path / "run").iterdir() if not each.name.startswith(".weights")} == {
        "model", "details", "predictions.csv", "report.html"
    }  # fmt: skip
    with pytest.raises(InputError, match="already exists"):
        classifier.adapt(few_digits, output=tmp_path / "run")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_is_reached_by_name(method: str, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(masked_lm(tmp_path / "lm", "bert"), ["bad", "good"], [CLOZE])
    shots = Shots(Texts(REVIEWS[:6]), torch.eye(2)[[1, 1, 1, 0, 0, 0]])
    given = shots if METHODS[method].needs_shots else None
    settings = {} if METHODS[method].recipe("cloze").steps == 0 else {"steps": 2, "batch_size": 4}
    result = classifier.adapt(REVIEWS, method=method, shots=given, settings=settings)
    classifier = result.classifier
    assert result.method == method and classifier.predict_proba(REVIEWS).shape == (8, 2)
    if given is None and method not in ("pouf", "zero-shot"):
        return
    with pytest.raises(InputError, match=r"unknown method 'pouff'.*Did you mean 'pouf'"):
        classifier.adapt(REVIEWS, method="pouff")


def test_shots_prior_refine_and_demonstrations_are_decided_behind_the_call(tmp_path: Path) -> None:
    (tmp_path / "shots.csv").write_text("text,label\n" + "".join(f"{t},{'good' if i < 3 else 'bad'}\n"
                                                              for i, t in enumerate(REVIEWS[:6])))  # fmt: skip
    model = masked_lm(tmp_path / "lm", "bert")
    classifier = Classifier.from_pretrained(model, ["bad", "good"], [CLOZE])
    result = classifier.adapt(
        REVIEWS, shots=tmp_path / "shots.csv", demonstrations=True, prior=[0.4, 0.6], refine=True,
        settings={"steps": 2, "batch_size": 4, "snapshots": 1},
    )  # fmt: skip
    classifier = result.classifier
    assert result.recipe.objective.labels == 1.0 and result.recipe.postprocess == "clusters"
    assert result.history[0].terms.keys() == {"transport", "information", "labels"}
    assert result.target_shares.tolist() == pytest.approx([0.4, 0.6])
    classifier = result.at("last")
    assert classifier.demonstrations is not None and classifier.postprocessor is not None
    classifier = result.at("zero-shot")
    assert classifier.demonstrations is None, "they have labels"
    probabilities = result.checkpoints.sample.predict(classifier, changed=True).probabilities
    assert torch.allclose(probabilities, result.checkpoints.predictions[ZERO_SHOT].probabilities, atol=1e-6)
    for wrong, words in (
        ({"demonstrations": True}, "give shots"),
        ({"prior": [0.7, 0.7]}, "sum to 1.4"),
        ({"prior": "lots"}, "objective.prior: 'lots' is not one of"),
        ({"settings": {"stps": 2}}, "stps: unknown setting.*Did you mean 'steps'"),
        ({"method": "em", "settings": {"steps": 3}}, "method 'em' trains nothing"),
    ):
        with pytest.raises(InputError, match=words):
            Classifier.from_pretrained(model, ["bad", "good"], [CLOZE]).adapt(REVIEWS, **wrong)
    with pytest.raises(InputError, match="nothing to learn from"):
        Classifier.from_pretrained(model, ["bad", "good"], [CLOZE]).adapt()


def test_a_text_is_a_text_and_a_path_is_a_file(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["bad", "good"])
    (tmp_path / "good.txt").write_text("a good film\na bad book\n")
    assert classifier.predict("a good film") == classifier.predict(["a good film"])[0]
    assert classifier.predict_proba("a good film").shape == (2,)
    assert classifier.predict_log_proba(["a good film"]).exp().sum() == pytest.approx(1)
    assert classifier.predict(tmp_path / "good.txt") == classifier.predict(["a good film", "a bad book"])
    (tmp_path / "Makefile").write_text("all:\n")
    for name in (str(tmp_path / "good.txt"), str(tmp_path / "Makefile"), "nothere.csv", "more/nothere.JSONL"):
        with pytest.raises(InputError, match=re.escape(f"give Path({name!r}), or [{name!r}]")):
            classifier.predict(name)
        assert classifier.predict([name])[0] in ("bad", "good"), "in a list, a text is a text"
    assert classifier.predict("what is in nothere.csv") in ("bad", "good"), "of several words"
    assert classifier.features("a good film").shape == (32,)
    with pytest.raises(InputError, match="one text is nothing to adapt to; a file is given as Path"):
        classifier.adapt(str(tmp_path / "good.txt"))
    pairs = Classifier.from_pretrained(
        masked_lm(tmp_path / "lm", "bert"), ["no", "yes"], ["{text_a}? [MASK], {text_b}"]
    )
    assert pairs.predict(("we loved it", "it was good")) == pairs.predict([("we loved it", "it was good")])[0]


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((8, 8), 200.0), "floats from 0 to 1, not from 200 to 200"),  # all white, if it were cut to 1
        (np.full((8, 8), -1.5, np.float32), "floats from 0 to 1, not from -1.5 to -1.5"),
        (np.full((8, 8), np.nan), "floats from 0 to 1, not from nan to nan"),
        (np.full((8, 8), 300), "integers from 0 to 255, not from 300 to 300"),  # 44, if it were cut to a byte
    ],
)
def test_pixels_out_of_range_are_refused(pixels: np.ndarray, message: str, tiny: Classifier) -> None:
    with pytest.raises(InputError, match=f"pixels must be {message}: scale them"):
        tiny.predict([pixels])


def test_pixels_in_range_of_any_type_are_the_same_picture(tiny: Classifier) -> None:
    black_and_white = np.eye(8, dtype=bool)
    wanted = tiny.predict_proba([(black_and_white * 255).astype(np.uint8)])
    for same in (black_and_white, black_and_white * 255, black_and_white * 1.04, black_and_white.astype(np.float16)):
        assert torch.equal(tiny.predict_proba([same]), wanted)


def test_pictures_paths_arrays_and_generators(pictures: list[Image.Image], tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    expected = classifier.predict_proba(pictures)
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / f"{i:02d}.png")
    one = tmp_path / "00.png"
    arrays = [np.asarray(picture) for picture in pictures]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255 for array in arrays]
    for same in (arrays, tensors, (picture for picture in pictures), tuple(pictures), np.stack(arrays)):
        assert torch.equal(classifier.predict_proba(same), expected)
    for single in (one, str(one), pictures[0], arrays[0], tensors[0]):
        assert torch.allclose(classifier.predict_proba(single), expected[0], atol=1e-6)
        assert classifier.predict(single) == DIGITS[int(expected[0].argmax())]
    assert torch.equal(classifier.predict_proba(tmp_path), expected), "a folder is many"
    with pytest.raises(InputError, match="expected a picture of shape"):
        classifier.predict([np.zeros((2, 3, 4, 5))])


def test_vectors_in_rows_or_alone() -> None:
    features, prototypes = groups()
    classifier = Classifier.from_vectors(prototypes, list("abcdef"))
    expected = classifier.predict(Vectors(features))
    assert classifier.predict(features) == classifier.predict(features.numpy()) == expected
    assert classifier.predict(features[3]) == classifier.predict(features.tolist())[3] == expected[3]


def test_a_dataset_is_samples(pictures: list[Image.Image], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    images = datasets.Dataset.from_dict({"image": pictures, "label": [1] * 12})
    images = images.cast_column("image", datasets.Image())
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    assert torch.equal(classifier.predict_proba(images), classifier.predict_proba(pictures))
    result = classifier.adapt(images, recipe="demo", settings={"steps": 2, "snapshots": 0})
    assert len(result.history) == 2
    texts = datasets.Dataset.from_dict({"sentence": REVIEWS, "label": [0] * 8})
    encoder = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["bad", "good"])
    assert encoder.predict(texts) == encoder.predict(REVIEWS)
    vectors = datasets.Dataset.from_dict({"embedding": groups()[0].tolist()})
    bare = Classifier.from_vectors(groups()[1], list("abcdef"))
    assert bare.predict(vectors) == bare.predict(groups()[0])
    with pytest.raises(InputError, match="no column text or sentence, only: label"):
        encoder.predict(texts.remove_columns("sentence"))
    with pytest.raises(InputError, match="no known end"):
        encoder.predict(texts.to_iterable_dataset())


def test_rows_that_begin_alike_are_trained_in_an_order_of_their_own() -> None:
    """Order plays no part, even where the first numbers of the rows are equal."""
    features, prototypes = groups()
    features[:, :4] = 1.0
    ends = []
    for order in (torch.arange(120), torch.randperm(120, generator=torch.Generator().manual_seed(0))):
        classifier = Classifier.from_vectors(prototypes, list("abcdef"))
        settings = {"steps": 5, "batch_size": 16, "snapshots": 0, "min_class_usage": 0.0}
        classifier = classifier.adapt(Vectors(features[order]), settings=settings).classifier
        ends.append(classifier.prototypes().detach())
    assert torch.equal(*ends)


def test_a_run_that_breaks_off_leaves_what_it_learned(few_digits: Path, tmp_path: Path) -> None:
    class Breaking(Steps):
        def on_step(self, step: object) -> None:
            super().on_step(step)
            if len(self.steps) == 3:
                raise OSError("the disk is full")

        def on_checkpoint(self, step: int, classifier: Classifier) -> None:
            self.trained = classifier

    classifier, watch = Classifier.from_pretrained(EMBEDDED, DIGITS), Breaking()
    before = classifier.predict_proba(few_digits)
    with pytest.raises(OSError, match="disk is full"):
        classifier.adapt(few_digits, recipe="demo", output=tmp_path / "run", callbacks=[watch])
    assert Run(tmp_path / "run").manifest["status"] == "failed"
    loaded = Classifier.from_pretrained(tmp_path / "run").predict_proba(few_digits)
    assert torch.equal(loaded, watch.trained.predict_proba(few_digits)) and not torch.equal(loaded, before)
    assert torch.equal(classifier.predict_proba(few_digits), before)


def test_a_subset_of_one_image_goes_through(few_digits: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    result = classifier.adapt(Subset(Images.from_folder(few_digits), [0]), recipe="demo", settings={"steps": 2})
    assert result.verdict.last == 2
