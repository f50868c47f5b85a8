"""A zero-shot classifier that is loaded and saved: all but its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import ModelHubMixin
from torch import Tensor

from pouf import saving
from pouf.data.class_names import Classes, class_set, numbered
from pouf.data.vectors import as_table
from pouf.errors import InputError
from pouf.models import Backbone, load_backbone
from pouf.models.cloze import make_cloze
from pouf.models.load import lasting_name
from pouf.models.precomputed import Precomputed, read_prototypes
from pouf.models.prompts import check_templates
from pouf.predictor import Predictor
from pouf.saving import Use

C = TypeVar("C", bound="BaseClassifier")


class BaseClassifier(Predictor, ModelHubMixin):
    """A classifier that comes from a model or a run, and goes to a folder or the hub."""

    @classmethod
    def from_pretrained(  # type: ignore[override]  # the mixin's has options of its own
        cls: type[C],
        name_or_path: str | Path,
        classes: Classes | None = None,
        templates: Sequence[str] | None = None,
        *,
        words: Sequence[str] | Sequence[Sequence[str]] | None = None,
        max_length: int | None = None,
        temperature: float | None = None,
        device: str | torch.device | None = None,
        revision: str | None = None,
        use: Use = "advised",
        backbone: Backbone | None = None,
        trust_model: bool = False,
    ) -> C:
        """From a model on the hub or in a folder, with the names of classes; or, without, from a run there.

            Classifier.from_pretrained("openai/clip-vit-base-patch16", ["cat", "dog"])
            Classifier.from_pretrained("my-run")
            Classifier.from_pretrained("somebody/what-they-pushed")

        Classes can be described apart from their names; a file of descriptions is given as a `Path`:

            Classifier.from_pretrained("sentence-transformers/all-MiniLM-L6-v2",
                                       {"number": ["a number", "a date or an amount"], "human": "a person"},
                                       ["The question asks about {}."])

        A template with `[MASK]` makes it a masked language model, whose descriptions are single words:

            Classifier.from_pretrained("roberta-base", {"negative": "terrible", "positive": ["great", "good"]},
                                       ["{text} It was [MASK]."])

        With a causal language model (GPT-2, Llama, Qwen, …) the gap is at the end, and the word is what comes next.

        Args:
            name_or_path: `pouf/tiny-clip` is the model that comes with the package.
            words: one word per class, or several, in the order of the classes, where these are names alone; without
                them the names are the words.
            max_length: tokens that a masked language model reads at most (256).
            revision: of the model on the hub; a saved run remembers it.
            use: of a run: what it advises, or its chosen step, its last one, or zero-shot.
            backbone: of a run: your own model, which must be given again.
            trust_model: load pickled weights, and run Python code that comes with the model. Either can do anything
                that you can do on this machine; without it, only safetensors and the classes of transformers are used.
        """
        if classes is None:
            asked = {"templates": templates, "words": words, "max_length": max_length}
            if own := [name for name, value in asked.items() if value is not None]:
                raise InputError(f"a run has its own {' and '.join(own)}: give classes too, or leave that out")
            classifier = saving.load(cls, saving.fetch(name_or_path, revision), use, backbone, trust_model)
            if temperature is not None:
                classifier.set_temperature(temperature)
        else:
            if use != "advised" or backbone is not None:
                raise InputError("use and backbone are for a run that is loaded, which has its own classes")
            given = class_set(classes)  # before the model is loaded, which may take long
            cloze = make_cloze(given, templates, words, max_length)
            if cloze is None and max_length is not None:
                raise InputError("max_length is for a language model with a gap: give a template with [MASK] as well")
            if cloze is None and templates is not None:
                check_templates(templates)
            loaded = load_backbone(name_or_path, cloze, revision, trust_model)
            named = {"model": lasting_name(name_or_path), "revision": revision}
            # The descriptions of a masked language model are the words of its cloze.
            told = given.as_given() if cloze is None else given.names
            classifier = cls(loaded, told, templates, **named, temperature=temperature)
        return classifier if device is None else classifier.to(device)

    @classmethod
    def from_vectors(
        cls: type[C], prototypes: Tensor | str | Path, classes: Classes | None = None,
        temperature: float | None = None,
    ) -> C:  # fmt: skip
        """No model, only one vector per class, (k, d) or a file of them; the inputs are vectors of the same model then.

        The names of the classes may stand in the file, as `names`; a name that comes twice gets a number, since two
        prototypes can bear one (ImageNet has two kinds of "missile"). The temperature is CLIP's unless given.
        """
        if isinstance(prototypes, (str, Path)):
            prototypes, named = read_prototypes(prototypes)
            classes = named if classes is None else classes
        prototypes = torch.from_numpy(as_table(prototypes, "the prototypes"))
        if isinstance(classes, (Mapping, Path)):
            classes, described = class_set(classes)
            if described is not None:
                raise InputError("vectors come without a model that could read descriptions: give the names alone")
        if classes is None or len(classes) != len(prototypes):
            came = "none" if classes is None else len(classes)
            raise InputError(
                f"expected names for {len(prototypes)} prototypes, not {came}: give the classes in their order"
            )
        return cls(Precomputed(prototypes), numbered(classes), temperature=temperature)

    def save_pretrained(  # type: ignore[override]
        self,
        folder: str | Path,
        *,
        merge: bool = False,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        config: dict[str, Any] | None = None,
        **hub: Any,
    ) -> str | None:
        """Write the classifier. After full tuning this is a normal transformers folder; otherwise kilobytes.

        Args:
            merge: the normal folder also after LayerNorm tuning and LoRA, whose matrices are merged into the weights.
            push_to_hub: push it as well, as `repo_id`, by default the folder's name; see `push_to_hub` for more.
            config: of the mixin, through which `push_to_hub` says what to merge.
        """
        saving.save(self, Path(folder), merge=merge or bool((config or {}).get("merge")))
        return self.push_to_hub(repo_id or Path(folder).name, merge=merge, **hub) if push_to_hub else None

    def push_to_hub(self, repo_id: str, *, merge: bool = False, **hub: Any) -> str:
        """Push the classifier and its model card; no data, predictions or report go with it.

            clf.push_to_hub("me/cats", private=True)
            Classifier.from_pretrained("me/cats")

        Args:
            merge: as of `save_pretrained`.
            hub: what `huggingface_hub.ModelHubMixin.push_to_hub` takes: private, token, commit_message, branch, …

        Returns:
            The address of the commit.
        """
        saving.check_shareable(self, merge)
        return str(super().push_to_hub(repo_id, config={"merge": merge}, **hub))
