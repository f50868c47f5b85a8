"""Every command that the documentation shows: parsed as the command line parses it and, where that is possible, run."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from cli_runner import pouf
from doc_pages import PAGES, ROOT, command_lines
from helpers import REVIEWS
from small_models import causal_lm

from pouf.cli import app

# Run by tests/test_docs.py, which looks at what comes of them.
RUN_ELSEWHERE = {"quickstart.md", "callbacks.md", "deploy.md"}
# What the blocks of a page stand on, which it tells of in words.
BEFORE = {
    "trust.md": ["pouf adapt --model pouf/tiny-clip --images photos/ --classes digits.txt --steps 5 --out run"],
}
# Parsed, and not run: they take several machines, an hour, or do not end by themselves.
NOT_RUN = {
    "accelerate", "torchrun", "srun", "pip", "pytest", "python", "python3", "pre-commit", "tools/check", "ls", "serve",
    "bench run",
}  # fmt: skip


def all_commands() -> list[tuple[str, str]]:
    contributing = ROOT / "CONTRIBUTING.md"
    return [
        (page.name, line) for page in [*PAGES, contributing] for line in command_lines(page.read_text(encoding="utf-8"))
    ]


def pouf_arguments(line: str) -> list[str] | None:
    """The arguments of pouf in a command line, also behind `torchrun … -m`; what `…` stands for is left out."""
    words = [word for word in shlex.split(line.replace("'", " "), comments=True) if word != "…"]
    places = [i for i, word in enumerate(words) if word == "pouf" and (i == 0 or words[i - 1] == "-m")]
    return words[places[0] + 1 :] if places else None


def parse(arguments: list[str]) -> str:
    """By the real parser, which refuses unknown options, missing arguments and values of a wrong type."""
    command: Any = typer.main.get_command(app)
    context, named = None, []
    while hasattr(command, "commands"):
        context = command.make_context(command.name or "pouf", list(arguments), parent=context)
        name, command, arguments = command.resolve_command(context, context._protected_args + context.args)
        named.append(name)
    with command.make_context(named[-1], list(arguments), parent=context):
        return " ".join(named)


def test_every_pouf_command_is_parsed_by_the_command_line_itself(place: Path) -> None:
    parsed = {parse(arguments) for _, line in all_commands() if (arguments := pouf_arguments(line)) is not None}
    assert parsed == {"adapt", "predict", "evaluate", "review", "names", "search", "distil", "export", "serve",
                      "bench list", "bench make-data", "bench run"}  # fmt: skip
    for wrong in (["adapt", "--clases", "a,b"], ["adapt", "--steps", "many"], ["predict"]):
        with pytest.raises(Exception, match=r"clases|integer|Missing"):
            parse(wrong)


def test_every_option_of_a_benchmark_is_one_of_that_script() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = re.findall(r"python\s(benchmarks/\w+\.py|tools/\w+\.py)((?:\s+(?!`)[^`\n#;:,)]*)?)", text)
    assert len(shown) > 20
    for script, arguments in shown:
        known = (ROOT / script).read_text(encoding="utf-8")
        for option in re.findall(r"(?<![\w-])--[a-z-]+", arguments):
            assert f'"{option}"' in known, f"{script} has no {option}"


def runnable(page: str) -> list[list[str]]:
    """Arguments of the commands of a page that are whole and end by themselves."""
    lines = [line for name, line in all_commands() if name == page and "…" not in line]
    skipped = tuple(NOT_RUN)
    return [
        shlex.split(line, comments=True)[1:]
        for line in lines
        if not line.startswith(skipped) and not line.removeprefix("pouf ").startswith(skipped)
    ]


@pytest.fixture
def complete(place: Path) -> Path:
    """All that the pages speak of in passing: labelled files, and models by their names on the hub."""
    for name in ("roberta-large", "HuggingFaceTB/SmolLM2-135M", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"):
        (place / name).parent.mkdir(exist_ok=True)
    (place / "roberta-base").rename(place / "roberta-large")
    (place / "laion/CLIP-ViT-B-32-laion2B-s34B-b79K").symlink_to(place / "openai/clip-vit-base-patch16")
    causal_lm(place / "HuggingFaceTB/SmolLM2-135M", "llama")
    (place / "more.csv").write_text((place / "more-reviews.csv").read_text())
    (place / "descriptions.txt").write_text("a book about air\nthe sea\nwho and how many\n")
    (place / "one.png").write_bytes(next((place / "photos").iterdir()).read_bytes())
    rows = [f"{text},{'negative' if i % 2 else 'positive'}\n" for i, text in enumerate(REVIEWS)]
    (place / "labelled.csv").write_text("text,label\n" + "".join(rows))
    (place / "llm.csv").write_text("row,label,confidence\n0,good,0.9\n4,bad,0.8\n")
    np.save(place / "second.npy", np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32))
    features = np.load(place / "features.npy")
    np.savez(place / "labelled.npz", features=features, labels=np.array(list("abcdef"))[np.arange(len(features)) % 6])
    return place


def answer(review: Path, answers: Path) -> None:
    """Every question answered alike."""
    with review.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    column = next(name for name in rows[0] if name in ("label", "answer"))
    for row in rows:
        row[column] = "seven"
    with answers.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


OWN_NAMES = {"cat,dog,sea lion": "one,seven,nine,zero,two,three,four,five,six,eight", "cat,dog": "one,seven",
             "entity,human,number": "cat,dog,sea"}  # fmt: skip
RUN_HERE = [page.name for page in PAGES if page.name not in RUN_ELSEWHERE and runnable(page.name)]


@pytest.mark.parametrize("page", RUN_HERE)
def test_the_commands_of_a_page_run(page: str, complete: Path) -> None:
    """With digits in the place of cats and dogs."""
    ran = 0
    for words in [*(line.split()[1:] for line in BEFORE.get(page, [])), *runnable(page)]:
        arguments = [OWN_NAMES.get(word, word) for word in words]
        if "answers.csv" in arguments:
            answer(complete / "run" / "review.csv", complete / "answers.csv")
        if "--out" in arguments and (complete / arguments[arguments.index("--out") + 1]).is_dir():
            arguments.append("--overwrite")  # of a block before it
        if arguments[0] == "predict":
            arguments.append("--overwrite")
        if arguments[0] == "adapt" and "--steps" not in arguments and "list" not in arguments:
            arguments += ["--steps", "5"]  # the paper's 5,000 would take a while
        pouf(*arguments, cwd=complete)
        ran += 1
    assert ran
