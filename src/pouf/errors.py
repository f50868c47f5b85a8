"""The errors that a user can cause and mend."""

from __future__ import annotations


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
