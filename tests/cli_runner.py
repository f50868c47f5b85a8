"""The command line as tests run it."""

from __future__ import annotations

import html
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from pouf.cli import _progress, main


def pouf(
    *arguments: object, cwd: Path, code: int | None = 0, columns: int = 200, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The command line's own entry point, in this process: starting Python for each command would take minutes.

    Args:
        code: the exit code to expect; None takes any.
        columns: of the terminal.
        stdin: what the command reads from standard input.
    """
    out, err = io.StringIO(), io.StringIO()
    command = ["pouf", *map(str, arguments)]
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as exit_,
    ):
        patch.chdir(cwd)
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "argv", command)
        if stdin is not None:
            patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.setattr(_progress, "FIRST_LINE_AFTER", 600.0)  # how slow a machine is must not show in what a test reads
        main()
    came = int(exit_.value.code or 0)
    assert code is None or came == code, err.getvalue()
    return subprocess.CompletedProcess(command, came, out.getvalue(), err.getvalue())


def in_a_process(*arguments: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pouf", *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == code, result.stderr
    return result


def one_line_error(result: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert result.stdout == ""
    return lines[0]


def report_text(report: Path) -> str:
    """What a report says: its markup for code as backticks, its entities as characters."""
    return html.unescape(re.sub("</?code>", "`", report.read_text()))
