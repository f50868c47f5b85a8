"""The contract: class names and unlabelled data in, a better zero-shot classifier out, with evidence that it is better.

clf = Classifier.from_pretrained("openai/clip-vit-base-patch16", classes=["cat", "dog"])
result = clf.adapt("photos/")
print(result.verdict)
result.classifier.predict(["a.jpg", "b.jpg"])
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from huggingface_hub import ModelHubMixin
from torch import Tensor, nn

from pouf import saving
from pouf.data.base import Transform, Unlabelled
from pouf.data.class_names import Classes, ClassSet, class_set
from pouf.data.inputs import Inputs, NormalisedInput, normalise, split_columns
from pouf.errors import InputError, explain_wrong_call
from pouf.files import check_named
from pouf.inference.encode import FeatureSet, FeatureStore, InferenceConfig, Predictions
from pouf.models import Backbone, load_sequence_classifier
from pouf.models.base import Scores, evaluating, shared_objects
from pouf.models.demonstrations import DemonstrationEncoder, Demonstrations
from pouf.models.load import absolute_name, load_for_classes
from pouf.models.precomputed import read_vectors
from pouf.models.templates import MAX_LENGTH, class_texts, fill
from pouf.options import WRONG_ARGUMENTS, AdaptArguments, AdaptOptions
from pouf.postprocess import Postprocessor, fit_correction
from pouf.postprocess.shares import known_shares, share_offsets
from pouf.recipe import Kind, TunerSettings
from pouf.saving import Use

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from pouf.training.adaptation import Adaptation
    from pouf.training.search import Search
    from pouf.validation.evaluation import LabelledScore

INFERENCE = InferenceConfig()


class Classifier(nn.Module, ModelHubMixin):
    """A zero-shot classifier that can be adapted without labels: it scores inputs against one prototype per class.

    Args:
        backbone: a model from `load_backbone`, or any `Backbone` of your own.
        classes: the names, at least two; `_` is read as a space. Or, for each name, a description or several, which the
            text side reads in the place of the name: {"entity": ["a thing", "an animal or a product"], …}.
        templates: sentences with `{}` for the name; the prototype is the mean over them. Default: "a photo of a {}."
            for images, "{}" for texts and for descriptions. A masked language model has its own, in its cloze.
        model, revision: what to write into a saved run so that the backbone can be loaded again.
        temperature: T of the softmax and of the transport plan; None keeps the model's own.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: Classes,
        templates: Sequence[str] | None = None,
        *,
        model: str | None = None,
        revision: str | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes, self.descriptions = class_set(classes)
        self.templates = backbone.check_question(ClassSet(self.classes, self.descriptions), templates)
        self.model, self.revision = model, revision
        self.tuner_settings: TunerSettings | None = None
        self.prompt: nn.Module | None = None  # gives the prototypes in the place of the text side
        self.postprocessor: Postprocessor | None = None
        self.demonstrations: Demonstrations | None = None  # solved examples to show beside each sample
        self.base: str | None = None  # fingerprint of the weights before anything was tuned, once it was computed
        self.model_card: str | None = None  # README.md of its folder; None writes one
        self.temperature: float | None = None
        if temperature is not None:
            self.set_temperature(temperature)
        self.eval()

    @classmethod
    def from_pretrained(  # type: ignore[override]  # the mixin's has options of its own
        cls,
        name_or_path: str | Path,
        classes: Classes | None = None,
        templates: Sequence[str] | None = None,
        *,
        template: str | None = None,
        words: Sequence[str] | Sequence[Sequence[str]] | None = None,
        max_length: int | None = None,
        windows: bool = False,
        temperature: float | None = None,
        device: str | torch.device | None = None,
        revision: str | None = None,
        use: Use = "advised",
        backbone: Backbone | None = None,
        trust_model: bool = False,
    ) -> Self:
        """From a model on the hub or in a folder, with the names of classes; or, without, from a run there.

            Classifier.from_pretrained("openai/clip-vit-base-patch16", ["cat", "dog"])
            Classifier.from_pretrained("my-run")
            Classifier.from_pretrained("roberta-base", {"negative": "terrible", "positive": ["great", "good"]},
                                       ["{text} It was [MASK]."])

        A template with `[MASK]` makes it a masked language model; its descriptions are single words. With a causal
        language model (GPT-2, Llama, Qwen, …) the gap is at the end, and the word is what comes next.

        Args:
            name_or_path: `pouf/tiny-clip` is the model that comes with the package.
            classes: as of `Classifier`; a file of descriptions is given as a `Path`.
            template: one template, in the place of a list of them.
            words: one word per class, or several, where classes are names alone; without, the names are the words.
            max_length: tokens that a masked language model reads at most (256).
            windows: read texts that are longer than the model's length in windows, and pool them, instead of cutting.
            revision: of the model on the hub; a saved run remembers it.
            use: of a run: what it advises, or its chosen step, its last one, or zero-shot.
            backbone: of a run: your own model, which must be given again.
            trust_model: load pickled weights, and run Python code that comes with the model: either can do anything
                that you can do on this machine.
        """
        if template is not None:
            if templates is not None:
                raise InputError("give template or templates, and not both")
            templates = [template]
        if classes is None:
            given = {"templates": templates, "words": words, "max_length": max_length, "windows": windows or None}
            if own := [name for name, value in given.items() if value is not None]:
                raise InputError(f"a run has its own {' and '.join(own)}: give classes too, or leave that out")
            classifier = saving.load(cls, saving.fetch(name_or_path, revision), use, backbone, trust_model)
            if temperature is not None:
                classifier.set_temperature(temperature)
        else:
            if use != "advised" or backbone is not None:
                raise InputError("use and backbone are for a run that is loaded, which has its own classes")
            loaded, question = load_for_classes(
                name_or_path, classes, templates, words, max_length, windows, revision, trust_model
            )
            named = {"model": absolute_name(name_or_path), "revision": revision}
            classifier = cls(loaded, question, templates, **named, temperature=temperature)
        return classifier if device is None else classifier.to(device)

    @classmethod
    def from_vectors(
        cls, prototypes: Tensor | str | Path, classes: Classes | None = None,
        temperature: float | None = None,
    ) -> Self:  # fmt: skip
        """No model, only one vector per class, (k, d) or a file of them; the inputs are vectors of the same model then.

        The names of the classes may stand in the file, as `names`; a name that comes twice gets a number, since two
        prototypes can bear one (ImageNet has two kinds of "missile"). The temperature is CLIP's unless given.
        """
        backbone, names = read_vectors(prototypes, classes)
        return cls(backbone, names, temperature=temperature)

    @explain_wrong_call(WRONG_ARGUMENTS, AdaptOptions)
    def adapt(self, data: Inputs | None = None, **options: Unpack[AdaptArguments]) -> Adaptation:
        """Adapt to unlabelled data. The result has new classifiers; this one stays as it is.

        The new ones share the memory of all weights that are not tuned. Of weights that are sharded over processes
        there is one set, which is tuned in place.

        Args:
            data: images, texts or vectors without labels: whatever `predict` takes.

        Raises:
            Diverged: the loss is not finite. A run folder has weights of at most ten steps before.
            KeyboardInterrupt, SystemExit: SIGINT, or SIGTERM and SIGHUP (143, 129). The state was saved after the step
                that was under way; a second SIGINT ends at once.
        """
        from pouf import workflow

        return workflow.adapt(self, data, AdaptOptions(**options))

    @explain_wrong_call(WRONG_ARGUMENTS, AdaptOptions)
    def search(
        self,
        data: Inputs | None,
        grid: Mapping[str, Sequence[Any]] | None = None,
        *,
        on_trial: Callable[[dict[str, Any]], None] = lambda settings: None,
        **options: Unpack[AdaptArguments],
    ) -> Search:
        """Adapt with each combination of a grid, and choose among all their steps without labels.

            clf.search("photos/", grid={"optimisation.lr": [1e-7, 5e-7], "objective.information": [0.3, 1.0]})

        Args:
            grid: values to try, by dotted name of the setting; by default ⅓×, 1× and 3× the recipe's learning rate.
            on_trial: called with the settings of each trial before it starts.
        """
        from pouf import workflow

        return workflow.search(self, data, grid, on_trial, AdaptOptions(**options))

    @property
    def kind(self) -> Kind:
        """What decides which recipe is the default."""
        return self.backbone.kind

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file of texts that make a sample: one, or two for pairs."""
        return self.backbone.columns

    @property
    def adapted(self) -> bool:
        """Whether it is no zero-shot classifier any more: something was tuned, or its predictions are corrected."""
        return self.tuner_settings is not None or self.postprocessor is not None

    def set_temperature(self, temperature: float) -> None:
        if not 0 < temperature < float("inf"):
            raise InputError(f"the temperature must be a number above 0, not {temperature}")
        self.backbone.set_temperature(temperature)
        self.temperature = temperature

    def with_new_head(self, seed: int, max_length: int = MAX_LENGTH, regression: bool = False) -> Classifier:
        """The text encoder with a new classification head, for fine-tuning: one output per class, or for a regression
        between two classes one, the share of the second."""
        if self.model is None or self.backbone.modality != "text":
            raise InputError("fine-tuning under a fresh head is for text models that transformers loads by name")
        k = len(self.classes)
        if regression and k != 2:
            raise InputError(f"a regression is between two classes, not {k}")
        outputs = 1 if regression else k
        backbone = load_sequence_classifier(self.model, outputs, seed, max_length, revision=self.revision)
        given = ClassSet(self.classes, self.descriptions).as_given()
        return Classifier(backbone.to(self.device), given, model=self.model, revision=self.revision)

    def copy(self) -> Classifier:
        """A classifier of its own, with the same tensors in the same memory: `tune` gives it memory for what it trains.
        Of a sharded backbone there is no copy: both have it."""
        memo = shared_objects(self.backbone, self.prompt, self.postprocessor)
        copied = copy.deepcopy(self, memo | {id(self.demonstrations): self.demonstrations})
        if not self.backbone.sharded:
            copied.backbone.logit_scale.data = copied.backbone.logit_scale.data.clone()  # one number, which can be set
        return copied

    def prototypes(self) -> Tensor:
        """(k, d), differentiable, of length 1 but for masked language models, whose logits depend on the norms."""
        if self.prompt is not None:
            return self.prompt()  # type: ignore[no-any-return]
        return self.backbone.prototypes(self.prompts())

    def prompts(self) -> list[list[str]]:
        """For each class the sentences that its prototype is the mean of: what stands for it, in every template."""
        return [[prompt for text in own for prompt in fill(self.templates, text)] for own in self.texts()]

    def texts(self) -> tuple[tuple[str, ...], ...]:
        """What stands for each class in the templates: its descriptions, or its name."""
        return class_texts(ClassSet(self.classes, self.descriptions))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """`predict`."""
        return self.predict(*inputs, **options)

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:8]) + (", …" if len(self.classes) > 8 else "")
        prompts = "" if self.kind == "vector" else f", {self.templates[0][:60]!r}"
        tuned = f"adapted: {self.tuner_settings.name}" if self.tuner_settings is not None else "zero-shot"
        corrected = ", predictions corrected" if self.postprocessor is not None else ""
        return (
            f"Classifier of {len(self.classes)} classes: {names}\n"
            f"  {self.model or 'a model of your own'}, {self.kind}s{prompts}\n  {tuned}{corrected}"
        )

    def data(self, inputs: Inputs, text_column: str | None = None) -> Unlabelled:
        """Whatever can be handed to `predict`, as data of the backbone's kind."""
        return normalise(inputs, self.backbone.modality, split_columns(text_column, self.columns)).data

    def features(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, d), each of length 1."""
        given, encoded = self._complete(inputs, batch_size)
        features = F.normalize(encoded.features.float(), dim=1)
        return features[0] if given.single else features

    def predict_log_proba(self, inputs: Inputs, batch_size: int = 64, *, text_column: str | None = None) -> Tensor:
        """(n, k) log-probabilities; (k,) for one sample. An input that can't be read is an error; see `infer`."""
        given, encoded = self._complete(inputs, batch_size, text_column)
        logs = self.log_probabilities(encoded)
        return logs[0] if given.single else logs

    def predict_proba(self, inputs: Inputs, batch_size: int = 64, *, text_column: str | None = None) -> Tensor:
        """(n, k), rows sum to 1; (k,) for one sample."""
        return self.predict_log_proba(inputs, batch_size, text_column=text_column).exp()

    @overload
    def predict(self, inputs: Inputs, batch_size: int = 64, *, text_column: str | None = None) -> str | list[str]: ...
    @overload
    def predict(
        self, inputs: Inputs, batch_size: int = 64, *, text_column: str | None = None, abstain: float | None,
        zero_shot: Classifier | None = None,
    ) -> str | list[str] | list[str | None] | None: ...  # fmt: skip
    def predict(
        self, inputs: Inputs, batch_size: int = 64, *, text_column: str | None = None, abstain: float | None = None,
        zero_shot: Classifier | None = None,
    ) -> str | list[str] | list[str | None] | None:  # fmt: skip
        """The most likely class of each input: a list of names, or one name for one sample.

        Args:
            text_column: of a file, where the texts are not in `text`; two, as "a,b", for pairs.
            abstain: None in the place of what is likely wrong, so that about this share of the rest is. An estimate,
                without labels, from how surely and how steadily classes are predicted.
            zero_shot: the classifier before it was adapted; its predictions count in that estimate.
        """
        given, encoded = self._complete(inputs, batch_size, text_column)
        names: list[str | None] = [self.classes[k] for k in self.log_probabilities(encoded).argmax(1).tolist()]
        if abstain is not None:
            from pouf import workflow

            reliable = workflow.reliable(self, given.data, encoded, abstain, zero_shot)
            names = [name if keep else None for name, keep in zip(names, reliable, strict=True)]
        return names[0] if given.single else names

    def evaluate(self, inputs: Inputs, labels: Sequence[str | int], *, text_column: str | None = None) -> LabelledScore:
        """Accuracy, macro-F1 and recalls by labels, which are names of classes or their positions."""
        from pouf import workflow

        return workflow.evaluate(self, inputs, labels, text_column)

    def infer(self, data: Unlabelled, inference: InferenceConfig = INFERENCE) -> Predictions:
        """Log-probabilities of all that can be read, and why the others can't."""
        data = data.with_own_skipped()
        encoded = self.encode(data, inference)
        return Predictions(encoded.indices, self.log_probabilities(encoded), data.skipped)

    def store(self, inference: InferenceConfig = INFERENCE) -> FeatureStore:
        """Where the features of inputs are looked up or computed; with demonstrations, which are drawn, not cached."""
        if self.demonstrations is None:
            return FeatureStore(self.backbone, inference)
        return FeatureStore(DemonstrationEncoder(self.backbone, self.demonstrations), replace(inference, cache=None))

    def encode(
        self, data: Unlabelled, inference: InferenceConfig = INFERENCE, *, transform: Transform | None = None
    ) -> FeatureSet:
        """Features of all that can be read, transformed before; what can't is listed in `data.skipped`."""
        return self.store(inference).features(data, transform)

    @torch.no_grad()
    def fixed_prototypes(self) -> Tensor:
        """For prediction: without a gradient and without dropout, also in the middle of training."""
        with evaluating(self):
            return self.prototypes()

    @torch.no_grad()
    def scores(self, encoded: FeatureSet) -> Scores:
        features = encoded.features.to(self.device).float()
        return self.backbone.scores(features, self.fixed_prototypes())

    @torch.no_grad()
    def score_blocks(
        self, encoded: FeatureSet, prototypes: Tensor | None = None, rows: int = 8192
    ) -> Iterator[Predictions]:
        """Predictions block by block: a million samples and a thousand classes need not be in memory at once."""
        prototypes = self.fixed_prototypes() if prototypes is None else prototypes
        for start in range(0, len(encoded.indices), rows):
            features = encoded.features[start : start + rows].to(self.device).float()
            logits = self.backbone.scores(features, prototypes).logits
            if self.postprocessor is not None:
                logits = self.postprocessor(features, logits)
            yield Predictions(encoded.indices[start : start + rows], logits.float().log_softmax(1).cpu())

    def log_probabilities(self, encoded: FeatureSet, prototypes: Tensor | None = None) -> Tensor:
        """(n, k), all blocks together."""
        blocks = [block.log_probabilities for block in self.score_blocks(encoded, prototypes=prototypes)]
        return torch.cat(blocks) if blocks else torch.zeros(0, len(self.classes))

    def with_prior(
        self, prior: str | Sequence[float], inputs: Inputs, inference: InferenceConfig = INFERENCE
    ) -> Classifier:
        """A classifier with known class shares of its predictions for these inputs: "uniform", or one per class."""
        shares, postprocessor = known_shares(prior, len(self.classes)), self.postprocessor
        if postprocessor is None or postprocessor.weight is None:
            return self.with_correction(inputs, inference, "shares", shares)
        if len(self.classes) > 2:
            return self.with_correction(inputs, inference, "clusters", shares)
        # Shares of two classes are a threshold: it moves, and all else stays.
        logs = self.infer(self.data(inputs), inference).log_probabilities
        if len(logs) < 2:
            raise InputError("a correction is of many inputs together: give more than one")
        corrected = self.copy()
        corrected.postprocessor = copy.deepcopy(postprocessor)
        corrected.postprocessor.bias += share_offsets(logs, shares).to(self.device)
        return corrected

    def with_correction(
        self, inputs: Inputs, inference: InferenceConfig = INFERENCE, name: str = "", shares: Tensor | None = None
    ) -> Classifier:
        """A classifier with predictions that are corrected for these inputs together, without training.

        Args:
            name: of `POSTPROCESSORS`; by default prior correction for two classes and the clusters for more.
            shares: (k,), of the classes in the inputs, where they are known.
        """
        encoded = self.store(inference).share(self.data(inputs).with_own_skipped())
        name = name or ("clusters" if len(self.classes) > 2 else "prior-correction")
        corrected = self.copy()
        corrected.postprocessor = fit_correction(name, self, encoded, prior=shares)
        return corrected

    def _complete(
        self, inputs: Inputs, batch_size: int, text_column: str | None = None
    ) -> tuple[NormalisedInput, FeatureSet]:
        given = normalise(inputs, self.backbone.modality, split_columns(text_column, self.columns))
        data = given.data.with_own_skipped()
        encoded = self.encode(data, InferenceConfig(batch_size))
        if data.skipped:
            index, reason = next(iter(data.skipped.items()))
            raise InputError(
                f"{len(data.skipped)} of {len(data)} inputs can't be read, the first {data.ids[index]}: {reason}. "
                "Leave them out, or use infer(), which skips them."
            )
        return given._replace(data=data), encoded

    def save_pretrained(  # type: ignore[override]
        self, folder: str | Path, *, merge: bool = False, push_to_hub: bool = False, repo_id: str | None = None,
        config: dict[str, Any] | None = None, **hub: Any,
    ) -> str | None:  # fmt: skip
        """Write the classifier. After full tuning this is a normal transformers folder; otherwise kilobytes.

        Args:
            merge: the normal folder also after LayerNorm tuning and LoRA, with the matrices merged into the weights.
            push_to_hub: push it as well, as `repo_id`, by default the folder's name; `config` is the mixin's.
        """
        check_named(folder)
        saving.save(self, Path(folder), merge=merge or bool((config or {}).get("merge")))
        return self.push_to_hub(repo_id or Path(folder).name, merge=merge, **hub) if push_to_hub else None

    def push_to_hub(self, repo_id: str, *, merge: bool = False, **hub: Any) -> str:
        """Push the classifier and its model card; no data, predictions or report go with it.

        Args:
            hub: what `huggingface_hub.ModelHubMixin.push_to_hub` takes: private, token, commit_message, branch, …
        """
        saving.check_shareable(self, merge)
        return str(super().push_to_hub(repo_id, config={"merge": merge}, **hub))
