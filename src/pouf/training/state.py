"""What a run is between two steps, kept on disk now and then, so that one that was ended goes on from there."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pouf.errors import InputError
from pouf.files import write_tensors
from pouf.interruption import asked_to_end, by_all, ended
from pouf.parallel.process_group import processes
from pouf.parallel.shards import from_first, is_main, is_shard, write_shards
from pouf.reading import read_tensor
from pouf.training.callbacks import Callbacks, Step
from pouf.validation.checkpoints import STATE, Checkpoints

if TYPE_CHECKING:
    from pouf.training.engine import Engine

SHARE = 20  # at most one part in so many of the time goes into saving
logger = logging.getLogger(__name__)


class Stateful(Protocol):
    def __next__(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainingState:
    """Everything that the next step depends on. The learning rate follows from the number of steps."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    terms: Stateful  # of the loss: where in the data it is, the estimated prior, seeds of dropout
    checkpoints: Checkpoints | None
    callbacks: Callbacks
    history: list[Step] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """The same for all processes, each of which must call it; shards are each process's own."""
        return {
            "parameters": dict(self.engine.parameters),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.engine.scaler.state_dict(),
            "terms": self.terms.state_dict(),
            "checkpoints": self.checkpoints.state_dict() if self.checkpoints is not None else None,
            "callbacks": self.callbacks.state_dict(),
            "history": _table(self.history),
            "random": processes().gather_objects(_random_states()),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.engine.parameters.items():
            parameter.copy_(_shared_out(state["parameters"][name], parameter))
        self._load_optimizer(state["optimizer"])
        self.engine.scaler.load_state_dict(state["scaler"])
        self.terms.load_state_dict(state["terms"])
        if self.checkpoints is not None:
            self.checkpoints.load_state_dict(state["checkpoints"])
        self.callbacks.load_state_dict(state["callbacks"])
        self.history[:] = _steps(state["history"])
        _set_random_states(state["random"][processes().rank])

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """What belongs to a weight is sharded as that is."""
        own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        shared = {
            number: {name: _shared_out(value, own[number]) for name, value in each.items()}
            for number, each in state["state"].items()
        }
        self.optimizer.load_state_dict(state | {"state": shared})


class StoredTensor(NamedTuple):
    """A tensor that still lies in its file, which the first process alone can read."""

    file: str
    name: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        return read_tensor(self.file, self.name, "overwrite the run")


def _shared_out(value: Any, weight: Tensor) -> Any:
    """What was read, or is to be read now: as the weight lies where it has its shape, else whole."""
    if not isinstance(value, StoredTensor):
        return value
    if value.shape == tuple(weight.shape):
        return from_first(weight, value.read)
    return from_first(torch.empty(value.shape, device=weight.device), value.read).cpu()  # a number of steps


class Saver:
    """Saves the state of a run at an interval of time, and when a signal asks it to end.

    Args:
        folder: where; None saves nothing.
        every: seconds between two saves at least; where one takes long, they are rarer.
        about: what the run is of, by name. One of something else is not gone on with.
        sharded: weights lie in shards, and no process reads or writes all of them at once.
    """

    def __init__(
        self,
        folder: Path | None,
        every: float,
        about: dict[str, Any],
        sharded: bool = False,
    ) -> None:
        self.file = folder / STATE if folder is not None else None
        self.every, self.about, self.sharded = every, about, sharded
        self.due = time.monotonic() + every

    def read(self) -> dict[str, Any] | None:
        """The state that was saved last, if any was."""
        stored = None
        if self.file is not None and processes().is_main and self.file.is_file():
            stored = read_state(self.file, ("parameters", "optimizer") if self.sharded else ())
        stored = processes().broadcast(stored)
        if stored is None:
            return None
        check_same(stored["about"], self.about, "run")
        found: dict[str, Any] = stored["state"]
        return found

    def after_step(self, state: TrainingState) -> None:
        """All processes save, or end, after the same step."""
        save = self.file is not None and time.monotonic() >= self.due
        wanted = max(processes().gather_objects(asked_to_end() or int(save)))
        if wanted and self.file is not None:
            self.save(state)
        if wanted > 1:
            raise by_all(ended(wanted))

    def save(self, state: TrainingState) -> None:
        assert self.file is not None
        start = time.monotonic()
        whole = {"about": self.about, "state": state.state_dict()}
        if processes().is_main:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        if processes().is_main or self.sharded:
            write_state(self.file, whole)
        if state.checkpoints is not None:
            state.checkpoints.saved()
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
    if any(map(is_shard, tensors.values())):
        write_shards(file, tensors, {"state": text})
    elif is_main():
        write_tensors(file, tensors, {"state": text})


def read_state(file: Path, later: Collection[str] = ()) -> Any:
    """What `write_state` wrote; tuples come back as lists. What has these names is left in the file until asked for."""
    try:
        with safe_open(file, "pt") as stored:

            def find(name: str, now: bool) -> Any:
                shape = () if now else tuple(stored.get_slice(name).get_shape())
                return stored.get_tensor(name) if now else StoredTensor(str(file), name, shape)

            return _nested(json.loads(stored.metadata()["state"]), find, later)
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


def _nested(value: Any, find: Callable[[str, bool], Any], later: Collection[str], now: bool = True) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return find(value["tensor"], now)
        return {key: _nested(each, find, later, now and key not in later) for key, each in value["pairs"]}
    return [_nested(each, find, later, now) for each in value] if isinstance(value, list) else value


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


def _random_states() -> dict[str, Any]:
    """Of the random numbers that a backbone of the user's own may draw; what is ours has streams of its own."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random_state(random)}


def _set_random_states(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    set_random_state(random, state["python"])


def random_state(draw: Any) -> list[Any]:
    """Of a `random.Random`, as lists."""
    version, numbers, rest = draw.getstate()
    return [version, list(numbers), rest]


def set_random_state(draw: Any, state: list[Any]) -> None:
    draw.setstate((state[0], tuple(state[1]), state[2]))
