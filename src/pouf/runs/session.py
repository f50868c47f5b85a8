"""A run from its first step to its last word: signals, the folder, and those who are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pouf.interruption import catching, defer_signals
from pouf.runs.states import ShardHolder
from pouf.runs.writer import RunWriter
from pouf.training.callbacks import Callback, Callbacks

Writer = RunWriter | ShardHolder


@contextmanager
def run_session(opens: Callable[[], Writer | None], told: list[Callback]) -> Iterator[Writer | None]:
    """While open, signals end the run between two steps, and wait while its folder is begun and ended.

    Whatever breaks it off is told to the callbacks; the folder keeps what was learned, with what the run can go on
    from, and is free for the next who wants it. A run that comes to its end leaves nothing to go on from.

    Args:
        told: of what happens; a writer that follows the run comes first.
    """
    writer: Writer | None = None
    with catching():
        try:
            with defer_signals():
                writer = opens()
            if isinstance(writer, RunWriter):
                told.insert(0, writer)
            yield writer
        except BaseException as error:
            if writer is not None:
                with defer_signals():
                    writer.abort(error)
            Callbacks(told).broke_off(error)
            raise
        if writer is not None:
            with defer_signals():
                writer.close()
