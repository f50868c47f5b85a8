"""FSDP2: the matrices of a backbone lie in parts on all processes, and are whole only where a layer is computed.

What is not a matrix (biases, gains, the temperature) and what tuners add (soft prompts, prototypes, low-rank matrices)
is small, and stays whole on every process; its gradients are averaged here.

From then on whatever computes with the backbone is computed by all processes together: each must call it equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pouf.errors import InputError
from pouf.parallel.process_group import (
    ProcessGroup,
    connection_errors,
    init_processes,
    launched_resharding,
    launched_sharding,
    launched_wrapping,
    processes,
    started_processes,
)
from pouf.parallel.shards import is_main, is_shard

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.models.base import Backbone
    from pouf.recipe import Recipe

ENTRIES = ("encode_inputs", "encode_prompts", "prototypes")  # of a backbone: what computes with its matrices


def asks_to_shard(classifier: Classifier, recipe: Recipe) -> bool:
    """Whether the recipe or the launcher wants shards. Bare vectors have no model that could be sharded."""
    wanted = recipe.compute.shard or launched_sharding()
    return wanted and started_processes() > 1 and classifier.kind != "vector"


def wait_for_shards(backbone: Backbone, device: str | torch.device) -> None:
    """Leave the weights where they were read, and say where their shards are to go: all need not fit there."""
    backbone.logit_scale.data = backbone.logit_scale.data.to(device)


def shard_classifier(classifier: Classifier) -> None:
    """Shard a classifier over all processes that were started, for prediction or before it is adapted."""
    world = init_processes(classifier.device)
    if world.size > 1 and classifier.kind != "vector" and not classifier.backbone.sharded:
        shard(classifier.backbone, world)


def sync_weights(classifier: Classifier, recipe: Recipe) -> None:
    """All processes get the weights of the first: its shards where these are asked for, else copies."""
    if asks_to_shard(classifier, recipe):
        shard_classifier(classifier)
    elif not classifier.backbone.sharded:
        processes().broadcast_weights(classifier)


@torch.no_grad()
def shard(backbone: Backbone, world: ProcessGroup) -> None:
    """Share the weights of the first process out over all, in place: layer by layer, so that no device needs room for
    more than a layer beside its shards."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise InputError(f"sharded weights need torch 2.6 or later, not {torch.__version__}") from None
    from torch.distributed.device_mesh import init_device_mesh

    device = backbone.device
    mesh = init_device_mesh(device.type, (world.size,))
    small = {parameter for parameter in backbone.parameters() if parameter.dim() < 2}
    known: set[Tensor] = set()

    def spread(part: nn.Module, reshard: bool) -> None:
        own = [
            tensor for tensor in (*part.parameters(), *part.buffers()) if tensor not in known and not is_shard(tensor)
        ]
        _take_from_first(own, device)
        known.update(own)
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, ignored_params=small)

    by_layer, names = launched_wrapping()
    for layer in _layers(backbone, names) if by_layer else ():
        spread(layer, launched_resharding())
    spread(backbone, True)
    _guard_entries(backbone)
    backbone.sharded = True


def _take_from_first(tensors: Iterable[Tensor], device: torch.device) -> None:
    """In new memory: what was mapped from a file stays there, unread."""
    with connection_errors():
        for tensor in tensors:
            fresh = tensor.detach().to(device, copy=True) if is_main() else torch.empty_like(tensor, device=device)
            dist.broadcast(fresh, 0)
            tensor.data = fresh


def _layers(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Modules of these classes; by default what stands in lists of modules, as the layers of transformers do."""
    if names:
        found = [part for part in module.modules() if type(part).__name__ in names]
        if not found:
            raise InputError(f"accelerate asks to wrap {', '.join(names)}, which this model has not")
        return found
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return [layer for each in lists for layer in each if not any(isinstance(p, nn.ModuleList) for p in layer.modules())]


def _guard_entries(backbone: Backbone) -> None:
    """Let everything that computes with the matrices pass through `forward`, where FSDP2 makes them whole."""
    inside = False

    def through_forward(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def entered(*given: Any) -> Tensor:
            nonlocal inside
            if inside:
                return compute(*given)
            inside = True
            try:
                return backbone(compute, *given)  # type: ignore[no-any-return]
            finally:
                inside = False
                if not torch.is_grad_enabled():
                    reshard(backbone)

        return entered

    for name in ENTRIES:
        setattr(backbone, name, through_forward(getattr(backbone, name)))
    if backbone.text_side is not None:
        backbone.text_side.encode_tokens = through_forward(backbone.text_side.encode_tokens)


def reshard(backbone: Backbone) -> None:
    """Nothing is whole any more, also where layers stay so between the two passes of a step."""
    from torch.distributed.fsdp import FSDPModule

    for part in backbone.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def average_gradients(parameters: Iterable[Tensor], world: ProcessGroup) -> None:
    """Of what is whole on every process, in one message."""
    plain = [parameter for parameter in parameters if not is_shard(parameter)]
    told = world.gather_objects([parameter.grad is not None for parameter in plain])
    used = [parameter for parameter, *there in zip(plain, *told, strict=True) if any(there)]
    if not used:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
    flat = torch.cat([gradient.flatten().float() for gradient in gradients])
    with connection_errors():
        dist.all_reduce(flat)
    for parameter, part in zip(used, (flat / world.size).split([g.numel() for g in gradients]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
