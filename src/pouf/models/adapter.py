"""Low-rank layers in a model, which can be taken out and put back: the model without them is the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pouf.files import write_tensors
from pouf.reading import read_tensors

# As peft names them, so that `PeftModel.from_pretrained` opens the folder.
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_NAME = "default"  # of the one adapter there is, within peft's layers
PEFT_PREFIX = "base_model.model."  # of peft's names for the weights of a model


class Adapter:
    """Layers of peft in the place of some linear layers of a model: W x + alpha / rank * B A x, at first with B = 0.

    Args:
        model: whose layers they are in.
        prefix: of names in it, where it is a part of a backbone.
        layers: by their paths in the model.
        config: peft's own, which is saved beside the weights.
    """

    def __init__(self, model: nn.Module, prefix: str, layers: dict[str, Any], config: Any) -> None:
        self.model, self.prefix, self.layers, self.config = model, prefix, layers, config

    def insert(self) -> None:
        self._set(self.layers)

    def remove(self) -> None:
        self._set({path: layer.base_layer for path, layer in self.layers.items()})

    def _set(self, modules: dict[str, nn.Module]) -> None:
        for path, module in modules.items():
            parent, _, name = path.rpartition(".")
            setattr(self.model.get_submodule(parent), name, module)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The low-rank matrices, by their names in the backbone."""
        return {
            f"{self.prefix}{path}.{name}": parameter
            for path, layer in self.layers.items()
            for name, parameter in layer.named_parameters()
            if f".{PEFT_NAME}." in f".{name}."
        }

    @contextmanager
    @torch.no_grad()
    def merged(self) -> Iterator[None]:
        """While open, the model has its usual layers, with the low-rank matrices multiplied out and added to them."""
        before = {path: layer.base_layer.weight.detach().clone() for path, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.base_layer.weight += layer.get_delta_weight(PEFT_NAME)
        self.remove()
        try:
            yield
        finally:
            for path, layer in self.layers.items():
                layer.base_layer.weight.copy_(before[path])  # to the bit: subtracting would not be
            self.insert()

    def save(self, folder: Path) -> None:
        """As `PeftModel.save_pretrained` does."""
        write_tensors(folder / ADAPTER, {self._saved_name(name): tensor for name, tensor in self.parameters().items()})
        self.config.save_pretrained(str(folder))

    def read(self, folder: Path) -> dict[str, Tensor]:
        """What `save` wrote, by the names of `parameters`."""
        known = {self._saved_name(name): name for name in self.parameters()}
        return {known.get(name, name): tensor for name, tensor in read_tensors(folder / ADAPTER).items()}

    def _saved_name(self, name: str) -> str:
        return PEFT_PREFIX + name.removeprefix(self.prefix).replace(f".{PEFT_NAME}.", ".")
