"""From inputs to features, scores and predictions, by one process or by several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.data.base import Transform, Unlabelled
from pouf.data.inputs import Inputs, ParsedInput, as_data
from pouf.errors import InputError, one_of
from pouf.inference.encode import FeatureSet, FeatureStore, InferenceConfig
from pouf.models.base import Scores, check_modality, evaluating
from pouf.models.demonstrations import Shown
from pouf.parallel.padding import PROMPTS, in_pieces
from pouf.parallel.process_group import ALONE, ProcessGroup
from pouf.postprocess import POSTPROCESSORS
from pouf.zero_shot import ZeroShot

INFERENCE = InferenceConfig()
FITTED_ON = 2**14  # inputs that a postprocessor is fitted on at most, drawn at random


class Predictions(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    log_probabilities: Tensor  # (len(indices), k)
    skipped: Mapping[int, str] = {}  # position → reason, of those that can't be read


class Predictor(ZeroShot):
    """A zero-shot classifier that predicts."""

    def data(self, inputs: Inputs) -> Unlabelled:
        """Whatever can be handed to `predict`, as data of the backbone's kind."""
        return as_data(inputs, self.backbone.modality, self.columns).data

    def features(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, d), each of length 1."""
        given, encoded = self._complete(inputs, batch_size)
        features = F.normalize(encoded.features.float(), dim=1)
        return features[0] if given.single else features

    def predict_log_proba(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, k) log-probabilities; (k,) for one sample. An input that can't be read is an error; see `infer`."""
        given, encoded = self._complete(inputs, batch_size)
        logs = self.log_probabilities(encoded)
        return logs[0] if given.single else logs

    def predict_proba(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, k), rows sum to 1; (k,) for one sample."""
        return self.predict_log_proba(inputs, batch_size).exp()

    def predict(self, inputs: Inputs, batch_size: int = 64) -> str | list[str]:
        """The most likely class of each input: a list of names, or one name for one sample."""
        best = self.predict_log_proba(inputs, batch_size).argmax(-1)
        return self.classes[int(best)] if best.ndim == 0 else [self.classes[i] for i in best.tolist()]

    def infer(self, data: Unlabelled, inference: InferenceConfig = INFERENCE) -> Predictions:
        """Log-probabilities of all that can be read, and why the others can't."""
        data = data.for_one_reader()
        encoded = self.encode(data, inference)
        return Predictions(encoded.indices, self.log_probabilities(encoded), data.skipped)

    @torch.no_grad()
    def encode(
        self, data: Unlabelled, inference: InferenceConfig = INFERENCE, *, transform: Transform | None = None
    ) -> FeatureSet:
        """Features of all that can be read; what can't is listed in `data.skipped`.

        With demonstrations they are means over several draws of these (the logits are linear in them), and not kept.

        Args:
            transform: what the model is shown instead of the samples as they are.
        """
        return self._encode("features", data, inference, transform)

    @torch.no_grad()
    def encode_share(
        self, data: Unlabelled, inference: InferenceConfig = INFERENCE, *, transform: Transform | None = None
    ) -> FeatureSet:
        """The same for what falls to this process, where several share the work: nobody holds all features."""
        return self._encode("share", data, inference, transform)

    @torch.no_grad()
    def infer_blocks(
        self,
        data: Unlabelled,
        inference: InferenceConfig = INFERENCE,
        seen: Callable[[FeatureSet], None] = lambda encoded: None,
        prototypes: Tensor | None = None,
    ) -> Iterator[Predictions]:
        """Predictions for what falls to this process, block by block: at no time is more than a block in memory.

        Args:
            seen: is shown the features of each block before its predictions come.
            prototypes: from `fixed_prototypes`, where they are at hand.
        """

        def features() -> Iterator[FeatureSet]:
            shown = self.backbone if self.demonstrations is None else Shown(self.backbone, self.demonstrations)
            kept = inference if self.demonstrations is None else replace(inference, cache=None)
            for encoded in FeatureStore(shown, kept).blocks(data):
                seen(encoded)
                yield encoded

        self._check(data)
        prototypes = self.fixed_prototypes(inference.world) if prototypes is None else prototypes
        with evaluating(self):
            for encoded in features():
                yield from self.score_blocks(encoded, prototypes=prototypes)

    def _check(self, data: Unlabelled) -> None:
        check_modality(self.backbone, data.modality)
        if data.streamed:
            raise InputError(f"{data.source} has no known end: take some of it with take(n)")

    def _encode(
        self, how: str, data: Unlabelled, inference: InferenceConfig, transform: Transform | None
    ) -> FeatureSet:
        self._check(data)
        with evaluating(self):
            store = FeatureStore(self.backbone, inference)
            if self.demonstrations is not None:
                store = FeatureStore(Shown(self.backbone, self.demonstrations), replace(inference, cache=None))
            encoded: FeatureSet = getattr(store, how)(data, transform)
            return encoded

    def some_features(self, own: FeatureSet, world: ProcessGroup, seed: int = 0) -> FeatureSet:
        """At most `FITTED_ON` rows of what all processes encoded, drawn at random: the same on every process.

        Args:
            own: from `encode_share`.
        """
        sizes = world.gather_objects(len(own.indices))
        chosen = torch.arange(sum(sizes))
        if len(chosen) > FITTED_ON:
            drawn = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
            chosen = drawn[:FITTED_ON].sort().values
        if world.size == 1:
            rows = chosen.tolist()
            return (
                own if len(rows) == len(own.indices) else FeatureSet([own.indices[i] for i in rows], own.features[rows])
            )
        first = sum(sizes[: world.rank])
        rows = [int(i) - first for i in chosen if first <= i < first + sizes[world.rank]]
        indices = world.gather_objects([own.indices[row] for row in rows])
        features = world.gather(own.features[rows].to(self.device)).cpu()
        return FeatureSet([index for part in indices for index in part], features)

    @torch.no_grad()
    def fixed_prototypes(self, world: ProcessGroup = ALONE) -> Tensor:
        """For prediction: without a gradient and without dropout, also in the middle of training.

        Args:
            world: the processes that share the prompts, and all get the prototypes.
        """
        with evaluating(self):
            total = sum(self.prompts_per_class()) if world.size > 1 else 0
            if not total:
                return self.prototypes()
            own, most = list(world.share(range(total))), -(-total // world.size)
            cut = in_pieces(own, -(-most // PROMPTS))
            encoded = torch.cat([self.encode_prompts(rows or [0])[: len(rows)] for rows in cut])
            return self.prototypes_of(world.gather(encoded))

    @torch.no_grad()
    def scores(self, encoded: FeatureSet) -> Scores:
        features = encoded.features.to(self.device).float()
        return self.backbone.scores(features, self.fixed_prototypes())

    @torch.no_grad()
    def score_blocks(
        self, encoded: FeatureSet, rows: int = 8192, prototypes: Tensor | None = None
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

    @torch.no_grad()
    def fit_postprocessor(
        self, name: str, encoded: FeatureSet, seed: int = 0, prior: Tensor | None = None, world: ProcessGroup = ALONE
    ) -> None:
        """Fit one of `POSTPROCESSORS` on these features (a random part where they are very many), and use it.

        Args:
            encoded: from `encode_share`, where several processes share the work.
            prior: (k,), shares of the classes, where they are known.
        """
        fit = one_of("postprocessor", name, POSTPROCESSORS)
        encoded = self.some_features(encoded, world, seed)
        features = encoded.features.to(self.device).float()
        fitted = fit(features, self.fixed_prototypes(), self.scores(encoded), prior)
        self.postprocessor = world.broadcast(fitted.cpu()).to(self.device)  # a tensor of a GPU would stay on that one

    @torch.no_grad()
    def nearness(self, encoded: FeatureSet, prototypes: Tensor | None = None) -> Tensor:
        """(n,): cosine of each feature with the nearest prototype."""
        prototypes = F.normalize((self.fixed_prototypes() if prototypes is None else prototypes).float(), dim=1)
        if not encoded.indices:
            return torch.zeros(0)
        features = F.normalize(encoded.features.float().to(prototypes.device), dim=1)
        return (features @ prototypes.T).max(1).values.cpu()

    def _complete(self, inputs: Inputs, batch_size: int) -> tuple[ParsedInput, FeatureSet]:
        given = as_data(inputs, self.backbone.modality, self.columns)
        given = given._replace(data=given.data.for_one_reader())
        encoded = self.encode(given.data, InferenceConfig(batch_size))
        if given.data.skipped:
            index, reason = next(iter(given.data.skipped.items()))
            raise InputError(
                f"{len(given.data.skipped)} of {len(given.data)} inputs can't be read, the first "
                f"{given.data.ids[index]}: {reason}. Leave them out, or use infer(), which skips them."
            )
        return given, encoded
