"""Weights that are sharded over processes (DTensors): put together in the first process's main memory, and back.

Every process must call what is here, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


def is_main() -> bool:
    """Whether this is the process that writes and reads files for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_shard(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> Tensor:
    """The whole of a shard on every process; any other tensor as it is."""
    return tensor.detach().full_tensor() if is_shard(tensor) else tensor  # type: ignore[no-any-return]


def local(tensor: Any) -> Tensor:
    """The part of a shard that this process has; any other tensor as it is."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[no-any-return]


def gather_weights(module: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Whole weights in the first process's main memory; the others get nothing.

    Args:
        names: of trained parameters; by default the whole `state_dict`, in which tied weights stay tied.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    trained = names is not None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained)
    state: dict[str, Any] = get_model_state_dict(module, options=options)
    if not is_main():
        return {}
    if names is not None:
        return {name: state[name] for name in names}
    own = module.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(own.items())}
    return {name: state[first[id(tensor)]] for name, tensor in own.items()}


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The inverse of `gather_weights`. Parameters without a new value keep theirs."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(module, dict(weights), options=options)


def gather_optimizer(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Its state by names of parameters, whole in the first process's main memory; the others get nothing."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(module, optimizer, options=options)


def load_optimizer(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """The inverse of `gather_optimizer`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    known = [list(state["state"]) if is_main() else []]
    dist.broadcast_object_list(known, 0)
    if not known[0]:  # without momentum there is nothing to load
        return
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_optimizer_state_dict(module, optimizer, state, options=options)
    # torch gives every parameter a state, also those that no step has used yet.
    for name, parameter in module.named_parameters():
        if name not in known[0]:
            optimizer.state.pop(parameter, None)
