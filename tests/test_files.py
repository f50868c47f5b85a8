"""Whole files, owned folders and temporary ones, with real processes that are killed."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pouf.errors import InputError
from pouf.files import (
    LOCK,
    atomic_files,
    atomic_folder,
    atomic_write,
    clear_partial,
    copy,
    discard,
    drop,
    lock_folder,
    temporary_folder,
    write_json,
)
from pouf.interruption import handle_signals

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
from pouf.files import lock_folder, temporary_folder
lock = lock_folder(Path(sys.argv[1]))
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
    with pytest.raises(ZeroDivisionError), atomic_write(file) as partial:
        partial.write_text("half of")
        assert 1 / 0
    assert json.loads(file.read_text()) == {"a": 1}
    (tmp_path / "kept").write_text("as it is")
    with pytest.raises(ZeroDivisionError), atomic_files(tmp_path) as folder:
        (folder / "kept").write_text("half of")
        assert 1 / 0
    with atomic_files(tmp_path) as folder:
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
    folder = tmp_path / "run"
    process, _ = started(OWNS, folder)
    with pytest.raises(InputError, match=r"another process is writing into .*run'"):
        lock_folder(folder)
    killed(process)
    lock_folder(folder).release()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"can't write into .*Choose another folder"):
        lock_folder(tmp_path / "file" / "checkpoints")


@pytest.fixture
def temporary(tmp_path: Path, environment: Callable[..., None]) -> Iterator[None]:
    """Temporary files of this process and of those that it starts lie in `tmp_path`."""
    environment(TMPDIR=tmp_path)
    before, tempfile.tempdir = tempfile.tempdir, None
    yield
    tempfile.tempdir = before


@pytest.mark.usefixtures("temporary")
def test_what_killed_processes_left_in_the_temporary_folder_goes_with_the_next_one(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("temporary")
def test_what_another_machine_left_in_a_shared_temporary_folder_stays() -> None:
    """Its processes may live: their locks need not reach here."""
    mine = temporary_folder()
    of_others = [mine.with_name(mine.name.replace(platform.node(), node)) for node in ("other", f"{platform.node()}-2")]
    for folder in of_others:
        folder.mkdir()
        (folder / LOCK).touch()
    drop(temporary_folder())
    assert all((folder / LOCK).is_file() for folder in of_others)
    drop(mine)


@pytest.mark.skipif(os.name == "nt", reason="needs file modes")
def test_the_umask_is_followed_and_never_touched(tmp_path: Path) -> None:
    code = """
import os, sys, torch
os.umask = None  # threads of the program around may be making files
from pathlib import Path
from pouf.files import write_tensors
write_tensors(Path(sys.argv[1]), {"a": torch.zeros(2)})
print(oct(Path(sys.argv[1]).stat().st_mode & 0o777))
"""
    process, said = started(code, tmp_path / "a.safetensors", umask=0o027)
    assert process.wait(60) == 0 and said == "0o640"


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "a") as partial:
        (partial / "file").write_text("half of")
        assert 1 / 0
    with atomic_folder(tmp_path / "a") as partial:
        (partial / "file").write_text("a")
        assert not (tmp_path / "a").exists()
    copy(tmp_path / "a", tmp_path / "b" / "c")
    discard(tmp_path / "a")
    assert (tmp_path / "b" / "c" / "file").read_text() == "a" and [each.name for each in tmp_path.iterdir()] == ["b"]


def test_a_signal_that_comes_while_the_files_of_an_object_that_goes_are_deleted_is_not_lost() -> None:
    """Python prints errors of what it calls then, and goes on."""

    class Owner:
        pass

    folder = temporary_folder()
    weights = [folder / "0", folder / "1"]
    for file in weights:
        file.write_text("")
    owner, waiting = Owner(), set(weights)
    weakref.finalize(owner, drop, folder)

    def deletes(event: str, arguments: tuple[object, ...]) -> None:
        if waiting and event == "os.remove":
            waiting.clear()
            os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(deletes)
    with pytest.raises(SystemExit) as ended, handle_signals():
        del owner
        assert not any(file.exists() for file in weights), "the signal waits until all are deleted"
    assert ended.value.code == 143
