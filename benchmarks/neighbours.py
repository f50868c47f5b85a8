"""CLIP features with a second space that is made from the images' own neighbours, where no other encoder exists.

    python benchmarks/neighbours.py FILE.npz…    # with features, labels and prototypes; or image_…, label_…, text

Accuracy in % of zero-shot, of the package's own correction by clusters, and of `second_space` with the features
themselves, the mean of an image and its ten neighbours, the mean of these alone, and the eigenvectors of their graph.
Nothing is trained; labels give the accuracies.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pouf import Classifier
from pouf.postprocess.clusters import clusters, second_space
from pouf.validation.diagnostics import share

NEIGHBOURS, EIGENVECTORS = 10, 256


def joined(arrays: dict[str, np.ndarray], *starts: str) -> Tensor:
    found = [arrays[name] for name in sorted(arrays) if name.startswith(starts)]
    return torch.from_numpy(np.concatenate(found))


def spaces(x: Tensor) -> dict[str, Tensor]:
    """By name: (n, d) each."""
    cosines = (x @ x.T).fill_diagonal_(-1)
    values, indices = cosines.topk(NEIGHBOURS, dim=1)
    graph = torch.zeros_like(cosines).scatter_(1, indices, values.clamp_min(0))
    graph = (graph + graph.T) / 2
    scale = graph.sum(1).rsqrt()
    torch.manual_seed(0)
    eigenvectors = torch.svd_lowrank(scale[:, None] * graph * scale, q=EIGENVECTORS, niter=4)[0]
    return {"own features": x, "with neighbours": x + x[indices].mean(1), "neighbours": x[indices].mean(1),
            "eigenvectors": eigenvectors}  # fmt: skip


def main() -> None:
    for file in sys.argv[1:]:
        arrays = dict(np.load(file))
        x = F.normalize(joined(arrays, "features", "image_").float(), dim=1)
        labels, prototypes = joined(arrays, "label"), joined(arrays, "prototypes", "text").float()
        classifier = Classifier.from_vectors(prototypes, [str(k) for k in range(len(prototypes))])
        scores = classifier.scores(classifier.encode(classifier.data(x.numpy())))
        states = {
            "zero-shot": scores.logits,
            "clusters": clusters(x, classifier.prototypes(), scores)(x, scores.logits),
        }
        states |= {name: second_space(scores, space)[0] for name, space in spaces(x).items()}
        found = ", ".join(f"{name} {100 * share(each.argmax(1) == labels):.1f}" for name, each in states.items())
        print(f"{Path(file).name}: {found}")


if __name__ == "__main__":
    main()
