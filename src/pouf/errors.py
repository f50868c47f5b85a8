"""The errors that a user can cause and mend."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class InputError(ValueError):
    """Something given is not usable: the message says what was expected, what came and what to do.

    The command line prints it as one line and exits with 2.
    """


class Diverged(RuntimeError):
    """The loss or its gradient stopped being a finite number; the weights are those of the last good step."""

    def __init__(self, step: int, what: str, lr: float) -> None:
        self.step = step
        super().__init__(
            f"{what} at step {step} is not a finite number; the weights were put back to the last good step "
            f"({max(step - 1, 0)}). Try a learning rate below {lr:g}, or gradient clipping (clip = 1.0)."
        )


class ProcessLost(RuntimeError):
    """Another process of the same run has ended, or has not answered in time."""


def one_of(what: str, name: str, choices: Mapping[str, Any]) -> Any:
    """The entry of a registry, or an error that names the nearest one."""
    if name not in choices:
        raise InputError(f"unknown {what} {name!r}: choose one of {', '.join(choices)}{nearest(name, choices)}")
    return choices[name]


def nearest(name: str, known: Iterable[str]) -> str:
    """`. Did you mean 'steps'?`, or nothing where no name is near."""
    found = get_close_matches(name, list(known), 1)
    return f". Did you mean {found[0]!r}?" if found else ""


def optional(module: str, extra: str, purpose: str) -> Any:
    """A package that only this purpose needs; without it, an error that names the extra that brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is not None and not module.startswith(error.name.split(".")[0]):
            raise  # the package is there, and something that it needs itself is not
        raise InputError(f'{purpose} needs {module.split(".")[0]}: pip install "pouf[{extra}]"') from None
