"""What a model must offer to be adapted. Bring your own: subclass `Backbone` and pass it to `Classifier`."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.data.base import Modality, Unlabelled
from pouf.data.class_names import ClassSet
from pouf.errors import InputError
from pouf.files import write_tensors
from pouf.models.adapter import Adapter
from pouf.models.prompts import DEFAULT_TEMPLATES, check_distinct, check_templates, fill
from pouf.models.text_side import TextSide
from pouf.parallel.shards import full
from pouf.reading import read_tensors
from pouf.recipe import Kind

Tensors = dict[str, Tensor]

# Of a config of transformers: where it came from, not what it computes.
UNIMPORTANT = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


class Scores(NamedTuple):
    """How n inputs and k classes match."""

    sim: Tensor  # (n, k), cosine similarity of features and prototypes
    logits: Tensor  # (n, k), what the model predicts with
    temperature: Tensor  # scalar, T of the transport plan


class Backbone(nn.Module, ABC):
    """A dual encoder: inputs and class prompts, each to a vector of the same space.

    A model of your own needs three methods and one attribute. This one compares the mean colour of an image with
    rows of a table, one per word:

        class Colours(Backbone):
            modality = "image"  # or "text"

            def __init__(self):
                super().__init__()
                self.logit_scale = nn.Parameter(torch.tensor(2.66))  # log(1/T); a buffer if it is not trained
                self.table = nn.Embedding.from_pretrained(torch.eye(3), freeze=False)

            def prepare(self, samples):  # PIL images or strings -> named tensors on the CPU, first dimension n
                colours = [np.asarray(image.resize((1, 1)), dtype=np.float32).reshape(3) / 255 for image in samples]
                return {"colour": torch.from_numpy(np.stack(colours))}

            def encode_inputs(self, batch):  # those tensors, on the model's device -> (n, d)
                return batch["colour"]

            def encode_prompts(self, prompts):  # m sentences -> (m, d)
                rows = [next(i for i, word in enumerate(("red", "green", "blue")) if word in p) for p in prompts]
                return self.table(torch.tensor(rows, device=self.device))

        classifier = Classifier(Colours(), ["red", "green", "blue"])

    Vectors need no normalisation. Anything registered as a parameter is trained by `full`, LayerNorms by `layernorm`.
    For `prompt`, also set `text_side`; for cropped views of images, also set `image_size`; if features depend on
    settings that are no weights, also tell them in `preprocessing`.
    """

    modality: Modality
    logit_scale: Tensor
    image_size: int | None = None
    text_side: TextSide | None = None
    added_by_tuners: tuple[str, ...] = ("adapter",)  # attributes that are set once a tuner asks for them

    # What a kind of model can do. A subclass declares where it differs, and nobody asks for its class.
    columns: tuple[str, ...] = ("text",)  # of a table of texts, that make a sample
    reads_names: bool = True  # it can encode names that are none of its classes
    unit_prototypes: bool = True  # their lengths have no meaning
    encoder_makes_prototypes: bool = True  # low-rank layers in it change them
    saved_whole: bool = False  # there is no base model beside it that could be loaded again
    supports_demonstrations: bool = False  # it reads solved examples beside a sample
    supports_windows: bool = False  # it can read long texts in windows
    windows: bool = False  # and does
    supports_suffix: bool = False  # it can answer with a sentence after each text: see `MaskedLM.with_suffix`

    sharded: bool = False  # its matrices lie in parts on several processes, which compute with them together
    _adapter: Adapter | None = None

    def forward(self, compute: Callable[..., Tensor], *given: Any) -> Tensor:
        """One of its computations: where weights are sharded, they are whole while it goes on."""
        return compute(*given)

    @abstractmethod
    def prepare(self, samples: Sequence[Any]) -> Tensors:
        """Raw samples to tensors on the CPU, each with first dimension n."""

    @abstractmethod
    def encode_inputs(self, batch: Tensors) -> Tensor:
        """(n, d), differentiable."""

    @abstractmethod
    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """(m, d), differentiable."""

    @property
    def adapter(self) -> Adapter | None:
        """The low-rank layers that are in the model now, if any; setting it puts them in, or takes them out."""
        return self._adapter

    @adapter.setter
    def adapter(self, adapter: Adapter | None) -> None:
        if self._adapter is not None:
            self._adapter.remove()
        if adapter is not None:
            adapter.insert()
        self._adapter = adapter

    def ready_features(self, data: Unlabelled) -> Tensor | None:
        """(n, d) where the data are features already, for all samples and without a copy; None otherwise."""
        return None

    def prototypes(self, prompts: Sequence[Sequence[str]]) -> Tensor:
        """The mean over the prompts of each class: k lists of sentences -> (k, d), each of length 1."""
        encoded = F.normalize(self.encode_prompts([prompt for own in prompts for prompt in own]), dim=1)
        return F.normalize(class_means(encoded, [len(own) for own in prompts]), dim=1)

    @property
    def kind(self) -> Kind:
        """What decides which recipe is the default."""
        return self.modality

    def check_question(self, classes: ClassSet, templates: Sequence[str] | None) -> tuple[str, ...]:
        """The templates to use for these classes, or an error where model, classes and templates do not go together."""
        usual = DEFAULT_TEMPLATES[self.modality] if classes.descriptions is None else ("{}",)
        checked = check_templates(usual if templates is None else templates)
        if self.text_side is not None:
            check_distinct(self.text_side, classes, checked)
        return checked

    def can_name(self, name: str) -> bool:
        """Whether a name can be a class of this model."""
        return self.reads_names

    def name_prototypes(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """(m, d), each of length 1 if `unit_prototypes`: names as if they were classes, by the weights of now."""
        return self.prototypes([fill(templates, name) for name in names])

    def add_input_prompt(self, words: str) -> nn.Parameter | None:
        """Trainable vectors before each input; None where a prompt stands on the text side."""
        return None

    @property
    def own_prototypes(self) -> nn.Parameter | None:
        """(k, d), where they are weights of this model."""
        return None

    def add_map(self) -> nn.Parameter:
        """A trainable linear map of the features (d, d), at first the identity."""
        raise InputError("'map' is for vectors without a model: tune 'prototypes' or another instead")

    def card_facts(self) -> dict[str, Any]:
        """What a saved classifier must know to build this model again: fields of `saving.Card`."""
        return {}

    def use_windows(self) -> None:
        """From now on long texts are read in windows, whose features are pooled, instead of being cut."""
        if not self.supports_windows:
            raise InputError("windows are for long texts of a sentence encoder or a language model: leave them out")
        self.windows = True

    def text_lengths(self, samples: Sequence[Any]) -> tuple[list[int], int] | None:
        """Tokens of each text, and how many of them are read; None for inputs that are no texts."""
        return None

    def describe_inputs(self) -> dict[str, Any]:
        """How inputs become tensors, for whoever calls an exported model: at least `steps`."""
        return {"steps": [f"as `prepare` of {type(self).__name__} does it"]}

    @property
    def reads_prompts(self) -> bool:
        """Prototypes are means over encoded prompts, and not something that the model has at hand."""
        return type(self).prototypes is Backbone.prototypes

    def scores(self, features: Tensor, prototypes: Tensor) -> Scores:
        """sim = cos(f, w), logits = sim / T: (n, d), (k, d) -> Scores."""
        sim = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T
        scale = self.logit_scale.squeeze().exp()
        return Scores(sim, sim * scale, 1 / scale)

    def preprocessing(self) -> str:
        """Everything beside the weights that features depend on, as text: it is part of their fingerprint."""
        return ""

    def input_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that features depend on; all of them, unless a model knows better."""
        yield from self.state_dict().items()

    def fingerprint(self) -> str:
        """What features of this model are kept under: the same exactly where they would be the same."""
        config = getattr(getattr(self, "model", None), "config", None)
        # Two models can have the same weights and differ in an activation or a number of heads.
        facts = {} if config is None else {k: v for k, v in config.to_dict().items() if k not in UNIMPORTANT}
        kind = next(kind for kind in type(self).__mro__ if not kind.__name__.startswith("FSDP"))
        windows = " windows" * self.windows
        named = f"{kind.__qualname__} {self.preprocessing()}{windows} {json.dumps(facts, sort_keys=True, default=str)}"
        digest = blake2b(named.encode(), digest_size=16)
        for name, tensor in self.input_weights():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_digest_of(tensor))
        return digest.hexdigest()

    def weights_digest(self) -> str:
        """A fingerprint of all parameters but the temperature, whatever versions of transformers call them."""
        digests = sorted(
            _digest_of(parameter) for name, parameter in self.named_parameters() if name.split(".")[-1] != "logit_scale"
        )
        return blake2b(b"".join(digests), digest_size=16).hexdigest()

    @property
    def device(self) -> torch.device:
        return self.logit_scale.device

    def set_temperature(self, temperature: float) -> None:
        with torch.no_grad():
            self.logit_scale.fill_(math.log(1 / temperature))

    def save_pretrained(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """The weights; models from transformers write their usual folder instead.

        Args:
            weights: of its `state_dict`, where its own lie in shards.
        """
        write_tensors(folder / "model.safetensors", self.state_dict() if weights is None else weights)

    def load_weights(self, folder: Path) -> None:
        """The inverse of this class's `save_pretrained`, for a model that was built by its user."""
        try:
            self.load_state_dict(read_tensors(folder / "model.safetensors"))
        except RuntimeError as error:
            why = str(error).splitlines()[-1].strip()
            raise InputError(
                f"the weights in {str(folder)!r} do not fit this {type(self).__name__} ({why}): give the one of the run"
            ) from None


class _Hashed(NamedTuple):
    version: int
    some: Tensor
    digest: bytes


# By the memory that weights are in, which copies of a classifier share, and by their place in it.
_hashed: WeakKeyDictionary[torch.UntypedStorage, dict[Any, _Hashed]] = WeakKeyDictionary()


def _digest_of(tensor: Tensor) -> bytes:
    """Of the bytes of a weight, which are read again only where it has changed."""
    if type(tensor) not in (Tensor, nn.Parameter):  # in shards
        return blake2b(_bytes(tensor), digest_size=16).digest()
    known = _hashed.setdefault(tensor.untyped_storage(), {})
    part = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    # torch counts changes in place; those past it, through `.data` or numpy, show in some of the numbers.
    some = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)].cpu().clone()
    found = known.get(part)
    if found is None or found.version != tensor._version or not torch.equal(found.some, some):
        found = _Hashed(tensor._version, some, blake2b(_bytes(tensor), digest_size=16).digest())
        known[part] = found
    return found.digest


def _bytes(tensor: Tensor) -> Any:
    return full(tensor).detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def of_model(weights: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Weights of a backbone as the model of transformers within it names them."""
    start = "model."
    if weights is None:
        return None
    return {name.removeprefix(start): each for name, each in weights.items() if name.startswith(start)}


def class_means(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Means over consecutive rows, so many for each class: (sum of counts, d) -> (k, d)."""
    if len(set(counts)) == 1:
        return rows.view(len(counts), counts[0], -1).mean(1)
    return torch.stack([own.mean(0) for own in rows.split(list(counts))])


def check_modality(backbone: Backbone, modality: Modality) -> None:
    if backbone.modality != modality:
        raise InputError(f"this model reads {backbone.modality}s, but the data are {modality}s: choose another model")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """While open, everything is in evaluation mode; afterwards each part is in the mode that it was in before."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
