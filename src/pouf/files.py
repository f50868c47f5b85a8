"""Files that are complete or not there at all, folders that one process locks, and reading with validation.

Everything that is written goes through here: first under another name in the same folder, then to the disk, then in one
move to its place. A process that is killed in between leaves the file as it was, and at most a hidden `*.partial`.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from pouf.errors import InputError
from pouf.interruption import defer_signals

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
PARTIAL, LOCK = ".partial", ".lock"
# With the name of the machine: another one may share the folder, and locks of its processes need not reach here.
TEMPORARY = f"pouf-checkpoints-{re.sub(r'[^A-Za-z0-9.-]', '_', platform.node())}-"


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """A name to write to; what was written there takes the place of `file` at the end, unless an error came first."""
    if file.exists() and not file.is_file():  # /dev/stdout, or a pipe: there is nothing to replace
        yield file
        return
    partial = hidden_name(file)
    try:
        yield partial
        _to_disk(partial)
        os.replace(partial, file)
        _to_disk(file.parent)
    except OSError as error:
        if error.errno is not None and str(error.filename) == str(partial):  # a name that nobody knows
            raise OSError(error.errno, error.strerror, str(file)) from None
        raise
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def atomic_files(folder: Path) -> Iterator[Path]:
    """A folder to write several files to; at the end each takes its place in `folder`, which may hold others."""
    with tempfile.TemporaryDirectory(PARTIAL, ".", folder) as partial:
        yield Path(partial)
        for file in Path(partial).rglob("*"):
            if file.is_file():
                copy(file, folder / file.relative_to(partial))


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which has its name once all of it is on the disk. Nothing may have that name before."""
    partial = hidden_name(folder)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _to_disk(path)
        partial.rename(folder)
        _to_disk(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a folder; whoever is killed in between has it as it was, or not at all."""
    if folder.is_dir():
        partial = hidden_name(folder)
        folder.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def remove(path: Path) -> None:
    """A file, a link or a folder, if it is there."""
    discard(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def copy(source: Path, target: Path) -> None:
    """A file or a folder under a second name, without a second copy of the bytes where the disk can do that."""
    if source.is_dir() and not source.is_symlink():
        target.mkdir(parents=True, exist_ok=True)
        for child in source.iterdir():
            copy(child, target / child.name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as partial:
        try:
            os.link(source, partial, follow_symlinks=False)
        except (OSError, NotImplementedError):  # not on this disk
            shutil.copy2(source, partial, follow_symlinks=False)


def check_named(folder: str | Path) -> None:
    """An error for an empty name, which would be the current folder."""
    if not str(folder).strip():
        raise InputError("the name of the folder is empty: give one; the current folder is '.'")


def check_writable(file: Path) -> None:
    """The folder of a file to come, made if need be; an error where the file can't be written there."""
    above = next((parent for parent in file.parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise InputError(f"can't write {str(file)!r}: {str(above)!r} is a file, not a folder. Choose another place")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"can't write {str(file)!r}: {error}. Choose another place") from None
    if file.is_dir():
        raise InputError(f"can't write {str(file)!r}, which is a folder: give the name of a file")


def write_text(file: Path, text: str) -> None:
    with atomic_write(file) as partial:
        partial.write_text(text, encoding="utf-8", newline="")


def write_json(file: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # the name of a folder need not be UTF-8
        text = json.dumps(value, indent=2)
    write_text(file, text + "\n")


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """As safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_write(file) as partial:
        partial.touch()
        mode = stat.S_IMODE(partial.stat().st_mode)  # of any new file; the library makes it the owner's alone
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            save_file(plain, partial, metadata)
        except SafetensorError as error:  # its own name for a full disk
            raise OSError(f"can't write {str(file)!r}: {error}") from None
        partial.chmod(mode)


def clear_partial(folder: Path) -> None:
    """What a killed process left half written. For the owner of the folder alone."""
    for left in folder.rglob(f".*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def lock_folder(folder: Path) -> FileLock:
    """The right to write into a folder, until it is released or the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"another process is writing into {str(folder)!r}: wait for its end, or choose another folder"
        ) from None
    except OSError as error:
        raise InputError(f"can't write into {str(folder)!r}: {error}. Choose another folder") from None
    return lock


_temporary: dict[Path, FileLock] = {}  # those of this process


def temporary_folder() -> Path:
    """A new folder for this process alone, to be given to `drop`; first go those whose processes have been killed."""
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{TEMPORARY}*"):
        of_others = left in _temporary or "-" in left.name.removeprefix(TEMPORARY)  # of a machine with a longer name
        if not of_others and (left / LOCK).is_file():
            with suppress(InputError):  # its owner lives, or it is another user's
                lock = lock_folder(left)
                shutil.rmtree(left, ignore_errors=True)
                lock.release()
    # Under its final name only once it is locked: otherwise another process might take it for left behind.
    made = Path(tempfile.mkdtemp(prefix=f".{TEMPORARY}"))
    lock = lock_folder(made)
    folder = made.with_name(made.name[1:])
    made.rename(folder)
    _temporary[folder] = lock
    return folder


def drop(folder: Path) -> None:
    """A folder that is not needed any more.

    Signals wait: an error in what Python calls when an object goes is lost, and the rest would stay.
    """
    with defer_signals(pass_on=True):
        shutil.rmtree(folder, ignore_errors=True)
        if (lock := _temporary.pop(folder, None)) is not None:
            lock.release()


def hidden_name(path: Path) -> Path:
    """A new name in the same folder, by which `clear_partial` finds what was left behind."""
    return path.with_name(f".{uuid.uuid4().hex[:12]}{PARTIAL}")


def _to_disk(path: Path) -> None:
    """Wait until the disk has it: a move that outlives a power cut must not outlive what it moved."""
    if os.name == "nt" and path.is_dir():
        return  # Windows can't open folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


T = TypeVar("T")

# Byte order marks; UTF-32's come first, since they begin with UTF-16's.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_bytes(file: str | Path) -> bytes:
    """The content of a regular file; pipes and devices are refused, since reading them may not end."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError("not a regular file")
    return Path(file).read_bytes()


def encoding_of(start: bytes, guess: bool = False) -> str:
    """The encoding by the byte order mark at the start of a file; UTF-8 without one.

    Args:
        guess: find UTF-16 without a mark by its zeros.
    """
    marked = next((encoding for mark, encoding in BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf-8")
    if not guess or marked != "utf-8":
        return marked
    pairs = len(start) // 2
    zeros_first, zeros_second = start[0 : 2 * pairs : 2].count(0), start[1 : 2 * pairs : 2].count(0)
    if max(zeros_first, zeros_second) > 0.3 * pairs and min(zeros_first, zeros_second) < 0.1 * pairs:
        return "utf-16-be" if zeros_first > zeros_second else "utf-16-le"
    return marked


def _decode_windows_1252(content: bytes) -> str | None:
    """Decode as Windows-1252, which Excel writes in much of Europe; None if the bytes look like something else."""
    letters = sum(byte >= 0x80 or chr(byte).isalpha() for byte in content)
    beyond_ascii = sum(byte >= 0x80 for byte in content)
    half_utf8 = re.search(rb"[\xc2-\xf4][\x80-\xbf]", content)
    if b"\0" in content or half_utf8 is not None or beyond_ascii > 0.3 * letters:
        return None
    try:
        return content.decode("cp1252")
    except UnicodeDecodeError:
        return None


def read_text(file: str | Path, guess: bool = False) -> str:
    """The text of a file in UTF-8, or in UTF-16 or UTF-32 with a mark; line ends are unchanged.

    Args:
        guess: also UTF-16 without a mark, and Windows-1252 with a warning, by the look of the bytes.
    """
    try:
        content = read_bytes(file)
    except OSError as error:
        raise InputError(f"can't read {str(file)!r}: {error.strerror or error}") from None
    encoding = encoding_of(content[:4096], guess)
    try:
        text = content.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        why = f"line {line}: {error.reason}"
        if guess and encoding == "utf-8" and (decoded := _decode_windows_1252(content)) is not None:
            logger.warning(
                "%s is not UTF-8 (%s) and was read as Windows-1252. If letters look wrong, save it as UTF-8.", file, why
            )
            return decoded
        raise InputError(f"{str(file)!r} is not {encoding.upper()} text ({why}): save it as UTF-8") from None
    if not guess and "\0" in text:  # UTF-16 without a mark, or no text at all
        raise InputError(f"{str(file)!r} is not UTF-8 text (it contains zero bytes): save it as UTF-8")
    return text


def read_json(file: str | Path, kind: type[T], remedy: str = "restore it, or adapt again") -> T:
    """The value of a JSON file, validated as `kind` (any type that pydantic supports), or an error.

    Args:
        remedy: advice for the error message.
    """
    try:
        return TypeAdapter(kind).validate_python(json.loads(read_text(file)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = f"{where}: {first['msg']}" if where else first["msg"]
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise InputError(f"{str(file)!r} is damaged ({why}): {remedy}")


def read_tensors(file: str | Path, remedy: str = "restore it, or adapt again") -> dict[str, Tensor]:
    """The tensors of a safetensors file, all of them finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{str(file)!r} can't be read ({error}): {remedy}") from None
    check_finite(tensors, repr(str(file)))
    return tensors


def check_finite(tensors: dict[str, Tensor], source: str) -> None:
    """Raise an error if a tensor contains NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InputError(f"{source}: {name!r} contains numbers that are not finite: download it again")


def file_digest(file: Path) -> str:
    """A fingerprint of a file's content."""
    digest = blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()
