"""A run from its first step to its last word: signals, the folder, and those who are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pouf.interruption import catching, held
from pouf.runs.states import ShardHolder
from pouf.runs.writer import RunWriter
from pouf.training.callbacks import Callback, Callbacks


@contextmanager
def run_session(writer: RunWriter | ShardHolder | None, callbacks: Sequence[Callback]) -> Iterator[None]:
    """While open, signals end the run between two steps.

    Whatever breaks it off is told to the callbacks; the folder keeps what was learned and is free for the next who
    wants it. A run that comes to its end leaves nothing to go on from.
    """
    with catching():
        try:
            yield
        except BaseException as error:
            if writer is not None:
                with held():
                    writer.give_up(error)
            Callbacks(callbacks).broke_off(error)
            raise
        if writer is not None:
            writer.close()
