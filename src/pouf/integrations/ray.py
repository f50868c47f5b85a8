"""Predictions over a cluster: a callable for Ray Data's `map_batches`, and for all that hands over tables in batches.

    import ray
    from pouf.integrations.ray import BatchPredictor

    photos = ray.data.read_images("s3://bucket/photos/")
    photos.map_batches(
        BatchPredictor, fn_constructor_args=["my-run"], compute=ray.data.ActorPoolStrategy(size=8), num_gpus=1,
        batch_size=256,
    )

Nothing here needs Ray itself: Spark's `mapInPandas` takes the same callable, which gets tables of pandas there.

    frame.mapInPandas(lambda tables: map(BatchPredictor("my-run"), tables), schema)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.inputs import normalise, sample_columns
from pouf.data.vectors import Vectors
from pouf.errors import InputError
from pouf.inference.encode import InferenceConfig
from pouf.saving import Use

# Names of the column that holds the samples, the first that is there; texts have those of their templates first.


class BatchPredictor:
    """Adds the columns `class`, `probability`, `runner_up` and `runner_up_probability` to a batch.

    A batch is a dictionary of arrays, as Ray Data hands it over, or a table of pandas; what comes back is of the same
    kind. An input that can't be read has no class, and a probability that is not a number.

    Args:
        run: the folder of a run, or what `save_pretrained` wrote. Every machine must see it.
        column: what holds the samples, by default the first of the usual names. Images are arrays, encoded bytes or
            paths; vectors are rows of numbers.
        use: what the run advises, or its chosen step, its last one, or zero-shot.
        device: the GPU if there is one. Ray gives each copy of this callable its own.
    """

    def __init__(
        self,
        run: str | Path,
        column: str | None = None,
        use: Use = "advised",
        batch_size: int = 64,
        device: str | None = None,
    ) -> None:
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.classifier: Classifier = Classifier.from_pretrained(run, use=use, device=place)
        self.column, self.inference = column, InferenceConfig(batch_size)
        self.prototypes = self.classifier.fixed_prototypes()  # the same for every batch

    def __call__(self, batch: Any) -> Any:
        added = self._predict(self._data(batch))
        if isinstance(batch, dict):
            return batch | added
        return batch.assign(**added)

    def _predict(self, data: Unlabelled) -> dict[str, np.ndarray[Any, Any]]:
        n, names = len(data), self.classifier.classes
        classes, runners = np.full(n, None, dtype=object), np.full(n, None, dtype=object)
        first, second = np.full(n, np.nan, np.float32), np.full(n, np.nan, np.float32)
        for encoded in self.classifier.store(self.inference).blocks(data):
            predicted = self.classifier.log_probabilities(encoded, self.prototypes)
            best, rows = predicted.exp().topk(2, dim=1), encoded.indices
            first[rows], second[rows] = best.values[:, 0].numpy(), best.values[:, 1].numpy()
            classes[rows] = [names[k] for k in best.indices[:, 0].tolist()]
            runners[rows] = [names[k] for k in best.indices[:, 1].tolist()]
        return {"class": classes, "probability": first, "runner_up": runners, "runner_up_probability": second}

    def _data(self, batch: Any) -> Unlabelled:
        modality, columns = self.classifier.backbone.modality, self.classifier.columns
        there = [str(name) for name in batch]
        if self.column is None:
            named = sample_columns(there, modality, columns, "the batch")
        else:
            named = tuple(name for name in there if name == self.column)
            if not named:
                raise InputError(f"the batch has no column {self.column}, only: {', '.join(there)}: name one")
        samples: Any = list(zip(*(batch[name] for name in named), strict=True)) if len(named) > 1 else batch[named[0]]
        if modality == "vector" and not len(samples):
            return Vectors(np.zeros((0, self.prototypes.shape[1]), np.float32))
        return normalise(list(samples), modality, columns).data
