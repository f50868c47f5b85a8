"""Training the prototypes themselves; for precomputed features also a linear map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.tuners.base import Target, Tuner, TunerSettings


def prototypes(target: Target, settings: TunerSettings) -> Tuner:
    """The prototypes themselves: k x d numbers. Neither encoder is trained, so every input is encoded once."""
    if (own_table := target.backbone.own_prototypes) is not None:
        return Tuner({"backbone.table": own_table}, touches_inputs=False, touches_prompts=True, keeps_base=False)
    table = target.prompt
    if not isinstance(table, PrototypeTable):
        with torch.no_grad():
            table = PrototypeTable(target.prototypes(), unit=target.backbone.unit_prototypes)
    return Tuner(
        {"prompt.table": table.table}, touches_inputs=False, touches_prompts=True, keeps_base=True, prompt=table
    )


def linear_map(target: Target, settings: TunerSettings) -> Tuner:
    """The prototypes and a linear map of the features."""
    named = {"backbone.map": target.backbone.add_map()}
    if (own_table := target.backbone.own_prototypes) is not None:
        named = {"backbone.table": own_table, **named}
    return Tuner(named, touches_inputs=True, touches_prompts=True, keeps_base=False)


class PrototypeTable(nn.Module):
    """Trainable prototypes (k, d).

    Args:
        start: (k, d), their initial values, from the text side.
        unit: normalise them; not for masked language models: their logits depend on the norms.
    """

    def __init__(self, start: Tensor, unit: bool) -> None:
        super().__init__()
        self.unit = unit
        self.table = nn.Parameter(start.detach().float().clone())

    def forward(self) -> Tensor:
        return F.normalize(self.table, dim=1) if self.unit else self.table
