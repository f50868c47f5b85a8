"""FSDP2: the matrices of a backbone lie in parts on all processes, and are whole only where a layer is computed.

What is not a matrix (biases, gains, the temperature) and what tuners add (soft prompts, prototypes, low-rank matrices)
is small, and stays whole on every process; its gradients are averaged here.

All processes must compute with a sharded backbone together, equally often.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pouf.errors import InputError
from pouf.parallel.process_group import (
    ProcessGroup,
    init_processes,
    launched_resharding,
    launched_sharding,
    launched_wrapping,
    processes,
    started_processes,
)

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.models.base import Backbone
    from pouf.recipe import Recipe


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


def should_shard(classifier: Classifier, recipe: Recipe) -> bool:
    """Whether the recipe or the launcher wants shards. Bare vectors have no model that could be sharded."""
    wanted = recipe.compute.shard or launched_sharding()
    return wanted and started_processes() > 1 and classifier.kind != "vector"


def set_shard_device(backbone: Backbone, device: str | torch.device) -> None:
    """Leave the weights where they were read, and set the device of their shards: it need not have room for all."""
    backbone.logit_scale.data = backbone.logit_scale.data.to(device)


def shard_classifier(classifier: Classifier) -> None:
    """Shard a classifier over all processes that were started, for prediction or before it is adapted."""
    group = init_processes(classifier.device)
    if group.size > 1 and classifier.kind != "vector" and not classifier.backbone.sharded:
        shard(classifier.backbone, group)


def sync_weights(classifier: Classifier, recipe: Recipe) -> None:
    """Give all processes the weights of the first: as shards if the recipe says so, else as copies."""
    if should_shard(classifier, recipe):
        shard_classifier(classifier)
    elif not classifier.backbone.sharded:
        processes().broadcast_weights(classifier)


@torch.no_grad()
def shard(backbone: Backbone, group: ProcessGroup) -> None:
    """Shard the weights of the first process over all, in place: layer by layer, so that no device needs room for more
    than a layer beside its shards."""
    try:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    except ImportError:
        raise InputError(f"sharded weights need torch 2.6 or later, not {torch.__version__}") from None
    from torch.distributed.device_mesh import init_device_mesh

    device = backbone.device
    weights = backbone.state_dict() if is_main() else {}  # as they were read
    small = {parameter for parameter in backbone.parameters() if parameter.dim() < 2}
    for parameter in small:
        parameter.data = parameter.data.to(device, copy=True)
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (group.size,)), "ignored_params": small}
    by_layer, names = launched_wrapping()
    for layer in _layers(backbone, names) if by_layer else ():
        fully_shard(layer, reshard_after_forward=launched_resharding(), **options)
        if not launched_resharding():
            layer.register_forward_hook(_reshard_after_prediction)
    fully_shard(backbone, reshard_after_forward=True, **options)
    load_weights(backbone, weights)
    # Everything that computes with the matrices of the root.
    register_fsdp_forward_method(backbone, "encode_inputs")
    if not backbone.reads_prompts:
        register_fsdp_forward_method(backbone, "prototypes")
    if backbone.text_side is None:
        register_fsdp_forward_method(backbone, "encode_prompts")
    else:
        backbone.text_side.encode_tokens = partial(backbone, backbone.text_side.encode_tokens)
    backbone.sharded = True


def _layers(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Modules of these classes; by default the elements of lists of modules, such as the layers of transformers."""
    if names:
        found = [part for part in module.modules() if type(part).__name__ in names]
        if not found:
            raise InputError(f"accelerate asks to wrap {', '.join(names)}, which this model has not")
        return found
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return [layer for each in lists for layer in each if not any(isinstance(p, nn.ModuleList) for p in layer.modules())]


def _reshard_after_prediction(layer: Any, *_: Any) -> None:
    """Layers that stay whole until their backward pass must not stay so where there is none."""
    if not torch.is_grad_enabled():
        layer.reshard()


def reshard(backbone: Backbone) -> None:
    """After a step that an error has ended, layers may still be whole."""
    from torch.distributed.fsdp import FSDPModule

    for part in backbone.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def average_gradients(parameters: Iterable[Tensor], group: ProcessGroup) -> None:
    """Of what is whole on every process, in one message."""
    plain = [parameter for parameter in parameters if not is_shard(parameter)]
    by_rank = group.gather_objects([parameter.grad is not None for parameter in plain])
    used = [parameter for parameter, *has_gradient in zip(plain, *by_rank, strict=True) if any(has_gradient)]
    if not used:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
    flat = torch.cat([gradient.flatten().float() for gradient in gradients])
    dist.all_reduce(flat)
    for parameter, part in zip(used, (flat / group.size).split([g.numel() for g in gradients]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """The norm of all gradients, of shards and whole ones, before they are cut to the limit."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parts = [[g for g in gradients if is_shard(g) is sharded] for sharded in (False, True)]
    norm: Tensor = torch.stack([full_tensor(nn.utils.get_total_norm(part)) for part in parts if part]).norm()
    if math.isfinite(limit):
        for gradient in gradients:
            local(gradient).mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
