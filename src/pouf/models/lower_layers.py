"""The lower layers of a transformer that a run does not train: each text goes through them once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pouf.errors import InputError
from pouf.models.base import Tensors, evaluating

MEMORY = 2**30  # bytes of outputs: 2,400 texts, a run of the preset, of 256 tokens of 384 numbers are 0.94 GB
PROBE = [[5, 6, 7, 8]]  # token ids with which the parts are compared with the whole


def find_layers(transformer: nn.Module) -> nn.ModuleList:
    """The stack of layers, each with weights of its own."""
    depth = getattr(getattr(transformer, "config", None), "num_hidden_layers", 0)
    for module in transformer.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth > 1:
            return module
    raise InputError(_refusal(transformer, "has no list of layers with weights of their own"))


def last_hidden_state(transformer: nn.Module, tokens: Tensors, options: Mapping[str, Any] = {}) -> Tensor:
    """(n, length, h), from tokens (n, length).

    Args:
        options: of the call of a model whose layers all change.
    """
    lower = None
    if not torch.compiler.is_compiling() and _open and not transformer.training:  # dropout changes each pass
        lower = _open.get(_key(transformer))
    output: Tensor | None = lower(transformer, tokens) if lower is not None else None
    return transformer(**tokens, **options).last_hidden_state if output is None else output


class LowerLayers:
    """h(x) = layer_m(… layer_1(embed(x))) for a text x, by its token ids.

    Each text goes through by itself and without padding. So h(x) depends neither on the batch that x came in nor on
    what was computed before, and a run that is resumed takes the same steps to the bit.

    Args:
        count: of the layers, from the lowest, whose weights do not change.
        memory: bytes of outputs that are kept; of further texts they are computed each time.
    """

    def __init__(self, transformer: nn.Module, count: int, memory: int = MEMORY) -> None:
        self.key, self.count, self.room = _key(transformer), count, memory
        self.depth = len(find_layers(transformer))
        self.outputs: dict[bytes, Tensor] = {}  # (length, h) of a text, by the digest of its tokens
        self.rest: tuple[Any, ...] | None = None  # what a layer returns beside its hidden state; None where nothing
        ids = torch.tensor(PROBE, device=next(transformer.parameters()).device)
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad(), evaluating(transformer):
            parts, whole = self(transformer, tokens), transformer(**tokens).last_hidden_state
        if parts is None or not torch.allclose(parts, whole, rtol=1e-3, atol=1e-4):
            raise InputError(_refusal(transformer, "does not pass texts from layer to layer alone"))

    def __call__(self, transformer: nn.Module, tokens: Tensors) -> Tensor | None:
        """(n, length, h), differentiable by the upper layers; None for inputs that are not rows of tokens."""
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        others = [tensor for name, tensor in sorted(tokens.items()) if name != "attention_mask"]
        lengths = mask.ne(0).sum(1)
        on_the_right = torch.equal(mask.ne(0), torch.arange(ids.shape[1], device=ids.device) < lengths[:, None])
        if not on_the_right or not lengths.all() or any(tensor.shape != ids.shape for tensor in others):
            return None
        facts = f"{_precision(ids.device)} {sorted(tokens)}".encode()
        numbers = torch.stack(others, 1).cpu()  # (n, tensors, length)
        rows = []
        for row, length in enumerate(lengths.tolist()):
            key = blake2b(facts + numbers[row, :, :length].numpy().tobytes(), digest_size=16).digest()
            if (output := self.outputs.get(key)) is None:
                text = {name: tensor[row : row + 1, :length] for name, tensor in tokens.items()}
                output = self._lower(transformer, text)
                if output.nbytes <= self.room:
                    self.room -= output.nbytes
                    self.outputs[key] = output
            rows.append(output)
        hidden = pad_sequence(rows, batch_first=True)
        return self._upper(transformer, tokens, F.pad(hidden, (0, 0, 0, ids.shape[1] - hidden.shape[1])))

    @torch.no_grad()
    def _lower(self, transformer: nn.Module, text: Tensors) -> Tensor:
        """(length, h), of one text."""
        layers, outputs = find_layers(transformer), []
        last = layers[self.count - 1].register_forward_hook(lambda layer, given, output: outputs.append(output))
        try:
            with _returning(layers[self.count :], lambda: outputs[0]):
                transformer(**text)
        finally:
            last.remove()
        if isinstance(outputs[0], tuple):
            self.rest = outputs[0][1:]
            return outputs[0][0][0]  # type: ignore[no-any-return]
        return outputs[0][0]  # type: ignore[no-any-return]

    def _upper(self, transformer: nn.Module, tokens: Tensors, hidden: Tensor) -> Tensor:
        output = hidden if self.rest is None else (hidden, *self.rest)
        with _returning(find_layers(transformer)[: self.count], lambda: output):
            return transformer(**tokens).last_hidden_state  # type: ignore[no-any-return]


_open: WeakKeyDictionary[torch.UntypedStorage, LowerLayers] = WeakKeyDictionary()


@contextmanager
def using(lower: LowerLayers | None) -> Iterator[None]:
    """While open, the lower layers of its model, and of all that share these weights in memory, are computed once."""
    if lower is None:
        yield
        return
    _open[lower.key] = lower
    try:
        yield
    finally:
        del _open[lower.key]


def _key(transformer: nn.Module) -> torch.UntypedStorage:
    """The memory of the first weight: copies of a classifier have the lower layers there too."""
    return next(find_layers(transformer)[0].parameters()).untyped_storage()


@contextmanager
def _returning(layers: nn.ModuleList, output: Callable[[], Any]) -> Iterator[None]:
    """While open, these layers compute nothing and return this."""
    before = [vars(layer).get("forward") for layer in layers]  # that accelerate may have set
    for layer in layers:
        layer.forward = lambda *args, **kwargs: output()
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def _precision(device: torch.device) -> str:
    return str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "own"


def _refusal(transformer: nn.Module, why: str) -> str:
    return f"{type(transformer).__name__} {why}, so its upper layers can't be tuned alone: tune 'full' or 'lora'"
