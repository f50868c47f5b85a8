"""What the documentation shows is what runs: its code, its command lines, its options, files and names."""

from __future__ import annotations

import csv
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer.main
from cli_runner import pouf
from doc_pages import PAGES, QUICKSTART, README, ROOT, blocks, command_lines, prose, run_commands
from helpers import REVIEWS
from hub_server import environment_for

import pouf as pouf_package
from pouf import METHODS, Classifier
from pouf.bench.standins import LM, make_data
from pouf.cli import app
from pouf.demo import DIGITS
from pouf.recipe import PRESETS, recipe_names
from pouf.runs.folder import Run
from pouf.validation.rules import rules_in_markdown

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")


def words(text: str) -> int:
    """As a reader counts them: bars of tables and signs of headings are none."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def sections(file: Path) -> dict[str, str]:
    """What stands under each heading of the second level."""
    _, *parts = re.split(r"^## ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {part.splitlines()[0]: part for part in parts}


def table(text: str, heading: str) -> list[str]:
    """The first column of the table with this heading, as it stands there."""
    _, rows = text.split(f"| {heading} |", 1)
    return [row.split("|")[1].strip() for row in rows.split("\n\n")[0].splitlines()[2:]]


def run_python(text: str, title: str) -> dict[str, Any]:
    """All blocks one after the other; the names that they leave behind."""
    names: dict[str, Any] = {"__name__": title}
    for block in blocks(text, "python"):
        exec(compile(block, title, "exec"), names)
    return names


def names_in(folder: Path) -> set[str]:
    return {path.name + "/" * path.is_dir() for path in folder.iterdir()}


def classes_in(file: Path) -> list[str]:
    with file.open(encoding="utf-8") as stream:
        return [row["class"] for row in csv.DictReader(stream)]


def test_the_readme_in_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    assert words(text) <= 700, "a first screen, no manual"
    assert len(blocks(text, "python")) == 1 and len(blocks(text, "python")[0].splitlines()) <= 15
    names = run_python(text, "README.md")
    clf, result = names["clf"], names["result"]
    answer = result.classifier.predict("How far is it from Denver to Aspen?")
    assert answer in clf.classes and capsys.readouterr().out == f"{result.verdict}\n{answer}\n"


@pytest.mark.parametrize("page", ["callbacks"])
def test_the_code_of_a_page_runs(page: str, place: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    run_python(text, page)
    run_commands(text, place)


def test_the_code_for_other_libraries_runs(place: Path, hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    code = "".join(blocks((ROOT / "docs" / "integrations.md").read_text(encoding="utf-8"), "python"))
    said = "\nassert again.predict('photos/0000.png') in ('one', 'seven')\n"
    ended = subprocess.run(
        [sys.executable, "-c", code + said], cwd=place, env=environment_for(hub, tmp_path / "home"), text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert (tmp_path / "hub" / "me" / "digits" / "model.safetensors").is_file()


@pytest.mark.slow
def test_what_is_exported_runs_as_the_page_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    adapt = ["--model", "pouf/tiny-clip", "--images", "photos/", "--classes", "digits.txt", "--steps", 5]
    pouf("adapt", *adapt, "--out", "run", cwd=place)
    run_commands(text, place)
    run_python(text, "deploy")
    assert capsys.readouterr().out.strip() == Classifier.from_pretrained("run").predict("photos/0000.png")
    assert (place / "digits-onnx" / "classifier.int8.onnx").is_file() and (place / "last-onnx").is_dir()


@pytest.mark.slow
def test_clusters_predict_as_the_page_says(place: Path) -> None:
    ray, pandas = pytest.importorskip("ray"), pytest.importorskip("pandas")
    Classifier.from_pretrained("pouf/tiny-clip", DIGITS).save_pretrained("run")
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").replace('["run"]', f'["{place / "run"}"]')
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        names = run_python(text, "scale")
    finally:
        ray.shutdown()
    files = sorted((place / "photos").glob("*.png"))
    expected = Classifier.from_pretrained("run").predict(files)
    said = pandas.read_parquet("predictions")
    by_name = {Path(path).name: name for path, name in zip(said["path"], said["class"], strict=True)}
    assert [by_name[file.name] for file in files] == expected
    (table,) = names["predicted"](iter([pandas.DataFrame({"path": [str(file) for file in files]})]))
    assert table["class"].tolist() == expected and list(table) == re.findall(r"(\w+) (?:string|float)", names["schema"])


def test_every_page_with_code_is_run_by_a_test() -> None:
    run = {
        "README.md",
        "quickstart.md",
        "callbacks.md",
        "integrations.md",
        "deploy.md",
        "scale.md",
        "masked-lms.md",
        "index.md",
        "teachers.md",
    }
    elsewhere = {"methods.md"}  # tests/training/test_methods.py
    assert {page.name for page in PAGES if blocks(page.read_text(encoding="utf-8"), "python")} == run | elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs_offline(notebook: Path, place: Path, environment: Callable[..., None]) -> None:
    environment(TEXT_MODEL=place / "sentence-transformers" / "all-MiniLM-L6-v2")
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "outputs are not kept: they grow old"
    names: dict[str, Any] = {"__name__": notebook.stem}
    for cell in cells:
        exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
    assert names["result"].verdict.last == len(names["result"].history) > 20


@pytest.mark.slow
def test_the_papers_tasks_run_as_the_page_on_masked_language_models_says(place: Path) -> None:
    make_data(place / "glue")
    (place / "glue" / LM).rename(place / "roberta-large")
    names = run_python((ROOT / "docs" / "masked-lms.md").read_text(encoding="utf-8"), "masked-lms")
    assert names["result"].verdict.last == 1000


def test_the_quickstart_runs_from_top_to_bottom_in_one_folder(
    material: Path, tmp_path: Path, in_folder: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """And Python predicts the same as the command line in every section."""
    for model in ("sentence-transformers", "roberta-base"):
        (tmp_path / model).symlink_to(material / model)
    in_folder(tmp_path)
    names: dict[str, Any] = {"__name__": "quickstart"}
    compared = []
    for title, text in sections(QUICKSTART).items():
        for block in blocks(text, "python"):
            exec(compile(block, title, "exec"), names)
        if title == "Files to try":
            for image in sorted((tmp_path / "photos").rglob("*.png")):
                if int(image.stem) % 6:  # fewer of them, to be quick
                    image.unlink()
        assert "print(result.verdict)" not in text or str(names["result"].verdict) in capsys.readouterr().out
        run_commands(text, tmp_path)
        if "predicted = " in text:
            (table,) = re.findall(r"--out (\w+\.csv)", "".join(blocks(text, "console")))
            assert classes_in(tmp_path / table) == names["predicted"]
            compared.append(title)
    promised = re.findall(r"\[([a-z ]+)\]\(#", QUICKSTART.read_text(encoding="utf-8").split("## ")[0])
    assert [title.lower() for title in compared] == [*promised, "choosing settings"] and len(promised) == 4
    assert classes_in(tmp_path / "last.csv") == names["last"]
    assert classes_in(tmp_path / "zero-shot.csv") == names["before"]
    with (tmp_path / "sure.csv").open() as stream:
        assert {row["abstained"] for row in csv.DictReader(stream)} <= {"True", "False"}


def test_the_first_page_of_the_site_in_python(place: Path) -> None:
    names = run_python((ROOT / "docs" / "index.md").read_text(encoding="utf-8"), "index")
    assert names["result"].verdict.last == len(names["result"].history)


def test_a_matrix_teaches_as_the_page_says(place: Path) -> None:
    model = "sentence-transformers/all-MiniLM-L6-v2"
    names: dict[str, Any] = {"clf": Classifier.from_pretrained(model, ["bad", "good"]), "texts": REVIEWS * 4}
    names["probabilities"] = names["clf"].predict_proba(names["texts"])
    for block in blocks((ROOT / "docs" / "teachers.md").read_text(encoding="utf-8"), "python"):
        exec(block, names)
    assert names["result"].verdict.last == len(names["result"].history)


def test_the_command_reference_has_every_command_and_option() -> None:
    _, *found = runpy.run_path(str(ROOT / "docs" / "conf.py"))["command_reference"]().split("\n## pouf ")
    parts = {part.splitlines()[0]: part for part in found}
    ours = {name: known for name, known in options().items() if name not in ("", "bench")}
    assert parts.keys() == ours.keys()
    for name, known in ours.items():
        assert not {each for each in known - {"--help"} if each[0] == "-" and f"`{each}`" not in parts[name]}, name


def test_readme_and_docs_are_no_book() -> None:
    assert sum(words(page.read_text(encoding="utf-8")) for page in PAGES) <= 15_000


def test_the_quickstart_names_every_file_of_a_run_and_no_other(place: Path) -> None:
    page = QUICKSTART.read_text(encoding="utf-8")
    tables = [table(page, heading) for heading in ("in the folder", "in `model/`", "in `details/`")]
    named = re.findall(r"`([^`]+)`", " ".join(row for rows in tables for row in rows))
    model = "sentence-transformers/all-MiniLM-L6-v2"
    text = ["adapt", "--model", model, "--texts", "reviews.csv", "--classes", "bad,good", "--quiet"]
    vectors = ["--features", "features.npy", "--prototypes", "prototypes.npz", "--quiet", "--no-report"]
    (place / "constant.toml").write_text('steps = 40\nbatch_size = 16\noptimisation.schedule = "constant"\n')
    pouf(*text, "--steps", 4, "--out", "full", cwd=place)
    pouf(*text, "--tune", "prompt", "--steps", 2, "--out", "prompt", "--no-report", cwd=place)
    pouf(*text, "--steps", 20, "--lr", 0.1, "--lambda", 0, "--out", "bad", "--no-report", cwd=place)
    pouf("adapt", *vectors, "--recipe", "constant.toml", "--lr", 3e-2, "--out", "good", cwd=place)
    pouf("search", *vectors, "--steps", 4, "--out", "searched", cwd=place)
    assert (Run(place / "bad").verdict.advised, Run(place / "good").verdict.advised) == ("zero-shot", "chosen")
    runs = [place / name / part for name in ("full", "prompt", "bad", "good", "searched")
            for part in (".", "model", "details")]  # fmt: skip
    there = {name for run in runs for name in names_in(run)}
    assert set(named) - there == set(), "named, and written by none of these runs"
    assert there - set(named) - names_in(place / model) == set(), "written, and not named"
    assert not {"predictions.csv", "report.html"} & names_in(place / "bad")
    pouf(*text, "--recipe", "full/details/recipe.toml", "--out", "again", cwd=place)
    assert (place / "again" / "predictions.csv").read_text() == (place / "full" / "predictions.csv").read_text()


def options() -> dict[str, set[str]]:
    """The options of each command, as `bench run`."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, name: str) -> None:
        for inner, sub in getattr(command, "commands", {}).items():
            walk(sub, f"{name} {inner}".strip())
        found[name] = {"--help"} | {text for p in command.params for text in (*p.opts, *p.secondary_opts)}

    walk(typer.main.get_command(app), "")
    return found


def test_the_first_two_shell_blocks_of_the_readme_set_up_and_run_the_demo_and_the_checks() -> None:
    """A newcomer's two commands, one line each: no other block for a shell may stand before them."""
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert [block.count("\n") for block in blocks[:2]] == [1, 1]
    assert [block.split()[-1] for block in blocks[:2]] == ["demo", "tools/check"]


def test_every_command_and_option_in_the_docs_exists() -> None:
    known, checked = options(), 0
    ours = set().union(*known.values())
    for script in BENCHMARKS:
        ours |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', script.read_text(encoding="utf-8")))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in [*command_lines(text), *(code.replace("\n", " ") for code in INLINE.findall(prose(text)))]:
            called = re.search(r"(?<!from)(?:^|\s)pouf ((?:bench )?[a-z][a-z-]*)(.*)", line)
            used = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", called[2] if called else line)
            if called:
                assert called[1] in known, f"{page.name}: {line}"
            elif line.startswith(("pip", "python3", "accelerate", "torchrun", "srun")):
                continue
            allowed = known[called[1]] if called else ours
            assert set(used) <= allowed, f"{page.name}: {line}"
            checked += len(used)
    assert checked > 100, "the pattern finds what it looks for"


def test_methods_recipes_and_alarms_in_the_docs_are_those_of_the_code() -> None:
    methods, trust = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("methods", "trust"))
    assert [name.strip("`") for name in table(methods, "method")] == list(METHODS)
    for level in ("alarm", "caution"):
        assert rules_in_markdown(level) in trust, f"docs/trust.md: the table of {level}s is that of the code"
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"(?:--recipe |recipe=\"|Recipe\.load\(\")([a-z0-9-]+)(?=[\s\"`])", text)
        assert set(named) <= {*recipe_names(), *PRESETS}, page.name
        added = re.findall(r"METHODS\[\"([a-z-]+)\"\] =", text)  # by the page itself
        assert set(re.findall(r"(?:--method |method=\")([a-z-]+)", text)) <= {*METHODS, "list", *added}, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_imports_work(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", prose(text)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        if link.startswith("http"):
            continue
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], link
    for block in blocks(text, "python"):
        for line in block.splitlines():
            if line.startswith(("from ", "import ")) and "ray" not in line:  # which the checks do without
                exec(line, {})


def test_every_page_stands_in_the_table_of_contents_of_the_site() -> None:
    listed = re.findall(r"^([a-z-]+)$", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index")


def test_the_api_page_lists_all_that_can_be_imported() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"auto(?:class|function|exception):: (\w+)$", text, re.MULTILINE))
    constants = {"EMBEDDED", "METHODS", "__version__"}
    assert listed == set(pouf_package.__all__) - constants


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_a_benchmark_can_be_loaded(script: Path) -> None:
    names = runpy.run_path(str(script), run_name=f"benchmark_{script.stem}")
    assert callable(names["main"]) and names["__doc__"]


@pytest.mark.parametrize("page", ["security.md", "reliability.md"])
def test_every_test_that_a_promise_names_is_there(page: str) -> None:
    tests = {file: file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"\btest_\w+", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    there = {file.stem for file in tests} | {
        name for text in tests.values() for name in re.findall(r"def (test_\w+)", text)
    }
    assert named and named <= there, named - there
