"""The interface of models. For a model of your own, subclass `Backbone` and pass it to `Classifier`."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.data.base import Modality, Unlabelled
from pouf.data.class_names import ClassSet
from pouf.errors import InputError
from pouf.files import read_tensors, write_tensors
from pouf.models.templates import DEFAULT_TEMPLATES, check_distinct, check_templates, fill
from pouf.models.text_side import TextSide
from pouf.parallel.fsdp import full_tensor
from pouf.recipe import Kind

if TYPE_CHECKING:
    from pouf.tuners.weights import Adapter

Tensors = dict[str, Tensor]

# Fields of a transformers config that do not change what the model computes.
CONFIG_METADATA = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
CONSTANT = ("transformers.", "tokenizers.")  # packages whose objects, but for modules, are never changed here


class Scores(NamedTuple):
    """Scores of n inputs for k classes."""

    sim: Tensor  # (n, k), cosine similarity of features and prototypes
    logits: Tensor  # (n, k), of the predictions
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
    settings that are not weights, also return those from `preprocessing`.
    """

    modality: Modality
    logit_scale: Tensor
    image_size: int | None = None
    text_side: TextSide | None = None
    added_by_tuners: tuple[str, ...] = ("adapter",)  # attributes that tuners may set

    # Capabilities: a subclass overrides them; other code reads them instead of checking the class.
    columns: tuple[str, ...] = ("text",)  # of a table of texts, that make up a sample
    reads_names: bool = True  # can encode names that are not among its classes
    unit_prototypes: bool = True  # prototypes have length 1
    encoder_makes_prototypes: bool = True  # prototypes depend on the encoder's weights
    saved_whole: bool = False  # saved with all weights: there is no base model to load again
    supports_demonstrations: bool = False  # reads solved examples next to a sample
    supports_windows: bool = False  # can read long texts in windows
    windows: bool = False  # reads long texts in windows
    supports_upper: bool = False  # the upper layers of `model.base_model`, of transformers, can be tuned alone
    supports_suffix: bool = False  # can read a sentence after each text: see `MaskedLM.with_suffix`

    sharded: bool = False  # its weights are sharded over several processes
    _adapter: Adapter | None = None

    def forward(self, compute: Callable[..., Tensor], *given: Any) -> Tensor:
        """Run a computation of this model; sharded weights are gathered during the call."""
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
        """The low-rank layers in the model, if any; assigning inserts or removes them."""
        return self._adapter

    @adapter.setter
    def adapter(self, adapter: Adapter | None) -> None:
        if self._adapter is not None:
            self._adapter.remove()
        if adapter is not None:
            adapter.insert()
        self._adapter = adapter

    def ready_features(self, data: Unlabelled) -> Tensor | None:
        """(n, d), the features of all samples without a copy, if the data are features; else None."""
        return None

    def prototypes(self, prompts: Sequence[Sequence[str]]) -> Tensor:
        """The mean over the prompts of each class: k lists of sentences -> (k, d), each of length 1."""
        encoded = F.normalize(self.encode_prompts([prompt for group in prompts for prompt in group]), dim=1)
        return F.normalize(class_means(encoded, [len(group) for group in prompts]), dim=1)

    @property
    def kind(self) -> Kind:
        """The kind of classifier, which selects the default recipe."""
        return self.modality

    def check_question(self, classes: ClassSet, templates: Sequence[str] | None) -> tuple[str, ...]:
        """The templates to use for these classes, or an error if model, classes and templates don't fit together."""
        usual = DEFAULT_TEMPLATES[self.modality] if classes.descriptions is None else ("{}",)
        checked = check_templates(usual if templates is None else templates)
        if self.text_side is not None:
            check_distinct(self.text_side, classes, checked)
        return checked

    def can_name(self, name: str) -> bool:
        """Whether the model can encode this name as a class."""
        return self.reads_names

    def name_prototypes(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Prototypes of any names with the current weights: (m, d), each of length 1 if `unit_prototypes`."""
        return self.prototypes([fill(templates, name) for name in names])

    def add_input_prompt(self, words: str) -> nn.Parameter | None:
        """Add trainable vectors before each input and return them; None if prompts belong to the text side."""
        return None

    @property
    def own_prototypes(self) -> nn.Parameter | None:
        """(k, d), if the prototypes are weights of this model."""
        return None

    def add_map(self) -> nn.Parameter:
        """Add a trainable linear map of the features (d, d), the identity at first, and return it."""
        raise InputError("'map' is for vectors without a model: tune 'prototypes' or another instead")

    def card_facts(self) -> dict[str, Any]:
        """The fields of `saving.Card` that are needed to build this model again."""
        return {}

    def use_windows(self) -> None:
        """Read long texts in windows and pool their features, instead of cutting them."""
        if not self.supports_windows:
            raise InputError("windows are for long texts of a sentence encoder or a language model: leave them out")
        self.windows = True

    def text_lengths(self, samples: Sequence[Any]) -> tuple[list[int], int] | None:
        """The number of tokens of each text, and how many the model reads; None for inputs other than texts."""
        return None

    def describe_inputs(self) -> dict[str, Any]:
        """How inputs become tensors, for users of an exported model: at least `steps`."""
        return {"steps": [f"as `prepare` of {type(self).__name__} does it"]}

    @property
    def reads_prompts(self) -> bool:
        """Whether prototypes are means over encoded prompts (and not stored in the model)."""
        return type(self).prototypes is Backbone.prototypes

    def scores(self, features: Tensor, prototypes: Tensor) -> Scores:
        """sim = cos(f, w), logits = sim / T: (n, d), (k, d) -> Scores."""
        sim = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T
        scale = self.logit_scale.squeeze().exp()
        return Scores(sim, sim * scale, 1 / scale)

    def preprocessing(self) -> str:
        """All settings besides the weights that features depend on, as text: part of the fingerprint."""
        return ""

    def input_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that features of inputs depend on; by default all."""
        yield from self.state_dict().items()

    def fingerprint(self) -> str:
        """The key of this model's cached features: equal if and only if the features would be equal."""
        config = getattr(getattr(self, "model", None), "config", None)
        # Two models can have the same weights and differ in an activation or a number of heads.
        facts = {} if config is None else {k: v for k, v in config.to_dict().items() if k not in CONFIG_METADATA}
        kind = next(kind for kind in type(self).__mro__ if not kind.__name__.startswith("FSDP"))
        windows = " windows" * self.windows
        named = f"{kind.__qualname__} {self.preprocessing()}{windows} {json.dumps(facts, sort_keys=True, default=str)}"
        digest = blake2b(named.encode(), digest_size=16)
        for name, tensor in self.input_weights():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_digest_of(tensor))
        return digest.hexdigest()

    def weights_digest(self) -> str:
        """A hash of all parameters except the temperature, independent of their names."""
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
        """Write the weights; models from transformers write their usual folder instead.

        Args:
            weights: the full `state_dict` of a sharded model.
        """
        write_tensors(folder / "model.safetensors", self.state_dict() if weights is None else weights)

    def load_weights(self, folder: Path) -> None:
        """Load what this class's `save_pretrained` wrote, into a model that the user built."""
        try:
            self.load_state_dict(read_tensors(folder / "model.safetensors"))
        except RuntimeError as error:
            why = str(error).splitlines()[-1].strip()
            raise InputError(
                f"the weights in {str(folder)!r} do not fit this {type(self).__name__} ({why}): pass the one of the run"
            ) from None


class _Hashed(NamedTuple):
    version: int  # of the tensor
    probe: Tensor  # some of its numbers
    digest: bytes


# By storage, which copies of a classifier share, and by the part of it.
_hashed: WeakKeyDictionary[torch.UntypedStorage, dict[Any, _Hashed]] = WeakKeyDictionary()


def _digest_of(tensor: Tensor) -> bytes:
    """A hash of a weight's bytes, computed again only if the weight has changed."""
    if type(tensor) not in (Tensor, nn.Parameter):  # sharded
        return blake2b(_bytes(tensor), digest_size=16).digest()
    digests = _hashed.setdefault(tensor.untyped_storage(), {})
    part = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    # torch counts changes in place; the probe shows others, made through `.data` or numpy.
    probe = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)].cpu().clone()
    found = digests.get(part)
    if found is None or found.version != tensor._version or not torch.equal(found.probe, probe):
        found = _Hashed(tensor._version, probe, blake2b(_bytes(tensor), digest_size=16).digest())
        digests[part] = found
    return found.digest


def _bytes(tensor: Tensor) -> Any:
    return full_tensor(tensor).detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


class TransformersBackbone(Backbone):
    """A model of transformers with its tokenizer or its image processor."""

    model: Any
    tokenizer: Any = None
    image_processor: Any = None

    def preprocessing(self) -> str:
        return str(self.image_processor.to_json_string())

    def prepare(self, samples: Sequence[Any]) -> Tensors:
        return dict(self.image_processor(images=list(samples), return_tensors="pt"))

    def tokenize(self, max_length: int, *columns: list[str]) -> Tensors:
        """Texts, or the columns of pairs; names of special tokens in them are plain text."""
        options = {"padding": True, "truncation": True, "max_length": max_length, "split_special_tokens": True}
        return dict(self.tokenizer(*columns, **options, return_tensors="pt"))

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        assert self.text_side is not None
        return self.text_side(prompts)

    def save_pretrained(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        if weights is not None:  # by the model's own names
            weights = {name[len("model.") :]: each for name, each in weights.items() if name.startswith("model.")}
        self.model.save_pretrained(folder, state_dict=weights)
        for part in (self.tokenizer, self.image_processor):
            if part is not None:
                part.save_pretrained(folder)


def class_means(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Means over consecutive groups of rows: (sum of counts, d) -> (k, d)."""
    if len(set(counts)) == 1:
        return rows.view(len(counts), counts[0], -1).mean(1)
    return torch.stack([group.mean(0) for group in rows.split(list(counts))])


def check_modality(backbone: Backbone, modality: Modality) -> None:
    """Raise an error if the model does not read this modality."""
    if backbone.modality != modality:
        raise InputError(f"this model reads {backbone.modality}s, but the data are {modality}s: choose another model")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """While open, the module is in evaluation mode; afterwards each part returns to its previous mode."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def view(tensor: Tensor) -> Tensor:
    """Another tensor in the same memory: moving one of both to a device, or freezing it, leaves the other."""
    same = tensor.detach()
    return nn.Parameter(same, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else same


def shared_objects(backbone: Backbone, *parts: nn.Module | None) -> dict[int, Any]:
    """The memo of a deep copy that has the tensors of the backbone and of other parts in the same memory.

    Tokenizers and configs stay as they are, and copying them takes long. Of a sharded backbone there is no copy.
    """
    memo = {id(tensor): view(tensor) for part in parts if part for tensor in (*part.parameters(), *part.buffers())}
    for part in (backbone, *backbone.modules(), backbone.text_side):
        for value in vars(part).values() if part is not None else ():
            for each in (value, *(vars(value).values() if hasattr(value, "__dict__") else ())):
                if type(each).__module__.startswith(CONSTANT) and not isinstance(each, nn.Module):
                    memo[id(each)] = each
    if backbone.sharded:
        return memo | {id(shared): shared for shared in (backbone, backbone.text_side)}
    return memo | {id(tensor): view(tensor) for tensor in (*backbone.parameters(), *backbone.buffers())}
