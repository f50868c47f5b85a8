"""Files as they come: texts in a known encoding, JSON and tensors that are what they should be, or a clear error."""

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

# What a file says of its encoding with its first bytes; UTF-32's mark begins as UTF-16's does.
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_bytes(file: str | Path) -> bytes:
    """The content of a regular file: a pipe would be waited for, and a device may have no end."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError("not a regular file")
    return Path(file).read_bytes()


def encoding_of(start: bytes) -> str:
    """By the mark at the start of a file: UTF-16 or UTF-32; without one, UTF-8."""
    return next((encoding for mark, encoding in MARKS.items() if start.startswith(mark)), "utf-8")


def read_text(file: str | Path) -> str:
    """The text of a file in UTF-8, or in UTF-16 or UTF-32 with a mark; lines end as they do there."""
    try:
        content = read_bytes(file)
        text = content.decode(encoding_of(content))
    except UnicodeDecodeError as error:
        came = f"byte {content[error.start]:#x} at {error.start}"
        raise InputError(f"{str(file)!r} is not UTF-8 text ({came}): save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"can't read {str(file)!r}: {error.strerror or error}") from None
    if "\0" in text:  # UTF-16 without a mark, or no text at all
        raise InputError(f"{str(file)!r} is not UTF-8 text (it holds zero bytes): save it as UTF-8")
    return text


def read_json(file: str | Path, kind: type[T], remedy: str = "restore it, or adapt again") -> T:
    """A file that holds what `kind` describes (anything that pydantic can check), or an error that says what is wrong.

    Args:
        remedy: what the reader can do.
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
    """An error where one of them holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InputError(f"{source}: {name!r} holds numbers that are not finite: download it again")


def file_digest(file: Path) -> str:
    """A fingerprint of a file's content."""
    digest = blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()
