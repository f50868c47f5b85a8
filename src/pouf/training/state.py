"""What a run is between two steps, saved to disk at intervals, so that a run that was interrupted can be resumed."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pouf.errors import InputError
from pouf.files import write_tensors
from pouf.interruption import exit_error, mark_for_all, pending_exit_code
from pouf.parallel.fsdp import gather_optimizer, gather_weights, load_optimizer, load_weights
from pouf.parallel.process_group import processes
from pouf.training.callbacks import Callbacks, Step
from pouf.validation.checkpoints import STATE, Checkpoints

if TYPE_CHECKING:
    from pouf.losses.objective import Objective
    from pouf.training.batches import Batches
    from pouf.training.model import Engine

WEIGHTS = ("parameters", "optimizer")  # of a state
SHARE = 20  # at most one part in so many of the time goes into saving
logger = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """Everything that the next step depends on. The learning rate follows from the number of steps."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    batches: Batches  # their position in the data, and seeds of dropout
    objective: Objective  # the prior that it learns
    checkpoints: Checkpoints | None
    callbacks: Callbacks
    history: list[Step] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """The same for all processes, each of which must call it; the first one alone has weights that are sharded."""
        model, parameters, optimizer = self.engine.classifier, self.engine.parameters, self.optimizer
        sharded = self.engine.sharded
        return {
            "parameters": gather_weights(model, parameters) if sharded else dict(parameters),
            "optimizer": gather_optimizer(model, optimizer) if sharded else optimizer.state_dict(),
            "scaler": self.engine.scaler.state_dict(),
            "batches": self.batches.state_dict(),
            "objective": self.objective.state_dict(),
            "checkpoints": self.checkpoints.state_dict() if self.checkpoints is not None else None,
            "callbacks": self.callbacks.state_dict(),
            "history": _table(self.history),
            # A backbone of the user's own may draw random numbers; what is ours has streams of its own.
            "random": processes().gather_objects({"torch": torch.get_rng_state(), "python": random_state(random)}),
            "cuda": processes().gather_objects(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.engine.sharded:
            load_weights(self.engine.classifier, state.get("parameters", {}))
            load_optimizer(self.engine.classifier, self.optimizer, state.get("optimizer", {}))
        else:
            for name, parameter in self.engine.parameters.items():
                parameter.copy_(state["parameters"][name])
            self.optimizer.load_state_dict(state["optimizer"])
        self.engine.scaler.load_state_dict(state["scaler"])
        self.batches.load_state_dict(state["batches"])
        self.objective.load_state_dict(state["objective"])
        if self.checkpoints is not None:
            self.checkpoints.load_state_dict(state["checkpoints"])
        self.callbacks.load_state_dict(state["callbacks"])
        self.history[:] = _steps(state["history"])
        own = state["random"][processes().rank]
        torch.set_rng_state(own["torch"])
        set_random_state(random, own["python"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"][processes().rank])


class Saver:
    """Saves the state of a run at an interval of time, and when a signal asks it to end.

    Args:
        folder: where; None saves nothing.
        every: seconds between two saves at least; where one takes long, they are rarer.
        about: settings and data of the run; a run with others is not resumed.
        sharded: weights lie in shards, and no process reads or writes all of them at once.
    """

    def __init__(self, folder: Path | None, every: float, about: dict[str, Any], sharded: bool = False) -> None:
        self.file = folder / STATE if folder is not None else None
        self.every, self.about, self.sharded = every, about, sharded
        self.due = time.monotonic() + every

    def read(self) -> dict[str, Any] | None:
        """The state that was saved last, if any was."""
        group, stored, weights = processes(), None, {}
        if self.file is not None and group.is_main and self.file.is_file():
            stored = read_state(self.file)
            if self.sharded:  # these go from the first process to the shards of all
                weights = {name: stored["state"].pop(name) for name in WEIGHTS}
        stored = group.broadcast(stored)
        if stored is None:
            return None
        check_same(stored["about"], self.about, "run")
        found: dict[str, Any] = stored["state"] | weights
        return found

    def after_step(self, state: TrainingState) -> None:
        """All processes save, or end, after the same step."""
        save = self.file is not None and time.monotonic() >= self.due
        wanted = max(processes().gather_objects(pending_exit_code() or int(save)))
        if wanted and self.file is not None:
            self.save(state)
        if wanted > 1:
            raise mark_for_all(exit_error(wanted))

    def save(self, state: TrainingState) -> None:
        assert self.file is not None
        start = time.monotonic()
        whole = {"about": self.about, "state": state.state_dict()}
        if processes().is_main:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_state(self.file, whole)
        if state.checkpoints is not None:
            state.checkpoints.on_saved()
        now = time.monotonic()
        self.due = now + max(self.every, SHARE * (now - start))


def check_same(before: dict[str, Any], now: dict[str, Any], what: str) -> None:
    """An error that names what changed since a run or a search was ended."""
    changed = [name for name, value in now.items() if before.get(name) != value]
    if changed:
        raise InputError(
            f"can't go on with this {what}, since this has changed: {', '.join(changed)}. Restore that, or overwrite it"
        )


def write_state(file: Path, state: Any) -> None:
    """Numbers, texts, tensors, lists and dictionaries, as one file of safetensors: nothing in it can be executed."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_flat(state, tensors))
    write_tensors(file, tensors, {"state": text})


def read_state(file: Path) -> Any:
    """What `write_state` wrote; tuples come back as lists."""
    try:
        with safe_open(file, "pt") as stored:
            return _nested(json.loads(stored.metadata()["state"]), stored.get_tensor)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the state in {str(file)!r} can't be read ({error}): overwrite the run") from None


def _flat(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"pairs": [[key, _flat(each, tensors)] for key, each in value.items()]}  # keys of JSON are texts alone
    if isinstance(value, (list, tuple)):
        return [_flat(each, tensors) for each in value]
    return value


def _nested(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, dict):
        return tensor(value["tensor"]) if "tensor" in value else {k: _nested(v, tensor) for k, v in value["pairs"]}
    return [_nested(each, tensor) for each in value] if isinstance(value, list) else value


def _table(history: list[Step]) -> dict[str, Any]:
    """Steps as columns: a hundred thousand of them take megabytes and no time."""
    names = list(history[0].terms) if history else []
    rows = [[*step._replace(terms=0)[:], *step.terms.values()] for step in history]  # type: ignore[arg-type]
    return {"terms": names, "rows": torch.tensor(rows, dtype=torch.float64)}


def _steps(table: dict[str, Any]) -> list[Step]:
    plain, steps = len(Step._fields), []
    for row in table["rows"].tolist():
        step = Step(*row[:plain])
        steps.append(step._replace(step=int(step.step), terms=dict(zip(table["terms"], row[plain:], strict=True))))
    return steps


def random_state(draw: Any) -> list[Any]:
    """Of a `random.Random`, as lists."""
    version, numbers, rest = draw.getstate()
    return [version, list(numbers), rest]


def set_random_state(draw: Any, state: list[Any]) -> None:
    draw.setstate((state[0], tuple(state[1]), state[2]))
