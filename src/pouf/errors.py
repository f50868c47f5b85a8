"""Exceptions, and helpers for error messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Function = TypeVar("Function", bound=Callable[..., Any])


class InputError(ValueError):
    """Invalid input: the message says what was expected, what was given and what to do.

    The command line prints it as one line and exits with 2.
    """


class Unreadable(Exception):
    """One sample can't be read; the message gives the reason. Never fatal: the sample is skipped and listed."""


class Diverged(RuntimeError):
    """The loss or its gradient stopped being a finite number.

    Weights are copied every few steps while the loss is finite, and the last copy is restored.
    """

    def __init__(self, step: int, what: str, lr: float, restored: int = 0) -> None:
        self.step, self.what, self.lr, self.restored = step, what, lr, restored
        super().__init__(
            f"{what} at step {step} is not a finite number; the weights of step {restored} were restored. "
            f"Try a learning rate below {lr:g}, or gradient clipping (clip = 1.0)."
        )


class ProcessLost(RuntimeError):
    """Another process of the same run has ended, or has not answered in time."""


def plural(n: int, noun: str) -> str:
    """`1 step`, `2,000 steps`, `2 classes`."""
    return f"{n:,} {noun if n == 1 else noun + ('es' if noun.endswith('s') else 's')}"


def one_of(what: str, name: str, choices: Mapping[str, Any]) -> Any:
    """The entry of a registry, or an error with the most similar name."""
    if name not in choices:
        raise InputError(f"unknown {what} {name!r}: choose one of {', '.join(choices)}{did_you_mean(name, choices)}")
    return choices[name]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`. Did you mean 'steps'?`, or "" if no name is similar."""
    found = get_close_matches(name, list(known), 1)
    return f". Did you mean {found[0]!r}?" if found else ""


def explain_wrong_call(hints: Mapping[str, str], options: type) -> Callable[[Function], Function]:
    """Decorate a method with `**options`, so that its `TypeError` for a wrong argument says what to give instead.

    Args:
        hints: wrong argument -> advice; "" is for too many positional arguments.
        options: the dataclass of these options: the method's signature and its `Args` have the fields.
    """

    def decorate(method: Function) -> Function:
        own = [p for p in inspect.signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD]
        others = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(options).parameters.values()]
        signature = inspect.signature(method).replace(parameters=[*own, *others])

        @wraps(method)
        def checked(*args: Any, **named: Any) -> Any:
            try:
                signature.bind(*args, **named)
            except TypeError as error:
                wrong = next((name for name in named if name not in signature.parameters), "")
                known = [name for name in signature.parameters if name != "self"]
                hint = f". {hints[wrong]}" if wrong in hints else did_you_mean(wrong, known) if wrong else ""
                raise TypeError(f"{method.__name__}() {error}{hint}") from None
            return method(*args, **named)

        arguments, raises, errors = inspect.cleandoc(method.__doc__ or "").partition("\n\nRaises:")
        fields = inspect.cleandoc(options.__doc__ or "").partition("Args:")[2]
        checked.__doc__ = arguments + fields + raises + errors
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return cast("Function", checked)

    return decorate


def optional(module: str, extra: str, purpose: str) -> Any:
    """Import an optional package, or raise an error that names its extra."""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is not None and not module.startswith(error.name.split(".")[0]):
            raise  # the package is installed, but one of its dependencies is not
        raise InputError(f'{purpose} needs {module.split(".")[0]}: pip install "pouf[{extra}]"') from None
