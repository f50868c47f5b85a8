"""The commands as a user runs them: real files, real processes where it matters, one-line errors."""

import csv
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import typer
from cli_runner import in_a_process, one_line_error, pouf, report_text
from PIL import Image
from small_models import masked_lm, sentence_encoder
from transformers import AutoModelForMaskedLM, CLIPModel

from pouf import EMBEDDED, Classifier, Recipe
from pouf.cli import app
from pouf.cli._options import SPEED_SETTINGS, TRAINING_SETTINGS
from pouf.demo import DIGITS
from pouf.recipe import setting
from pouf.runs.folder import Run

NAMES = ",".join(DIGITS)
IMAGES = ("--images", ".", "--model", EMBEDDED, "--classes", "a,b")


@pytest.fixture(scope="module")
def run(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of full tuning, with two files that are no pictures."""
    folder = tmp_path_factory.mktemp("cli")
    shutil.copytree(few_digits, folder / "images")
    (folder / "images" / "two" / "broken.png").write_bytes(b"no picture")
    (folder / "images" / "empty.jpg").write_bytes(b"")
    result = pouf(
        "adapt", "--model", EMBEDDED, "--images", "images", "--classes", NAMES, "--recipe", "demo", "--steps", 6,
        "--batch-size", 48, "--lr", "1e-2", "--lambda", "0.4", "--seed", 3, "--out", "run", "--json", cwd=folder,
    )  # fmt: skip
    facts = json.loads(result.stdout)
    assert (facts["run"], facts["steps"], facts["n"], facts["skipped"]) == ("run", 6, 152, 2)
    return folder / "run"


def test_the_run_folder_holds_everything(run: Path) -> None:
    recipe = (run / "details/recipe.toml").read_text()
    assert "steps = 6" in recipe and "information = 0.4" in recipe and "seed = 3" in recipe and "lr = 0.01" in recipe
    assert (run / "details/classes.txt").read_text().split() == list(DIGITS)
    steps = [json.loads(line) for line in (run / "details/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0].keys() >= {"loss", "terms", "effective_classes", "lr", "temperature", "seconds"}
    skipped = [json.loads(line)["id"] for line in (run / "details/skipped.jsonl").read_text().splitlines()]
    assert sorted(skipped) == ["empty.jpg", "two/broken.png"]
    manifest = json.loads((run / "details/run.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["versions"].keys() >= {"pouf", "torch", "transformers", "python"}
    assert manifest["model"] == EMBEDDED and "--lambda" in manifest["command"]
    assert manifest["data"]["source"] == str(run.parent / "images")
    CLIPModel.from_pretrained(run / "model")
    assert manifest["method"] == "pouf" and not (run / "unfinished").exists()


def test_a_run_brings_predictions_and_a_report(run: Path, few_digits: Path) -> None:
    with (run / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    advised = Classifier.from_pretrained(run).predict([run.parent / "images" / row["path"] for row in rows])
    assert len(rows) == 150 and [row["class"] for row in rows] == advised
    assert str(Run(run).verdict) in report_text(run / "report.html")


def test_an_alarm_is_heard_even_where_all_else_is_quiet(few_digits: Path, tmp_path: Path) -> None:
    usual = ("adapt", "--model", EMBEDDED, "--images", few_digits, "--classes", NAMES, "--recipe", "demo")
    collapse = ("--steps", 6, "--lr", 0.5, "--no-report", "--out", "run")
    result = pouf(*usual, *collapse, "--quiet", cwd=tmp_path)
    assert "Do not trust the adapted model" in result.stderr and result.stdout == ""
    assert not (tmp_path / "run" / "report.html").exists() and not (tmp_path / "run" / "predictions.csv").exists()
    result = pouf("predict", "run", few_digits, cwd=tmp_path)
    assert "Do not trust" in result.stderr and "by zero-shot" in result.stdout
    result = pouf("predict", "run", few_digits, "--use", "adapted", "--overwrite", cwd=tmp_path)
    assert "Do not trust" not in result.stderr and "by the adapted model" in result.stdout


def test_the_run_can_be_repeated_from_its_folder(run: Path) -> None:
    pouf(
        "adapt", "--model", EMBEDDED, "--images", "images", "--classes", run / "details/classes.txt",
        "--recipe", run / "details/recipe.toml", "--out", "again", "--quiet", "--no-report", cwd=run.parent,
    )  # fmt: skip
    assert (run.parent / "again/model/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()
    assert Recipe.load(run.parent / "again" / "details/recipe.toml") == Recipe.load(run / "details/recipe.toml")


def test_predict_writes_csv_and_jsonl(run: Path) -> None:
    in_a_process("predict", run, "images", "--use", "last", cwd=run.parent)
    pouf("predict", run, "images", "--use", "last", "--out", "out/p.jsonl", "--quiet", cwd=run.parent)
    rows = list(csv.DictReader((run.parent / "predictions.csv").open()))
    lines = [json.loads(line) for line in (run.parent / "out" / "p.jsonl").read_text().splitlines()]
    assert len(rows) == len(lines) == 150
    assert list(rows[0]) == list(lines[0]) == ["path", "class", "probability", "runner_up", "runner_up_probability"]
    assert [row["path"] for row in rows] == sorted(row["path"] for row in rows)
    classifier = Classifier.from_pretrained(run, use="last")
    p = classifier.predict_proba([run.parent / "images" / row["path"] for row in rows])
    for row, line, expected in zip(rows, lines, p, strict=True):
        best = expected.topk(2)
        assert row["class"] == line["class"] == DIGITS[best.indices[0]]
        assert row["runner_up"] == DIGITS[best.indices[1]]
        assert float(row["probability"]) == pytest.approx(best.values[0].item(), abs=1e-5)


def test_shares_are_given_when_predicting_without_training_again(run: Path) -> None:
    def counts(*options: object) -> dict[str, int]:
        pouf("predict", run, "images", "--out", "shares.csv", "--overwrite", "--quiet", *options, cwd=run.parent)
        return pandas.read_csv(run.parent / "shares.csv", dtype=str)["class"].value_counts().to_dict()

    zeros = [0.55, *9 * [0.05]]
    for prior, wanted in (("uniform", 15), (",".join(map(str, zeros)), 82)):
        assert counts("--prior", prior)[DIGITS[0]] == pytest.approx(wanted, abs=5)
    corrected = Classifier.from_pretrained(run, use="zero-shot").with_correction(run.parent / "images")
    found = corrected.infer(corrected.data(run.parent / "images")).log_probabilities.argmax(1).bincount(minlength=10)
    assert counts("--use", "corrected") == {DIGITS[k]: int(n) for k, n in enumerate(found) if n}
    pouf("predict", run, "images", "--prior", "0.5,0.5", cwd=run.parent, code=2)


NO_IMAGE = "not an image, or not in a format that Pillow knows"


def test_predict_says_what_it_skipped(run: Path) -> None:
    facts = json.loads(pouf("predict", run, "images", "--json", "--out", "said.csv", cwd=run.parent).stdout)
    used = Run(run).verdict.advised
    assert facts == {
        "n": 150, "skipped": 2, "used": used, "predictions": "said.csv", "verdict": facts["verdict"],
        "unreadable": [{"id": name, "reason": NO_IMAGE} for name in ("empty.jpg", "two/broken.png")], "absent": [],
    }  # fmt: skip


def test_one_image_is_printed_and_a_table_of_texts_holds_the_texts(run: Path, tmp_path: Path) -> None:
    image = sorted((run.parent / "images" / "two").glob("0*.png"))[0]
    result = pouf("predict", run, image, cwd=tmp_path)
    best = Classifier.from_pretrained(run).predict_proba(image).topk(2)
    names = [DIGITS[k] for k in best.indices]
    assert result.stdout == f"{names[0]}: {best.values[0]:.1%}, then {names[1]}: {best.values[1]:.1%}\n"
    facts = json.loads(pouf("predict", run, image, "--json", cwd=tmp_path).stdout)
    assert [row["class"] for row in facts["predictions"]] == names[:1] and not list(tmp_path.iterdir())
    error = one_line_error(pouf("predict", run, "what a great film", cwd=tmp_path, code=2))
    assert "this model reads images, and 'what a great film' is neither a file nor a folder" in error


def test_texts_come_as_arguments_or_from_standard_input(adapted_texts: Path, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(adapted_texts / "run")
    expected = classifier.predict(["a good film", "bad.", "what"])
    one = pouf("predict", adapted_texts / "run", "a good film", cwd=tmp_path).stdout
    assert one.startswith(f"{expected[0]}: ") and one.count("\n") == 1
    two = pouf("predict", adapted_texts / "run", "--text", "a good film", "--text", "bad.", cwd=tmp_path).stdout
    assert [line.split(":")[0] for line in two.splitlines()] == expected[:2]
    assert [line.split("  ")[1] for line in two.splitlines()] == ["a good film", "bad."]
    lines = "a good film\n\nbad.\nwhat\n"
    facts = json.loads(pouf("predict", adapted_texts / "run", "-", "--json", cwd=tmp_path, stdin=lines).stdout)
    assert [(row["text"], row["class"]) for row in facts["predictions"]] == list(
        zip(["a good film", "bad.", "what"], expected, strict=True)
    )
    assert not list(tmp_path.iterdir())
    for wrong, words in (((), "give either INPUT or --text"), (("no.csv",), "no.csv"), (("",), "it is empty")):
        assert words in one_line_error(pouf("predict", adapted_texts / "run", *wrong, cwd=tmp_path, code=2))


def test_predictions_name_the_cautions_of_a_run_in_one_line(adapted_texts: Path, tmp_path: Path) -> None:
    verdict = Run(adapted_texts / "run").verdict
    reminder = pouf("predict", adapted_texts / "run", "a good film", cwd=tmp_path, columns=400).stderr
    assert verdict.level == "caution" and reminder.count("\n") == 1 and str(verdict) not in reminder
    assert all(each.name in reminder for each in verdict.cautions) and "report" in reminder


def test_predictions_replace_no_file_unless_told(adapted_texts: Path, tmp_path: Path) -> None:
    usual = ("predict", adapted_texts / "run", adapted_texts / "texts.csv")
    assert "40 predictions in predictions.csv" in pouf(*usual, cwd=tmp_path).stdout
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert list(rows[0])[:3] == ["row", "review", "class"] and "film about the" in rows[0]["review"]
    error = one_line_error(pouf(*usual, cwd=tmp_path, code=2))
    assert "'predictions.csv' already exists: give --overwrite to replace it, or choose another file" in error
    pouf(*usual, "--overwrite", "--quiet", cwd=tmp_path)
    facts = json.loads(pouf(*usual, "--json", cwd=tmp_path).stdout)
    assert [row["class"] for row in facts["predictions"]] == [row["class"] for row in rows]


def test_evaluate_compares_four_classifiers(run: Path, few_digits: Path) -> None:
    facts = json.loads(pouf("evaluate", run, few_digits, "--json", cwd=run.parent).stdout)
    assert facts.keys() >= {"n", "zero_shot", "prior_corrected", "last", "advised", "per_class"}
    assert facts["n"] == 150 and facts["per_class"].keys() == set(DIGITS)
    assert all(0 <= facts[name] <= 1 for name in ("zero_shot", "prior_corrected", "last", "advised"))
    guesses = Classifier.from_pretrained(run, use="last").predict(sorted(few_digits.rglob("*.png")))
    truth = [path.parent.name for path in sorted(few_digits.rglob("*.png"))]
    assert facts["last"] == pytest.approx(sum(a == b for a, b in zip(guesses, truth, strict=True)) / 150)
    table = pouf("evaluate", run, few_digits, cwd=run.parent).stdout
    assert all(f" {heading}" in table for heading in ("zero-shot", "corrected", "last step", "advised", "precision"))


@pytest.mark.parametrize("tune", ["prompt", "layernorm"])
def test_a_run_that_keeps_its_base_goes_all_the_way(few_digits: Path, tmp_path: Path, tune: str) -> None:
    result = pouf(
        "adapt", "--model", EMBEDDED, "--images", few_digits, "--classes", NAMES, "--recipe", "demo-prompt",
        "--tune", tune, "--steps", 3, "--optimizer", "adamw", "--template", "a {}.", "--template", "the {}.",
        "--no-report", cwd=tmp_path,
    )  # fmt: skip
    assert "trainable " in result.stderr and "150 unlabelled images, 10 classes" in result.stderr
    assert "pouf predict pouf-run" in result.stdout
    assert not (tmp_path / "pouf-run" / "model" / "model.safetensors").exists()
    facts = json.loads(pouf("evaluate", "pouf-run", few_digits, "--json", cwd=tmp_path).stdout)
    assert facts["n"] == 150


@pytest.fixture(scope="module")
def adapted_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 40 texts, in a column of its own."""
    folder = tmp_path_factory.mktemp("texts")
    model = sentence_encoder(folder / "model")
    rows = [f"{'good' if i % 2 else 'bad'} film about the {'sea' if i % 3 else 'air'}" for i in range(40)]
    (folder / "texts.csv").write_text("review\n" + "\n".join(rows) + "\n")
    lines = [{"text": row, "label": row.split()[0]} for row in rows]
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pouf(
        "adapt", "--model", model, "--texts", "texts.csv", "--text-column", "review", "--classes", "good,bad",
        "--template", "it is a {} film", "--steps", 4, "--batch-size", 16, "--out", "run", cwd=folder,
    )  # fmt: skip
    return folder


def test_texts_go_all_the_way(adapted_texts: Path) -> None:
    tmp_path = adapted_texts
    rows = (tmp_path / "texts.csv").read_text().splitlines()[1:]
    facts = json.loads(pouf("evaluate", "run", "labelled.jsonl", "--json", cwd=tmp_path).stdout)
    assert facts["n"] == 40 and set(facts["per_class"]) == {"good", "bad"}
    pouf("predict", "run", "texts.csv", "--text-column", "review", "--out", "p.csv", cwd=tmp_path)
    pouf("review", "run", "--n", 6, "--quiet", cwd=tmp_path)
    with (tmp_path / "run" / "review.csv").open() as stream:
        assert {row["text"] for row in csv.DictReader(stream)} <= set(rows), "the run knows its own file and column"
    predictions = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [row["row"] for row in predictions] == [str(i) for i in range(40)]


def test_descriptions_apart_from_the_names_go_all_the_way(tmp_path: Path) -> None:
    model = sentence_encoder(tmp_path / "model")
    rows = [f"{'good' if i % 2 else 'bad'} film about the {'sea' if i % 3 else 'air'}" for i in range(24)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    lines = [{"text": row, "label": "Liked" if "good" in row else "disliked"} for row in rows]
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "classes.toml").write_text('liked = ["a great film", "it is good"]\ndisliked = "it is bad"\n')
    pouf(
        "adapt", "--model", model, "--texts", "texts.jsonl", "--classes", "classes.toml", "--steps", 2,
        "--batch-size", 16, "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    assert json.loads((tmp_path / "run" / "details/classes.json").read_text())["disliked"] == ["it is bad"]
    for use in ("advised", "zero-shot"):
        loaded = Classifier.from_pretrained(tmp_path / "run", use=use)
        assert loaded.prompts() == [["a great film", "it is good"], ["it is bad"]]
    facts = json.loads(pouf("evaluate", "run", "labelled.jsonl", "--json", cwd=tmp_path).stdout)
    assert facts["n"] == 24 and facts["per_class"].keys() == {"liked", "disliked"}
    pouf("predict", "run", "texts.jsonl", cwd=tmp_path)
    assert {row["class"] for row in csv.DictReader((tmp_path / "predictions.csv").open())} <= {"liked", "disliked"}
    pouf("review", "run", "--n", 4, cwd=tmp_path)
    questions = json.loads((tmp_path / "run" / "details/review.json").read_text())["questions"]
    assert {question["adapted"] for question in questions} <= {"liked", "disliked"}
    assert "disliked" in (tmp_path / "run" / "report.html").read_text()
    pouf(
        "adapt", "--model", model, "--texts", "texts.jsonl", "--classes", "run/details/classes.json", "--recipe",
        "run/details/recipe.toml", "--out", "again", "--no-report", cwd=tmp_path,
    )  # fmt: skip
    assert Classifier.from_pretrained(tmp_path / "again").descriptions == loaded.descriptions


def _last(run: Path) -> Path:
    """The folder of the last step: the run itself, unless it advises something else."""
    return (
        run / "model"
        if "last" in Run(run).card.stands_for
        else next(
            folder
            for folder in (run / "details" / "chosen", run / "details" / "last")
            if folder.is_dir() and "last" in Run(folder).card.stands_for
        )
    )


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A masked language model and texts for it, with and without labels."""
    masked_lm(tmp_path / "lm", "roberta")
    good, bad = ["we loved the food", "very good film", "the book is great"], ["we hated it", "bad service", "terrible"]
    rows = [f"{text},{label}" for texts, label in ((good, "Positive"), (bad, "negative")) for text in texts]
    (tmp_path / "reviews.csv").write_text("review\n" + "\n".join([*good, *bad, '""', "the film was so so"]) + "\n")
    (tmp_path / "labelled.csv").write_text("review,label\n" + "\n".join(rows) + "\n")
    return tmp_path


CLOZE = ("--template", "{text} it was [MASK].", "--words", "terrible|bad,great", "--classes", "negative,positive")


def test_a_masked_language_model_goes_all_the_way(reviews: Path) -> None:
    facts = json.loads(
        pouf(
            "adapt", "--model", "lm", "--texts", "reviews.csv", "--text-column", "review", *CLOZE,
            "--shots", "labelled.csv", "--demonstrations", "--steps", 4, "--batch-size", 4, "--json", cwd=reviews,
        ).stdout
    )  # fmt: skip
    assert (facts["n"], facts["skipped"], facts["steps"]) == (8 + 6, 1, 4)
    steps = [json.loads(line) for line in (reviews / "pouf-run" / "details/metrics.jsonl").read_text().splitlines()]
    assert steps[0]["terms"].keys() == {"transport", "information", "labels"}
    manifest = json.loads((reviews / "pouf-run" / "details/run.json").read_text())
    assert manifest["shots"]["n"] == 6 and manifest["shots"]["source"] == str(reviews / "labelled.csv")
    AutoModelForMaskedLM.from_pretrained(_last(reviews / "pouf-run"))
    pouf("predict", "pouf-run", "reviews.csv", "--text-column", "review", cwd=reviews)
    rows = list(csv.DictReader((reviews / "predictions.csv").open()))
    assert [row["row"] for row in rows] == ["0", "1", "2", "3", "4", "5", "7"]
    classifier = Classifier.from_pretrained(reviews / "pouf-run")
    assert [rows[0]["class"], rows[6]["class"]] == classifier.predict(["we loved the food", "the film was so so"])
    scored = pouf("evaluate", "pouf-run", "labelled.csv", "--text-column", "review", "--json", cwd=reviews).stdout
    assert json.loads(scored)["n"] == 6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--words", "terribly,great"), "label word 'terribly' is"),
        (("--words", "great"), "1 label words for 2 classes"),
        (("--classes", "words.json"), "the class descriptions already give the words"),
        (("--template", "{text} it was [MASK] [MASK]."), "2 masks, expected one"),
        (("--text-column", "review,other"), "names 2 columns, expected one column"),
        (("--demonstrations",), "demonstrations are shots in a template: give shots"),
        (("--shots", "nothing.csv"), "no such file or folder: 'nothing.csv'"),
    ],
)
def test_bad_words_templates_and_shots_are_one_line_each(reviews: Path, changed: tuple[str, ...], message: str) -> None:
    (reviews / "words.json").write_text('{"negative": ["terrible", "bad"], "positive": "great"}')
    usual = ("--model", "lm", "--texts", "reviews.csv", "--text-column", "review", *CLOZE)
    if changed[0] == "--template":  # the only option that repeats instead of replacing
        usual = tuple(changed[1] if value == CLOZE[1] else value for value in usual)
    error = one_line_error(pouf("adapt", *usual, *(() if changed[0] == "--template" else changed), cwd=reviews, code=2))
    assert message in error
    assert not (reviews / "pouf-run").exists()


ERRORS = {
    "empty folder": (["--images", "empty"], "no images in 'empty': expected .jpg"),
    "missing folder": (["--images", "nowhere"], "no image folder 'nowhere'"),
    "missing class file": (["--classes", "names.txt"], "no such file: 'names.txt'"),
    "duplicate classes": (["--classes", "cat,dog,Cat"], "duplicate class names: cat"),
    "one class": (["--classes", "cat,"], "at least 2"),
    "template without slot": (["--template", "a photo"], "template 'a photo' has 0 slots"),
    "unknown model": (["--model", "nobody/nothing"], "can't load model 'nobody/nothing'"),
    "missing model folder": (["--model", "./nothing"], "no model folder './nothing'"),
    "run folder exists": (
        ["--out", "full"],
        "run folder 'full' already exists: give --resume to continue the run there, --overwrite to replace it",
    ),
    "unknown recipe": (["--recipe", "none"], "no recipe 'none'"),
    "unknown tuner": (["--tune", "lots"], "can't tune 'lots' of images: choose one of full, prompt, layernorm, lora"),
    "a tuner of vectors": (["--tune", "map"], "can't tune 'map' of images"),
    "fewer than no steps": (["--steps", "-3"], "steps: should be greater than or equal to 0, not -3"),
    "texts for an image model": (["--images", "", "--texts", "texts.csv"], "this model reads images, but the data are"),
    "unknown optimizer": (["--optimizer", "magic"], "optimisation.name: 'magic' is not one of"),
    "texts and images": (["--texts", "texts.csv"], "give only one of --images and --texts"),
    "a setting without a value": (["--set", "steps"], "--set 'steps': expected name=value, as steps=50"),
    "an unknown setting": (["--set", "optimisation.momentun=0.8"], "Did you mean 'momentum'?"),
    "unknown device": (["--device", "abacus"], "can't use device 'abacus': give cpu, cuda or mps"),
}


@pytest.mark.parametrize("case", sorted(ERRORS))
def test_bad_input_is_one_line_with_a_remedy_and_exit_code_2(case: str, few_digits: Path, tmp_path: Path) -> None:
    options, words = ERRORS[case]
    (tmp_path / "empty").mkdir()
    (tmp_path / "full" / "details").mkdir(parents=True)
    (tmp_path / "full" / "details/run.json").write_text("{}")
    given = {"--model": EMBEDDED, "--images": few_digits, "--classes": NAMES, "--out": "run"}
    (tmp_path / "texts.csv").write_text("text\na\nb\n")
    given |= dict(zip(options[::2], options[1::2], strict=True))
    given = {option: value for option, value in given.items() if value != ""}
    result = pouf("adapt", *(part for pair in given.items() for part in pair), cwd=tmp_path, code=2)
    assert words in one_line_error(result)
    assert not (tmp_path / "run").exists(), "a failed start leaves nothing behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "nowhere", "images"], "no run folder 'nowhere'"),
        (["predict", ".", "images"], "is not a finished run"),
        (["predict", "nowhere", "images", "--out", "p.xlsx"], "the name must end in .csv or .jsonl or .parquet"),
        (["evaluate", "nowhere", "images"], "no run folder 'nowhere'"),
        (["demo", "--tune", "lots"], "unknown --tune 'lots': choose one of full, prompt"),
        (["adapt"], "nothing to learn from: give a folder of images"),
        (["predict"], "Missing argument"),
        (["adapt", ".", "--out", ""], "Invalid value for '--out': it is empty"),
        (["predict", "nowhere", "images", "--cache="], "Invalid value for '--cache': it is empty"),
        (["report", ""], "Invalid value for 'RUN': it is empty"),
        (["frobnicate"], "No such command"),
    ],
)
def test_other_mistakes_are_one_line_too(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert words in one_line_error(pouf(*arguments, cwd=tmp_path, code=2))


def test_labels_that_are_no_class_are_said(run: Path, tmp_path: Path, few_digits: Path) -> None:
    shutil.copytree(few_digits / "two", tmp_path / "deux")
    result = in_a_process("evaluate", run, tmp_path, cwd=tmp_path, code=2)
    assert "no class, such as 'deux'" in one_line_error(result)


def test_a_run_that_diverges_keeps_its_last_good_weights(few_digits: Path, tmp_path: Path) -> None:
    result = pouf(
        "adapt", "--model", EMBEDDED, "--images", few_digits, "--classes", NAMES, "--recipe", "demo", "--lr", "1e9",
        "--steps", 30, "--out", "run", "--quiet", cwd=tmp_path, code=1,
    )  # fmt: skip
    assert "is not a finite number" in one_line_error(result)
    manifest = json.loads((tmp_path / "run" / "details/run.json").read_text())
    assert manifest["status"] == "diverged"
    last = Classifier.from_pretrained(tmp_path / "run", use="last").predict_proba(few_digits)
    assert last.isfinite().all()
    said = pouf("predict", "run", few_digits, "--quiet", cwd=tmp_path)
    assert "Zero-shot is used instead. (--use adapted overrides.)" in said.stderr
    pouf("report", "run", "--quiet", cwd=tmp_path)
    assert 'class="verdict alarm"' in (tmp_path / "run" / "report.html").read_text()


def interrupted(arguments: list[str], cwd: Path, ready, seconds: float = 0) -> subprocess.CompletedProcess[str]:
    """A real process that gets Ctrl-C once it is ready and has gone on for some seconds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pouf", *arguments],
        cwd=cwd,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background makes its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while not ready():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, result = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, "", result)


def test_an_interrupted_run_keeps_what_it_learned(few_digits: Path, tmp_path: Path) -> None:
    options = ["--model", EMBEDDED, "--images", str(few_digits), "--classes", NAMES, "--recipe", "demo", "--out", "run"]
    metrics = tmp_path / "run" / "unfinished/details/metrics.jsonl"
    result = interrupted(
        ["adapt", *options, "--steps", "100000", "--quiet"],
        tmp_path,
        lambda: metrics.is_file() and metrics.read_text().count("\n") > 2,
    )
    assert result.returncode == 130
    assert result.stderr.strip().startswith("error: interrupted by SIGINT; --resume continues from the last step")
    assert json.loads((tmp_path / "run" / "details/run.json").read_text())["status"] == "interrupted"
    assert len(Classifier.from_pretrained(tmp_path / "run").predict(few_digits)) == 150
    assert "not come to its end (interrupted)" in pouf("predict", "run", few_digits, "--quiet", cwd=tmp_path).stderr


def test_help_lists_what_users_need_first_and_every_command_helps(tmp_path: Path) -> None:
    help_text = in_a_process("--help", cwd=tmp_path).stdout
    commands = [
        "demo", "adapt", "predict", "review", "report", "evaluate", "names", "search", "distil", "serve", "export",
        "figures", "bench",
    ]  # fmt: skip
    listed = [line.split()[1] for line in help_text.splitlines() if line.startswith("│ ") and line[2] != " "]
    assert [word for word in listed if not word.startswith("-")] == commands
    adapt, search = (pouf(command, "--help-all", cwd=tmp_path).stdout for command in ("adapt", "search"))
    options = _options_in(adapt)
    assert options >= {"--images", "--texts", "--lambda", "--no-refine", "--checkpointing", "--revision"}
    assert options - {"--plan"} <= _options_in(search)
    assert all("Usage" in pouf(command, "--help", cwd=tmp_path).stdout for command in commands)


def _options_in(text: str) -> set[str]:
    return {word for word in text.replace("/", " ").split() if word.startswith("--")}


def test_the_first_help_of_adapt_fits_a_screen(tmp_path: Path) -> None:
    help_text = pouf("adapt", "--help", cwd=tmp_path, columns=80).stdout.strip()
    examples = [line.strip() for line in help_text.splitlines() if line.strip().startswith("pouf adapt ")]
    assert len(help_text.splitlines()) <= 36 and len(examples) == 2
    assert 10 <= len(_options_in(help_text.split("Options")[-1])) <= 15
    assert all("--classes" in example for example in examples)


def test_fewer_inputs_than_classes_are_named_before_anything_is_trained(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    np.save(tmp_path / "f.npy", draw.normal(size=(6, 8)))
    np.savez(tmp_path / "p.npz", prototypes=draw.normal(size=(9, 8)))
    usual = ("adapt", "--features", "f.npy", "--prototypes", "p.npz", "--steps", 1, "--no-report")
    many = pouf(*usual, "--classes", ",".join("abcdefghi"), "--out", "many", cwd=tmp_path).stderr
    assert "6 unlabelled vectors, 9 classes: too many" in many
    np.savez(tmp_path / "p.npz", prototypes=draw.normal(size=(6, 8)))
    assert "too many" not in pouf(*usual, "--classes", "a,b,c,d,e,f", "--out", "few", cwd=tmp_path).stderr


def test_vectors_go_all_the_way(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(4, 16))
    labels = np.repeat(np.arange(4), 25)
    np.savez(tmp_path / "f.npz", features=centres[labels] + 0.3 * draw.normal(size=(100, 16)), labels=labels)
    np.savez(tmp_path / "p.npz", prototypes=centres + 0.8 * draw.normal(size=(4, 16)), names=np.array(list("abcd")))
    result = pouf(
        "adapt", "--features", "f.npz", "--prototypes", "p.npz", "--temperature", 0.1, "--out", "run", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(result.stdout)["n"] == 100
    facts = json.loads(pouf("evaluate", "run", "f.npz", "--json", cwd=tmp_path).stdout)
    assert facts["last"] >= facts["zero_shot"] and facts["last"] > 0.9
    pouf("predict", "run", "f.npz", "--out", "p.csv", "--quiet", cwd=tmp_path)
    with (tmp_path / "p.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 100 and {row["class"] for row in rows} == set("abcd")
    np.savez(tmp_path / "far.npz", features=draw.normal(size=(40, 16)))
    told = pouf("predict", "run", "far.npz", "--unknown", "--abstain", 0.2, "--json", "--out", "q.csv", cwd=tmp_path)
    assert json.loads(told.stdout)["unknown"] > 20
    told = pouf("predict", "run", "f.npz", "--unknown", "--json", cwd=tmp_path)
    assert json.loads(told.stdout)["unknown"] < 5
    usual = ("search", "--features", "f.npz", "--prototypes", "p.npz", "--temperature", 0.1, "--out", "tuned")
    pouf(*usual, "--lrs", "1e-3,1e-2", "--steps", 20, "--quiet", cwd=tmp_path)
    assert json.loads(pouf("evaluate", "tuned", "f.npz", "--json", cwd=tmp_path).stdout)["advised"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--features", "f.npz"], "--features and --prototypes belong together"),
        (
            ["--features", "f.npz", "--prototypes", "f.npz", "--model", EMBEDDED, "--template", "a {}"],
            "--prototypes stand for a model and its prompts: leave out --model, --template",
        ),
        (["--features", "f.npz", "--images", "."], "give only one of --images and --features"),
        (["--images", ".", "--model", EMBEDDED], "no classes: give --classes"),
        (
            ["--images", ".", "--model", EMBEDDED, "--classes", "a,b", "--method", "magic"],
            "unknown method 'magic': choose one of pouf, zero-shot",
        ),
        ([*IMAGES, "--method", "coop"], "--method coop learns from labelled examples: give --shots"),
        (
            [*IMAGES, "--prior", "lots"],
            "objective.prior: 'lots' is not one of",
        ),
        ([*IMAGES, "--prior", "1"], "expected one proportion above 0"),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, arguments: list[str], words: str) -> None:
    np.savez(tmp_path / "f.npz", features=np.ones((3, 2)))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert words in one_line_error(pouf("adapt", *arguments, cwd=tmp_path, code=2))


def test_every_setting_with_an_option_is_described_by_the_recipe_and_set_reaches_the_others(tmp_path: Path) -> None:
    options = {option: p for p in typer.main.get_command(app).commands["adapt"].params for option in p.opts}
    for name, dotted in (TRAINING_SETTINGS | SPEED_SETTINGS).items():
        assert options[f"--{name}"].help.startswith(setting(dotted).description.rstrip("."))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32))
    np.savez(tmp_path / "p.npz", prototypes=np.eye(3, 4, dtype=np.float32), names=np.array(list("abc")))
    usual = ("adapt", "--features", "x.npy", "--prototypes", "p.npz", "--no-report", "--quiet")
    pouf(*usual, "--lr", "1e-3", "--set", "steps=2", "--set", "optimisation.schedule=constant", cwd=tmp_path)
    recipe = Recipe.load(tmp_path / "pouf-run" / "details/recipe.toml")
    assert (recipe.optimisation.lr, recipe.steps, recipe.optimisation.schedule) == (1e-3, 2, "constant")


def test_search_takes_every_option_of_adapt() -> None:
    commands = typer.main.get_command(app).commands
    adapt, search = ({option for p in commands[name].params for option in p.opts} for name in ("adapt", "search"))
    assert adapt - search == {"--plan"} and search - adapt == {"--lrs", "--lambdas"}


def test_a_recipe_without_the_papers_losses_goes_by_its_own_name(reviews: Path) -> None:
    usual = ("adapt", "--model", "lm", "--shots", "labelled.csv", "--text-column", "review", *CLOZE, "--steps", 2)
    facts = json.loads(pouf(*usual, "--recipe", "lm-bff", "--no-report", "--json", cwd=reviews).stdout)
    assert facts["method"] == "lm-bff"
    assert json.loads((reviews / "pouf-run" / "details/run.json").read_text())["method"] == "lm-bff"


def test_a_method_by_name(few_digits: Path, tmp_path: Path) -> None:
    assert "tent" in pouf("adapt", "--method", "list", cwd=tmp_path).stdout
    usual = ("adapt", "--model", EMBEDDED, "--images", few_digits, "--classes", NAMES, "--quiet", "--no-report")
    pouf(*usual, "--method", "sinkhorn", "--out", "a", cwd=tmp_path)
    facts = json.loads(pouf("evaluate", "a", few_digits, "--json", cwd=tmp_path).stdout)
    assert facts["last"] != facts["zero_shot"]
    recipe = ("--recipe", "demo-prompt", "--steps", 2)
    pouf(*usual, "--method", "tent", *recipe, "--out", "b", cwd=tmp_path)
    assert "entropy = 0.3" in (tmp_path / "b" / "details/recipe.toml").read_text()
    pouf(*usual, "--shots", few_digits, "--method", "coop", *recipe, "--out", "c", cwd=tmp_path)
    assert json.loads((tmp_path / "c" / "details/metrics.jsonl").read_text().splitlines()[0])["terms"].keys() == {
        "labels"
    }
    pouf(*usual, "--prior", "estimated", "--refine", *recipe, "--out", "d", cwd=tmp_path)
    assert list((tmp_path / "d").rglob("postprocessor.safetensors"))


def test_predictions_name_inputs_as_the_user_does_and_hold_all_probabilities(tmp_path: Path) -> None:
    model = sentence_encoder(tmp_path / "model")
    rows = [(f"r{i}", f"{'good' if i % 2 else 'bad'} film about the {'sea' if i % 3 else 'air'}") for i in range(12)]
    (tmp_path / "my texts.csv").write_text("Id;Review\n" + "".join(f"{i};{text}\n" for i, text in rows))
    usual = ("adapt", "--model", model, "--texts", "my texts.csv", "--text-column", "review", "--classes", "good,bad")
    result = pouf(*usual, "--steps", 2, "--batch-size", 8, "--id-column", "id", "--out", "my run", cwd=tmp_path)
    assert "  pouf predict 'my run' \"a text of your own\"\n  pouf review 'my run'" in result.stdout
    own = list(csv.DictReader((tmp_path / "my run" / "predictions.csv").open()))
    assert [row["id"] for row in own] == [i for i, _ in rows] and "row" not in own[0]
    for ending in ("csv", "jsonl", "parquet"):  # the run knows its column
        pouf("predict", "my run", "my texts.csv", "--id-column", "id,review", "--probabilities", "--out", f"p.{ending}",
             "--quiet", cwd=tmp_path)  # fmt: skip
    table = pandas.read_parquet(tmp_path / "p.parquet")
    assert list(table.columns) == ["id", "review", "class", "probability", "runner_up", "runner_up_probability",
                                   "p_good", "p_bad"]  # fmt: skip
    assert table["review"].tolist() == [text for _, text in rows]
    classifier = Classifier.from_pretrained(tmp_path / "my run")
    expected = classifier.predict_proba([text for _, text in rows])
    assert np.allclose(table[["p_good", "p_bad"]].to_numpy(), expected.numpy(), atol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert table.to_dict("records") == lines
    assert (tmp_path / "p.csv").read_text().splitlines()[1].startswith("r0,bad film about the air,")
    error = one_line_error(pouf("predict", "my run", "my texts.csv", "--id-column", "key", cwd=tmp_path, code=2))
    assert "'my texts.csv' has no column 'key', only: Id, Review" in error

    # Report and review speak of the run's own inputs by the same ids, and answers may come in the user's own table.
    names = {i for i, _ in rows}
    items = json.loads((tmp_path / "my run" / "report.html").read_text().split('id="items">')[1].split("</script>")[0])
    assert {item["name"] for item in items} == names
    pouf("review", "my run", "--n", 4, cwd=tmp_path)
    ids = [row["id"] for row in csv.DictReader((tmp_path / "my run" / "review.csv").open())]
    assert len(ids) == 4 and set(ids) < names
    (tmp_path / "mine.csv").write_text("Id;Label\n" + "".join(f"{i};good\n" for i in names))
    result = pouf("review", "my run", "--answers", "mine.csv", "--json", cwd=tmp_path)
    assert json.loads(result.stdout)["answered"] == 4


def test_ids_that_are_not_distinct_stay_in_predictions_but_do_not_name_questions(tmp_path: Path) -> None:
    model = sentence_encoder(tmp_path / "model")
    (tmp_path / "texts.csv").write_text("who,text\n" + "".join(f"{i % 3},good film {i}\n" for i in range(8)))
    usual = ("adapt", "--model", model, "--texts", "texts.csv", "--classes", "good,bad", "--steps", 2)
    result = pouf(*usual, "--id-column", "who", "--out", "run", cwd=tmp_path)
    assert "texts.csv: the ids in 'who' are incomplete or not distinct" in result.stderr
    own = list(csv.DictReader((tmp_path / "run" / "predictions.csv").open()))
    assert [row["who"] for row in own] == [str(i % 3) for i in range(8)]
    pouf("review", "run", "--n", 8, cwd=tmp_path)
    ids = {row["id"] for row in csv.DictReader((tmp_path / "run" / "review.csv").open())}
    assert ids == {str(i) for i in range(8)}


def test_a_place_below_a_file_is_refused_before_anything_is_computed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for command in (
        ("adapt", *IMAGES, "--out", "file/run"), ("search", *IMAGES, "--out", "file/run"),
        ("predict", run, ".", "--out", "file/p.csv"), ("report", run, "--out", "file/r.html"),
        ("bench", "run", "images", "--data", ".", "--model", EMBEDDED, "--out", "file/bench"),
        ("figures", run, "--out", "file/figures"), ("predict", run, ".", "--out", tmp_path),
    ):  # fmt: skip
        assert "can't" in one_line_error(pouf(*command, cwd=tmp_path, code=2))


def test_evaluate_shows_f1_intervals_and_on_demand_the_confusion_matrix(run: Path, few_digits: Path) -> None:
    output = pouf("evaluate", run, few_digits, "--confusion", cwd=run.parent).stdout
    assert "macro-F1" in output and "95 % from" in output and "precision" in output and "true classes in rows" in output
    facts = json.loads(pouf("evaluate", run, few_digits, "--json", cwd=run.parent).stdout)
    assert facts["intervals"]["advised"][0] < facts["advised"] < facts["intervals"]["advised"][1]
    assert "confusion" not in facts and facts["per_class"]["two"].keys() >= {"precision", "f1"}


def test_what_is_likely_wrong_is_left_out_and_what_is_far_is_unknown(run: Path) -> None:
    facts = json.loads(
        pouf("predict", run, "images", "--abstain", 0.1, "--unknown", "--json", "--out", "a.csv", cwd=run.parent).stdout
    )
    with (run.parent / "a.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert facts["abstained"] == sum(row["abstained"] == "True" for row in rows) > 0
    assert facts["unknown"] == sum(row["class"] == "unknown" for row in rows)
    assert {row["class"] for row in rows} <= {*DIGITS, "unknown"}, "the best guess stands beside the flag"
    reliabilities = [
        float(row["reliability"]) for row in rows if row["abstained"] == "False" and row["class"] != "unknown"
    ]
    assert sum(reliabilities) / len(reliabilities) >= 0.9 - 1e-6
    assert "expected a rate" in one_line_error(
        pouf("predict", run, "images", "--abstain", 3, "--json", cwd=run.parent, code=2)
    )
    assert "unknown use" in one_line_error(
        pouf("predict", run, "images", "--use", "best", "--json", cwd=run.parent, code=2)
    )


def test_search_report_and_review_from_the_command_line(run: Path, few_digits: Path, tmp_path: Path) -> None:
    report = json.loads(pouf("report", run, few_digits, "--labelled", "--json", cwd=tmp_path).stdout)["report"]
    assert "With labels" in Path(report).read_text()
    pouf("review", run, "--n", 12, "--quiet", cwd=run.parent)
    ids = [row["id"] for row in csv.DictReader((run / "review.csv").open())]
    (tmp_path / "answers.csv").write_text("id,label\n" + "".join(f"{i},{i.split('/')[0]}\n" for i in ids))
    verdict = json.loads(pouf("review", run, "--answers", "answers.csv", "--json", cwd=tmp_path).stdout)
    assert verdict["answered"] == 12 and 0 <= verdict["adapted"]["low"] <= verdict["adapted"]["high"] <= 1
    result = pouf(
        "search", "--model", EMBEDDED, "--images", few_digits, "--classes", NAMES, "--recipe", "demo", "--steps", 2,
        "--lrs", "1e-3,2e-2", "--lambdas", "0.3", "--out", "tuned", cwd=tmp_path,
    ).stdout  # fmt: skip
    assert "Chosen without labels: optimisation.lr" in result
    tuned = tmp_path / "tuned"
    assert len(json.loads((tuned / "details/search.json").read_text())["trials"]) == 2
    verdict = Run(tuned).verdict
    assert str(verdict) in report_text(tuned / "report.html")
    assert len((tuned / "details/metrics.jsonl").read_text().splitlines()) == verdict.last == 2
    pouf("review", tuned, "--n", 6, "--quiet", cwd=tmp_path)
    wrong = ("--lrs", "many")
    assert "--lrs 'many': expected numbers" in one_line_error(
        pouf("search", "--model", EMBEDDED, "--images", few_digits, "--classes", NAMES, *wrong, cwd=tmp_path, code=2)
    )


def test_answers_of_a_review_go_back_in(adapted_texts: Path) -> None:
    pouf("review", "run", "--n", 8, "--quiet", cwd=adapted_texts)
    rows = list(csv.DictReader((adapted_texts / "run" / "review.csv").open()))
    labels = ["none of these", *(row["text"].split()[0] for row in rows[1:])]
    lines = [f"{row['id']},{label}" for row, label in zip(rows, labels, strict=True)]
    (adapted_texts / "my answers.csv").write_text("id,label\n" + "\n".join(lines) + "\n")
    output = pouf("review", "run", "--answers", "my answers.csv", cwd=adapted_texts).stdout
    command = output.split("To learn from the answers as well:\n")[1].strip()
    assert command.endswith("--answers 'my answers.csv' --out run-with-answers")
    pouf(*shlex.split(command)[1:], "--no-report", "--quiet", cwd=adapted_texts)
    manifest = json.loads((adapted_texts / "run-with-answers" / "details/run.json").read_text())
    assert manifest["shots"]["n"] == 7 and manifest["data"]["n"] == 40, "seven answers are classes"
    steps = (adapted_texts / "run-with-answers" / "details/metrics.jsonl").read_text().splitlines()
    assert "labels" in json.loads(steps[0])["terms"]
    pouf("review", "run-with-answers", "--n", 4, "--unsure", 2, "--quiet", cwd=adapted_texts)
    more = list(csv.DictReader((adapted_texts / "run-with-answers" / "review.csv").open()))
    assert len(more) == 6 and not {row["id"] for row in more} & {row["id"] for row in rows}, "asked once"
    lines = [f"{row['id']},{row['text'].split()[0]}" for row in more]
    (adapted_texts / "more.csv").write_text("id,label\n" + "\n".join(lines) + "\n")
    output = pouf("review", "run-with-answers", "--answers", "more.csv", cwd=adapted_texts).stdout
    assert "From 4 answers" in output, "what was asked to learn from is not counted"
    command = output.split("To learn from the answers as well:\n")[1].strip()
    pouf(*shlex.split(command)[1:], "--no-report", "--quiet", cwd=adapted_texts)
    third = json.loads((adapted_texts / "run-with-answers-with-answers" / "details/run.json").read_text())
    assert third["shots"]["n"] == 13, "of both rounds"
    (adapted_texts / "other.csv").write_text("id,label\n1000,good\n")
    wrong = ("adapt", "texts.csv", "--text-column", "review", "--classes", "good,bad", "--model", "model")
    error = one_line_error(pouf(*wrong, "--answers", "other.csv", cwd=adapted_texts, code=2))
    assert "'other.csv' has no answer about texts.csv" in error


def test_bench_from_the_command_line(tmp_path: Path) -> None:
    assert "lambda" in pouf("bench", "list", cwd=tmp_path).stdout
    pouf("bench", "make-data", "data", cwd=tmp_path)
    usual = ("bench", "run", "images", "--data", "data", "--model", EMBEDDED, "--seeds", 0, "--methods", "zero-shot")
    facts = json.loads(pouf(*usual, "--tasks", "office31:dslr", "--json", cwd=tmp_path).stdout)
    assert facts["failed"] == 0 and (tmp_path / "pouf-bench" / "images.tex").is_file()
    assert "| zero-shot |" in pouf(*usual, "--tasks", "office31:dslr", cwd=tmp_path).stdout
    shutil.rmtree(tmp_path / "data" / "office31" / "amazon")
    error = one_line_error(pouf(*usual, "--tasks", "office31:amazon", "--quiet", cwd=tmp_path, code=2))
    assert "no cell could be computed" in error and "expected office31/{amazon|dslr|webcam}/images/<class>" in error
    for wrong, words in (
        (("--tasks", "office99"), "unknown task 'office99': choose one of office31:amazon"),
        (("--set", "steps"), "expected name=value"),
        (("--set", "stps=4"), "stps: unknown setting"),
        (("--seeds", "a"), "expected whole numbers"),
    ):
        assert words in one_line_error(pouf(*usual, *wrong, cwd=tmp_path, code=2))
    assert "is not empty" in one_line_error(pouf("bench", "make-data", "data", cwd=tmp_path, code=2))


def test_speed_options_change_nothing_that_is_learned(few_digits: Path, tmp_path: Path) -> None:
    usual = ("adapt", "--model", EMBEDDED, "--images", few_digits, "--classes", NAMES, "--recipe", "demo",
             "--steps", 3, "--batch-size", 32, "--no-report", "--quiet")  # fmt: skip
    ends = {}
    for name, options in {
        "plain": (), "checkpointing": ("--checkpointing",), "chunks": ("--chunk", 10, "--workers", 1),
        "bf16": ("--precision", "bf16"),
    }.items():  # fmt: skip
        pouf(*usual, *options, "--out", name, cwd=tmp_path)
        ends[name] = Classifier.from_pretrained(tmp_path / name, use="last").predict_proba(few_digits)
    assert torch.allclose(ends["checkpointing"], ends["plain"], atol=1e-4)
    assert torch.allclose(ends["chunks"], ends["plain"], atol=1e-4)
    assert 0 < (ends["bf16"] - ends["plain"]).abs().max() < 0.1, "half the digits, nearly the same end"
    recipe = (tmp_path / "checkpointing" / "details/recipe.toml").read_text()
    assert (
        "checkpointing = true" in recipe
        and 'precision = "bf16"' in (tmp_path / "bf16" / "details/recipe.toml").read_text()
    )


def test_views_are_computed_once(few_digits: Path, tmp_path: Path) -> None:
    usual = ("adapt", "--model", EMBEDDED, "--images", few_digits, "--classes", NAMES, "--recipe", "demo-prompt",
             "--augment", "crop-flip", "--steps", 3, "--no-report", "--quiet")  # fmt: skip
    pouf(*usual, "--views", 2, "--out", "views", cwd=tmp_path)
    pouf(*usual, "--out", "crops", cwd=tmp_path)
    losses = {
        name: [
            json.loads(line)["loss"] for line in (tmp_path / name / "details/metrics.jsonl").read_text().splitlines()
        ]
        for name in ("views", "crops")
    }
    assert (
        "views = 2" in (tmp_path / "views" / "details/recipe.toml").read_text() and losses["views"] != losses["crops"]
    )
    error = one_line_error(pouf(*usual, "--views", "-1", "--out", "bad", cwd=tmp_path, code=2))
    assert "views: should be greater than or equal to 0" in error


def test_an_interrupted_search_says_so(few_digits: Path, tmp_path: Path) -> None:
    options = ["--model", EMBEDDED, "--images", str(few_digits), "--classes", NAMES, "--recipe", "demo", "--out", "run"]
    begun = (tmp_path / "run" / "unfinished/details/run.json").is_file
    result = interrupted(["search", *options, "--steps", "100000", "--quiet"], tmp_path, begun, 1)
    assert result.returncode == 130 and result.stderr.strip().startswith("error: interrupted")
    assert not (tmp_path / "run" / "model").exists(), "no trial had come to its end"
