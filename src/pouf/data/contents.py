"""The bytes of inputs and their digests, each read once; inputs in object stores and on servers, through fsspec.

Of addresses such as `s3://…`, `hf://…` and `https://…`: a folder of images is listed, and each image is read when it is
needed. A single file (texts, vectors, a tar archive) is copied once into the cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from pouf.errors import InputError
from pouf.files import atomic_write

DIGEST_SIZE = 16  # bytes
FIXED = 2
MAX_WAITING = 32 * 2**20  # bytes that were read for their digest and wait for the decoder


def content_digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_SIZE).digest()


class Contents:
    """The bytes of n inputs. Those that were read for their digest are stored for the next `take`.

    Args:
        read: index -> bytes, or `OSError`.
    """

    def __init__(self, n: int, read: Callable[[int], bytes]) -> None:
        self.read = read
        self.peeking = False
        self._known, self._digests = bytearray(n), bytearray(n * DIGEST_SIZE)  # 0 unknown, 1 of the bytes, 2 fixed
        self._waiting: dict[int, bytes] = {}
        self._waiting_size = 0

    def known_digest(self, index: int) -> bytes | None:
        """The result of `digest` without reading; None if it is not known yet."""
        start = index * DIGEST_SIZE
        return bytes(self._digests[start : start + DIGEST_SIZE]) if self._known[index] else None

    def digest(self, index: int) -> bytes:
        """The digest (16 bytes); empty if the input can't be read."""
        known = self.known_digest(index)
        if known is not None:
            return known
        try:
            content = self.read(index)
        except OSError:
            return b""
        self._wait(index, content)
        return self.remember(index, content_digest(content))

    def remember(self, index: int, digest: bytes, fixed: bool = False) -> bytes:
        """A digest that was computed elsewhere, by another process for example.

        Args:
            fixed: it is not a hash of the bytes, and stays when these are read.
        """
        if self._known[index] != FIXED:
            start = index * DIGEST_SIZE
            self._digests[start : start + DIGEST_SIZE] = digest
            self._known[index] = FIXED if fixed else 1
        return digest

    def take(self, index: int) -> bytes:
        """The bytes, which are then no longer stored; `OSError` if they can't be read."""
        content = self._waiting.pop(index, None)
        if content is None:
            content = self.read(index)
            self.remember(index, content_digest(content))  # the file may have changed
        else:
            self._waiting_size -= len(content)
        if self.peeking:
            self._wait(index, content)
        return content

    @contextmanager
    def peek(self) -> Iterator[None]:
        """While open, bytes stay available after `take` for the next one."""
        self.peeking = True
        try:
            yield
        finally:
            self.peeking = False

    def _wait(self, index: int, content: bytes) -> None:
        """Keep bytes; above the limit the oldest are dropped."""
        self._waiting_size += len(content) - len(self._waiting.pop(index, b""))
        self._waiting[index] = content
        while self._waiting_size > MAX_WAITING and len(self._waiting) > 1:
            self._waiting_size -= len(self._waiting.pop(next(iter(self._waiting))))


# `Path` merges two slashes into one. A single letter is a Windows drive.
URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
LOCAL_SCHEMES = ("file", "local", "memory")  # their paths begin with a slash
CONTENT_FIELDS = ("ETag", "md5Hash", "blob_id")  # fields of a listing that change with a file's content


class RemoteFile(NamedTuple):
    """A remote file, as listed."""

    url: str
    size: int  # bytes, -1 if unknown
    mark: str  # changes with the content; empty if unknown

    def read_bytes(self) -> bytes:
        filesystem, path = _open_filesystem(self.url)
        with filesystem.open(path, "rb") as stream:
            return stream.read()  # type: ignore[no-any-return]

    def digest(self) -> bytes:
        """A fingerprint from the store's metadata, without reading the file."""
        return content_digest(f"{self.mark} {self.size}".encode())


def as_url(path: str | Path) -> str | None:
    """The URL of a remote path; None for a path on this machine."""
    found = URL.fullmatch(str(path))
    if found is None:
        return None
    scheme, rest = found.groups()
    return f"{scheme}://{'/' if scheme in LOCAL_SCHEMES else ''}{rest}"


def files_below(url: str, endings: Sequence[str]) -> Iterator[tuple[str, RemoteFile]]:
    """Files with these endings below a remote folder (or one such file), by relative name, sorted."""
    filesystem, root = _open_filesystem(url)
    try:
        found: dict[str, dict[str, Any]] = filesystem.find(root, detail=True)
    except Exception as error:  # each store has errors of its own
        raise InputError(f"can't list {url!r}: {error or type(error).__name__}") from None
    for path in sorted(found):
        name = path.removeprefix(root).lstrip("/") or path.rsplit("/", 1)[-1]
        hidden = any(part.startswith(".") for part in name.split("/"))
        if name.lower().endswith(tuple(endings)) and not hidden:
            facts = found[path]
            size = facts.get("size")
            mark = next((str(facts[fact]) for fact in CONTENT_FIELDS if facts.get(fact)), "")
            yield name, RemoteFile(filesystem.unstrip_protocol(path), -1 if size is None else int(size), mark)


def local_copy(path: str | Path) -> Path:
    """The path of a local file, or of a remote file's copy in the cache: each version is copied once."""
    url = as_url(path)
    if url is None:
        if os.path.islink(path) and not os.path.exists(path):
            raise InputError(f"{str(path)!r} is a link to {os.readlink(path)!r}, which does not exist")
        return Path(path)
    filesystem, remote_path = _open_filesystem(url)
    try:
        facts = filesystem.info(remote_path)
        version = [str(facts.get(fact)) for fact in (*CONTENT_FIELDS, "size", "mtime", "LastModified", "created")]
        name = blake2b(" ".join([url, *version]).encode(), digest_size=16).hexdigest()
        folder = Path(os.environ.get("POUF_CACHE") or Path.home() / ".cache" / "pouf").expanduser() / "files" / name
        file = folder / url.rsplit("/", 1)[-1]
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as partial:
                filesystem.get_file(remote_path, str(partial))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"can't read {url!r}: {error or type(error).__name__}") from None
    return file


def _open_filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:  # the message names the package that is missing, or the unknown scheme
        raise InputError(f"can't open {url!r}: {error}") from None
