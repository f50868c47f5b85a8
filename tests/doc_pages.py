"""The pages of the documentation, and what they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from cli_runner import pouf

ROOT = Path(__file__).parent.parent
README, QUICKSTART = ROOT / "README.md", ROOT / "docs" / "quickstart.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> list[str]:
    """Every command of the blocks for a terminal; a backslash continues a line."""
    shown = "".join(blocks(text, "(?:console|shell-session)")).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]


def run_commands(text: str, place: Path) -> list[str]:
    """What each `pouf …` says on standard output."""
    said = []
    for line in command_lines(text):
        program, *arguments = shlex.split(line, comments=True)
        assert program == "pouf", line
        if arguments[0] == "serve":
            continue  # does not end by itself: tests/integrations/test_serve.py
        said.append(pouf(*arguments, cwd=place).stdout)
    return said
