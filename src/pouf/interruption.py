"""Signals that end a run: Ctrl-C, and what `timeout`, Slurm and Kubernetes send. They wait until a step is whole.

SIGINT ends in a KeyboardInterrupt as ever, SIGTERM and SIGHUP in a SystemExit with the code that shells know (143 and
129), so that files are closed and what was learned is saved on the way out.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pouf.errors import Diverged

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
INTERRUPTED = 128 + signal.SIGINT  # what a shell reports for Ctrl-C
FOR_ALL = "for_all_processes"  # of an error: all processes raise it after the same step
WAIT = b"\nending after this step; once more ends at once\n"


class ImmediateExit(KeyboardInterrupt):
    """The second Ctrl-C: nothing is to be saved."""


_deferring = 0  # how many `defer_signals` are open
_waiting = 0  # the exit code of a signal that arrived meanwhile


@contextmanager
def handle_signals() -> Iterator[None]:
    """While open, signals end what goes on here in order. Those that somebody else handles or ignores stay theirs."""
    global _waiting
    usual = (signal.SIG_DFL, signal.default_int_handler)
    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if ours and signal.getsignal(number) in usual}
    for number in before:
        signal.signal(number, _on_signal)
    try:
        yield
    except BaseException:
        _waiting = _waiting if _deferring else 0  # this ends what goes on as well
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with defer_signals():  # one that was passed on ends here at the latest
        pass


@contextmanager
def defer_signals(pass_on: bool = False) -> Iterator[None]:
    """While open, a first signal waits for the end of this, or for someone who asks `pending_exit_code`.

    Args:
        pass_on: it waits for the end of the next such block instead: for what Python calls when an object goes, where
            an error would be lost.
    """
    global _deferring, _waiting
    _deferring += 1
    try:
        yield
        code = 0 if pass_on else _waiting
    except BaseException:
        code = 0  # this ends what goes on as well
        raise
    finally:
        _deferring -= 1
        if not _deferring and not pass_on:
            _waiting = 0
    if code and not _deferring:
        raise exit_error(code)


def pending_exit_code() -> int:
    """The exit code of the signal that arrived, or 0."""
    return _waiting


def exit_error(code: int) -> BaseException:
    return KeyboardInterrupt() if code == INTERRUPTED else SystemExit(code)


def mark_for_all(error: BaseException) -> BaseException:
    """Mark an error as one that all processes of a run raise after the same step."""
    setattr(error, FOR_ALL, True)
    return error


def ends_all_processes(error: BaseException) -> bool:
    return getattr(error, FOR_ALL, False) or isinstance(error, Diverged)


def _on_signal(number: int, frame: Any) -> None:
    global _waiting
    if _deferring and not _waiting:
        _waiting = 128 + number
        if os.isatty(2):
            os.write(2, WAIT)  # not by way of a stream, which may be in the middle of something
    elif not _deferring:
        raise exit_error(128 + number)
    elif number == signal.SIGINT:  # others come twice: to all of a group, and again from the one that launched them
        raise ImmediateExit
