"""Tuners of the model's own weights: all, the upper layers, LayerNorms, or low-rank updates of linear layers (LoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pouf.errors import InputError, optional
from pouf.files import read_tensors, write_tensors
from pouf.models.base import Backbone
from pouf.models.lower_layers import LowerLayers, find_layers
from pouf.tuners.base import Target, Tuner, TunerSettings


def full(target: Target, settings: TunerSettings) -> Tuner:
    """All weights of the model, including the temperature."""
    named = {f"backbone.{name}": p for name, p in target.backbone.named_parameters()}
    return Tuner(named, touches_inputs=True, touches_prompts=True, keeps_base=False)


UPPER_SHARE = 3  # one in so many layers is tuned, where the settings do not say how many


def upper(target: Target, settings: TunerSettings) -> Tuner:
    """The last layers of a transformer, and what lies above: the head of a masked language model, but no embeddings.

    What the lower layers make of a text is computed once in a run: see `LowerLayers`.
    """
    backbone = target.backbone
    transformer = _transformer(backbone)
    tuned = {id(parameter) for parameter in find_layers(transformer)[_lower_count(backbone, settings) :].parameters()}
    below = {id(parameter) for parameter in transformer.parameters()} - tuned
    named = {f"backbone.{name}": p for name, p in backbone.named_parameters() if id(p) not in below}
    return Tuner(named, touches_inputs=True, touches_prompts=backbone.encoder_makes_prototypes, keeps_base=False)


def lower_layers(backbone: Backbone, settings: TunerSettings) -> LowerLayers | None:
    """What computes the lower layers once, where the upper ones are tuned alone; None where all change."""
    if settings.name != "upper" or backbone.sharded:
        return None
    return LowerLayers(_transformer(backbone), _lower_count(backbone, settings))


def has_upper_layers(backbone: Backbone) -> bool:
    """Whether they can be tuned alone."""
    try:
        return bool(find_layers(_transformer(backbone)))
    except InputError:
        return False


def _transformer(backbone: Any) -> nn.Module:
    if not backbone.supports_upper:
        raise InputError(f"{type(backbone).__name__} has no upper layers to tune alone: tune 'full' or 'lora' instead")
    return backbone.model.base_model  # type: ignore[no-any-return]


def _lower_count(backbone: Backbone, settings: TunerSettings) -> int:
    depth = len(find_layers(_transformer(backbone)))
    tuned = settings.layers or max(1, depth // UPPER_SHARE)
    if tuned >= depth:
        raise InputError(f"tuner.layers is {tuned}, of {depth} layers of the model: tune fewer, or 'full' for all")
    return depth - tuned


def layernorm(target: Target, settings: TunerSettings) -> Tuner:
    """Gains and biases of all LayerNorms, in both encoders."""
    norms = {
        f"backbone.{path}.{name}": parameter
        for path, module in target.backbone.named_modules()
        if isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
        for name, parameter in module.named_parameters(recurse=False)
    }
    if not norms:
        raise InputError(f"{type(target.backbone).__name__} has no LayerNorm to tune: tune 'full' or 'prompt'")
    return Tuner(norms, touches_inputs=True, touches_prompts=True, keeps_base=True)


# Names in transformers' architectures of the projections of queries and values, which the LoRA paper trains, or of the
# joint projection of queries, keys and values.
ATTENTION = (
    "q_proj", "v_proj", "query", "value", "query_proj", "value_proj", "q_lin", "v_lin", "q", "v",
    "Wqkv", "in_proj", "c_attn", "query_key_value", "qkv", "qkv_proj",
)  # fmt: skip


def lora(target: Target, settings: TunerSettings) -> Tuner:
    """A rank-r update of the attention's queries and values: 491,520 numbers at rank 8 for CLIP ViT-B/16.

    The update is 0 at the start. Saved as a peft adapter.
    """
    backbone: Any = target.backbone
    if backbone.adapter is None:
        has_model = isinstance(getattr(backbone, "model", None), nn.Module)  # of transformers, which peft supports
        backbone.adapter = _adapter(*((backbone.model, "model.") if has_model else (backbone, "")), settings)
    named = {f"backbone.{name}": parameter for name, parameter in backbone.adapter.parameters().items()}
    return Tuner(named, touches_inputs=True, touches_prompts=backbone.encoder_makes_prototypes, keeps_base=True)


def _adapter(model: nn.Module, prefix: str, settings: TunerSettings) -> Adapter:
    peft = optional("peft", "lora", "tuning with LoRA")
    linear = {name: layer for name, layer in model.named_modules() if _is_linear(layer)}
    wanted = settings.target_modules or sorted({name.split(".")[-1] for name in linear} & set(ATTENTION))
    chosen = [name for name in linear if any(f".{name}".endswith(f".{suffix}") for suffix in wanted)]
    if not chosen:
        available = ", ".join(sorted({name.split(".")[-1] for name in linear})) or "none"
        expected = f"named {' or '.join(wanted)}" if wanted else "of a known attention"
        raise InputError(
            f"{type(model).__name__} has no linear layer {expected} for LoRA to adapt: name some in "
            f"tuner.target_modules; available: {available}"
        )
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(wanted),
        fan_in_fan_out=not all(isinstance(linear[name], nn.Linear) for name in chosen),  # GPT-2's weights are (in, out)
        base_model_name_or_path=getattr(model, "name_or_path", None),
        inference_mode=True,  # for users of the folder; here the tuner selects the trained parameters
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same start for every run and process
        peft.inject_adapter_in_model(config, model)
    layers = {name: model.get_submodule(name) for name in chosen}
    return Adapter(model, prefix, layers, config)


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


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
