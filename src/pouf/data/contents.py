"""The bytes of inputs: each is read once, and its digest is computed then and remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

DIGEST_SIZE = 16  # bytes
FIXED = 2
MAX_WAITING = 32 * 2**20  # bytes that were read for their digest and wait for a decoder


def content_digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_SIZE).digest()


class Contents:
    """What lies at n positions. Bytes that were read for their digest alone wait for the next `take`.

    Args:
        read: position -> bytes, or `OSError`.
    """

    def __init__(self, n: int, read: Callable[[int], bytes]) -> None:
        self.read = read
        self.peeking = False
        self._known, self._digests = bytearray(n), bytearray(n * DIGEST_SIZE)  # 0 unknown, 1 of the bytes, 2 fixed
        self._waiting: dict[int, bytes] = {}
        self._waiting_size = 0

    def known_digest(self, index: int) -> bytes | None:
        """What `digest` would return, without reading; None where that is not known yet."""
        start = index * DIGEST_SIZE
        return bytes(self._digests[start : start + DIGEST_SIZE]) if self._known[index] else None

    def digest(self, index: int) -> bytes:
        """(16 bytes); empty where nothing can be read."""
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
            fixed: it is not of the bytes, and stays when these are read.
        """
        if self._known[index] != FIXED:
            start = index * DIGEST_SIZE
            self._digests[start : start + DIGEST_SIZE] = digest
            self._known[index] = FIXED if fixed else 1
        return digest

    def take(self, index: int) -> bytes:
        """The bytes, which wait no longer; `OSError` where they can't be read."""
        content = self._waiting.pop(index, None)
        if content is None:
            content = self.read(index)
            self.remember(index, content_digest(content))  # the file may be another than before
        else:
            self._waiting_size -= len(content)
        if self.peeking:
            self._wait(index, content)
        return content

    @contextmanager
    def peek(self) -> Iterator[None]:
        """While open, all that is taken waits for whoever takes it next."""
        self.peeking = True
        try:
            yield
        finally:
            self.peeking = False

    def _wait(self, index: int, content: bytes) -> None:
        """Where too much waits, what came first goes."""
        self._waiting_size += len(content) - len(self._waiting.pop(index, b""))
        self._waiting[index] = content
        while self._waiting_size > MAX_WAITING and len(self._waiting) > 1:
            self._waiting_size -= len(self._waiting.pop(next(iter(self._waiting))))
