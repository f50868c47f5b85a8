"""The bytes of inputs: each input is read once, and its digest is computed on the way and stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

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
