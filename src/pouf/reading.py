"""Reading files with validation: text, JSON and tensors, or a clear error."""

from __future__ import annotations

import codecs
import json
import os
import stat
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from pouf.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

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


def encoding_of(start: bytes) -> str:
    """The encoding by the byte order mark at the start of a file; UTF-8 without one."""
    return next((encoding for mark, encoding in BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf-8")


def read_text(file: str | Path) -> str:
    """The text of a file in UTF-8, or in UTF-16 or UTF-32 with a mark; line ends are unchanged."""
    try:
        content = read_bytes(file)
        text = content.decode(encoding_of(content))
    except UnicodeDecodeError as error:
        invalid = f"byte {content[error.start]:#x} at {error.start}"
        raise InputError(f"{str(file)!r} is not UTF-8 text ({invalid}): save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"can't read {str(file)!r}: {error.strerror or error}") from None
    if "\0" in text:  # UTF-16 without a mark, or no text at all
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
