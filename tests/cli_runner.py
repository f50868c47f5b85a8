"""The command line as tests run it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from pouf.cli import main


def pouf(*arguments: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The command line's own entry point, in this process: starting Python for each command would take minutes."""
    out, err = io.StringIO(), io.StringIO()
    command = ["pouf", *map(str, arguments)]
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as exit_,
    ):
        patch.chdir(cwd)
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "argv", command)
        main()
    assert (exit_.value.code or 0) == code, err.getvalue()
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


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
