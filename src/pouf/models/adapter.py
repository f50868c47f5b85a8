"""Low-rank layers in a model, which can be removed and inserted again; without them the model is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pouf.files import write_tensors
from pouf.reading import read_tensors

# The names that peft uses, so that `PeftModel.from_pretrained` opens the folder.
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_NAME = "default"  # of the only adapter within peft's layers
PEFT_PREFIX = "base_model.model."  # of the names that peft gives to weights


class Adapter:
    """peft layers that replace some linear layers of a model: W x + alpha / rank * B A x, at first with B = 0.

    Args:
        model: the model that contains the layers.
        prefix: of the model's parameter names in the backbone.
        layers: by their paths in the model.
        config: peft's configuration, which is saved with the weights.
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
        """While open, the model has plain linear layers with the low-rank updates added to their weights."""
        before = {path: layer.base_layer.weight.detach().clone() for path, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.base_layer.weight += layer.get_delta_weight(PEFT_NAME)
        self.remove()
        try:
            yield
        finally:
            for path, layer in self.layers.items():
                layer.base_layer.weight.copy_(before[path])  # exact to the bit, unlike subtracting
            self.insert()

    def save(self, folder: Path) -> None:
        """As `PeftModel.save_pretrained` does."""
        write_tensors(folder / ADAPTER, {self._saved_name(name): tensor for name, tensor in self.parameters().items()})
        self.config.save_pretrained(str(folder))

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The tensors that `save` wrote, by the names of `parameters`."""
        known = {self._saved_name(name): name for name in self.parameters()}
        return {known.get(name, name): tensor for name, tensor in read_tensors(folder / ADAPTER).items()}

    def _saved_name(self, name: str) -> str:
        return PEFT_PREFIX + name.removeprefix(self.prefix).replace(f".{PEFT_NAME}.", ".")
