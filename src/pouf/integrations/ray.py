"""Predictions on a cluster: a callable for Ray Data's `map_batches` and for other tools that pass tables in batches.

    import ray
    from pouf.integrations.ray import BatchPredictor

    photos = ray.data.read_images("s3://bucket/photos/")
    photos.map_batches(
        BatchPredictor, fn_constructor_args=["my-run"], compute=ray.data.ActorPoolStrategy(size=8), num_gpus=1,
        batch_size=256,
    )

Nothing here needs Ray itself: Spark's `mapInPandas` takes the same callable, with tables of pandas.

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


class BatchPredictor:
    """Adds the columns `class`, `probability`, `runner_up` and `runner_up_probability` to a batch.

    A batch is a dictionary of arrays, as in Ray Data, or a table of pandas; the result has the same type. An unreadable
    input gets None as its class and NaN as its probability.

    Args:
        run: a run folder, or one written by `save_pretrained`, which all machines can read.
        column: the column of the samples, by default the first with a usual name. Images are arrays, encoded bytes or
            paths; vectors are rows of numbers.
        use: "advised" (by the run), "chosen", "last" or "zero-shot".
        device: by default the GPU if there is one. Ray gives each copy of this callable its own.
    """

    def __init__(
        self,
        run: str | Path,
        column: str | None = None,
        use: Use = "advised",
        batch_size: int = 64,
        device: str | None = None,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.classifier: Classifier = Classifier.from_pretrained(run, use=use, device=device)
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
        names = [str(name) for name in batch]
        if self.column is None:
            used = sample_columns(names, modality, columns, "the batch")
        else:
            used = tuple(name for name in names if name == self.column)
            if not used:
                raise InputError(f"the batch has no column {self.column}, only: {', '.join(names)}: name one")
        samples: Any = list(zip(*(batch[name] for name in used), strict=True)) if len(used) > 1 else batch[used[0]]
        if modality == "vector" and not len(samples):
            return Vectors(np.zeros((0, self.prototypes.shape[1]), np.float32))
        return normalise(list(samples), modality, columns).data
