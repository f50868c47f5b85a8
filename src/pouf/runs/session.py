"""A run from its first step to its last: signals, the folder, and the callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pouf.interruption import catching, defer_signals
from pouf.runs.states import ShardHolder
from pouf.runs.writer import RunWriter
from pouf.training.callbacks import Callback, Callbacks

Writer = RunWriter | ShardHolder


class Session:
    """A run under way, which may have a folder."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self.callbacks = callbacks
        self.writer: Writer | None = None

    def open(self, opens: Callable[[], Writer | None]) -> Writer | None:
        """The folder of the run; a writer that follows the steps is the first of the callbacks."""
        with defer_signals():
            self.writer = opens()
        if isinstance(self.writer, RunWriter):
            self.callbacks.insert(0, self.writer)
        return self.writer


@contextmanager
def run_session(callbacks: list[Callback]) -> Iterator[Session]:
    """While open, signals end the run between two steps, and wait while its folder is begun and finished.

    Callbacks are called with whatever error ends it; the folder keeps what was learned, with what the run can be
    resumed from, and is unlocked. A run that has finished leaves nothing to resume.
    """
    session = Session(callbacks)
    with catching():
        try:
            yield session
        except BaseException as error:
            if session.writer is not None:
                with defer_signals():
                    session.writer.abort(error)
            Callbacks(callbacks).broke_off(error)
            raise
        if session.writer is not None:
            with defer_signals():
                session.writer.close()
