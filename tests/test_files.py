"""Whole files, owned folders and temporary ones, with real processes that are killed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pouf.errors import InputError
from pouf.files import LOCK, clear_partial, drop, own, temporary_folder, whole, whole_files, write_json

WRITES = """
import json, sys
from pathlib import Path
from pouf.files import write_json
print("ready", flush=True)
for number in range(10**6):
    write_json(Path(sys.argv[1]), [number] * 200_000)
"""
OWNS = """
import sys, time
from pathlib import Path
from pouf.files import own, temporary_folder
lock = own(Path(sys.argv[1]))
print(temporary_folder(), flush=True)
time.sleep(600)
"""


def started(code: str, *arguments: object, **options: object) -> tuple[subprocess.Popen[str], str]:
    """A process, and the first line that it says."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    return process, process.stdout.readline().strip()


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    write_json(file, {"a": 1})
    with pytest.raises(ZeroDivisionError), whole(file) as partial:
        partial.write_text("half of")
        assert 1 / 0
    assert json.loads(file.read_text()) == {"a": 1}
    (tmp_path / "kept").write_text("as it is")
    with pytest.raises(ZeroDivisionError), whole_files(tmp_path) as folder:
        (folder / "kept").write_text("half of")
        assert 1 / 0
    with whole_files(tmp_path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "facts.json").write_text("{}")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["facts.json", "inner", "kept"]
    assert (tmp_path / "kept").read_text() == "as it is" and (tmp_path / "inner" / "facts.json").read_text() == "{}"


@pytest.mark.parametrize("wait", [0.05, 0.13, 0.31])
def test_a_process_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path, wait: float) -> None:
    file = tmp_path / "facts.json"
    write_json(file, [0] * 200_000)
    process, _ = started(WRITES, file)
    time.sleep(wait)
    killed(process)
    values = json.loads(file.read_text())
    assert len(values) == 200_000 and len(set(values)) == 1
    clear_partial(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["facts.json"]


def test_a_folder_has_one_owner_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    process, _ = started(OWNS, folder)
    with pytest.raises(InputError, match=r"another process is writing into .*run'"):
        own(folder)
    killed(process)
    own(folder).release()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"can't write into .*Choose another folder"):
        own(tmp_path / "file" / "checkpoints")


def test_what_killed_processes_left_in_the_temporary_folder_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    dead, left = started(OWNS, tmp_path / "a")
    alive, there = started(OWNS, tmp_path / "b")
    (tmp_path / "pouf-checkpoints-of-someone").mkdir()  # nobody's lock: it is left alone
    killed(dead)
    assert Path(left).parent == tmp_path and Path(left, LOCK).exists()
    mine = temporary_folder()
    assert (
        not Path(left).exists() and Path(there, LOCK).exists() and (tmp_path / "pouf-checkpoints-of-someone").exists()
    )
    drop(mine)
    assert not mine.exists()
    killed(alive)
    drop(temporary_folder())
    assert not Path(there).exists()
