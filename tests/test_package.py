"""The public face: its names, its laziness, its documentation."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pouf

ROOT = Path(__file__).parent.parent


def test_the_public_names_are_these() -> None:
    assert pouf.__all__ == [
        "__version__",
        "Adaptation",
        "Backbone",
        "Callback",
        "Classifier",
        "Demonstrations",
        "Diverged",
        "EMBEDDED",
        "EarlyStopping",
        "FeatureCache",
        "Images",
        "InferenceConfig",
        "InputError",
        "KeepNames",
        "METHODS",
        "Output",
        "PoufClassifier",
        "Recipe",
        "Search",
        "Shots",
        "Step",
        "Stream",
        "Texts",
        "Tracking",
        "Vectors",
        "Verdict",
        "compare",
        "read_labelled",
        "read_shots",
        "write_report",
    ]


@pytest.mark.parametrize("name", pouf.__all__)
def test_every_public_name_is_there_and_stays_itself(name: str) -> None:
    first = getattr(pouf, name)
    assert getattr(pouf, name) is first
    assert not isinstance(first, type(sys)), "a module hides the function of the same name"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pouf.nothing  # noqa: B018


@pytest.mark.parametrize("arguments", [["-c", "import pouf"], ["-m", "pouf", "--help"], ["-m", "pouf", "--version"]])
def test_nothing_heavy_is_imported_before_it_is_needed(arguments: list[str]) -> None:
    code = [sys.executable, "-X", "importtime", *arguments]
    loaded = subprocess.run(code, capture_output=True, text=True, check=True).stderr
    modules = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in loaded.splitlines()}
    assert "pouf" in modules
    assert not modules & {"torch", "transformers", "sklearn", "numpy", "PIL"}


def test_the_readmes_first_two_bash_blocks_are_one_line_each() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0].strip() for block in text.split("```bash\n")[1:]]
    assert "pouf demo" in blocks[0] and "tools/check" in blocks[1]
    assert all("\n" not in block and "constraints.txt" in block for block in blocks[:2])


def _listed_files() -> list[str]:
    """Paths below src/pouf in the tree of CONTRIBUTING.md: two spaces of indentation per folder; folders end with /."""
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```text\nsrc/pouf/\n")[1].split("\n```")[0]
    files, folders = [], [""]
    for line in tree.splitlines():
        name, about = line.split(maxsplit=1)
        depth = (len(line) - len(line.lstrip(" "))) // 2
        assert about and depth <= len(folders), f"{line!r}: expected two spaces per folder, a name and what it is"
        del folders[depth:]
        if name.endswith("/"):
            folders.append(folders[-1] + name)
        files.append(folders[-1] if name.endswith("/") else folders[-1] + name)
    return files


def test_the_source_tree_for_newcomers_lists_every_file_once() -> None:
    """A package's own line stands for its __init__.py."""
    listed, source = _listed_files(), ROOT / "src" / "pouf"
    there = {file.relative_to(source).as_posix() for file in source.rglob("*.py") if file.name != "__init__.py"}
    there |= {f"{file.parent.relative_to(source).as_posix()}/" for file in source.glob("*/**/__init__.py")}
    assert len(set(listed)) == len(listed), "CONTRIBUTING.md lists a file twice: remove one of the lines"
    assert set(listed) == there, (
        f"in the tree of CONTRIBUTING.md, add a line for {sorted(there - set(listed))}, and remove those of "
        f"{sorted(set(listed) - there)}"
    )


NO_NOUNS = {"told", "held", "asked", "came", "seen", "shown", "kept", "said", "heard", "of"}


def _bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None


def test_no_name_is_a_participle_or_a_preposition() -> None:
    """Names say what a thing is, in the words that engineers search for."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {_bound_name(node)}"  # type: ignore[attr-defined]
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if _bound_name(node) in NO_NOUNS
    ]
    assert not found, f"call these what they are, as `callbacks`, `predictions` or `rows`: {found}"
