"""What the paper reports. It chose the step by labels: those of the test for images, those of D_dev for language."""

from __future__ import annotations

import re
from typing import NamedTuple

from pouf.bench.images import image_tasks
from pouf.bench.language import TASKS

# A model of this name is the paper's, in any account of the hub.
IMAGE_MODEL, LANGUAGE_MODEL = "clip-vit-base-patch16", "roberta-large"


class Figure(NamedTuple):
    mean: float
    std: float | None = None


Figures = dict[tuple[str, str], Figure]


def papers_model(task: str, model: str) -> bool:
    """Whether the paper's figure of this task is one of this model."""
    return model.rstrip("/").split("/")[-1] == (LANGUAGE_MODEL if task in TASKS else IMAGE_MODEL)


def _rows(columns: list[str], rows: dict[str, str]) -> Figures:
    """(task, method) -> figure, from lines such as `81.5(0.1) 80.7(0.7)`; a dash leaves one out."""
    found: Figures = {}
    for method, figures in rows.items():
        for column, figure in zip(columns, figures.split(), strict=True):
            if figure != "-":
                mean, *std = re.findall(r"-?[\d.]+", figure)
                found[column, method] = Figure(float(mean), float(std[0]) if std else None)
    return found


IMAGES = _rows(
    [task for name in ("office31", "office-home", "domainnet") for task in (*image_tasks(name), f"{name} average")],
    {
        "zero-shot": "79.0 77.5 74.7 77.1 82.7 68.1 89.1 89.8 82.4 70.9 48.2 65.9 14.0 83.6 63.6 57.7",
        "tent": "81.5(0.1) 80.7(0.7) 82.8(0.2) 81.7 83.2(0.1) 67.8(0.2) 91.9(0.1) 90.4(0.1) 83.3 "
        "71.4(0.2) 47.8(0.5) 66.2(0.1) 14.2(0.1) 83.9(0.1) 64.1(0.2) 57.9",
        "upl": "81.4(0.1) 82.6(0.1) 83.6(0.3) 82.5 83.3(0.1) 67.7(0.1) 91.5(0.1) 90.7(0.1) 83.3 "
        "71.7(0.1) 47.5(0.4) 66.3(0.2) 14.4(0.3) 83.8(0.1) 64.3(0.1) 58.0",
        "pouf-prompt": "83.6(0.5) 89.9(2.5) 90.6(2.3) 88.0 83.7(0.1) 71.2(0.1) 91.4(0.1) 90.8(0.1) 84.3 "
        "72.8(0.1) 53.1(0.3) 68.6(0.1) 15.9(0.1) 84.4(0.0) 66.2(0.1) 60.2",
        "pouf-full": "84.4(0.4) 91.1(2.1) 91.3(2.5) 88.9 86.2(0.4) 73.8(0.3) 92.7(0.1) 91.7(0.1) 86.1 "
        "73.8(0.1) 55.7(0.3) 68.6(0.1) 18.8(0.7) 84.6(0.0) 66.4(0.1) 61.3",
        # As printed: the mean of DomainNet's six figures would be 62.4.
        "coop": "83.7(2.1) 98.8(0.6) 98.2(0.8) 93.6 85.6(0.4) 73.2(0.2) 92.7(0.1) 91.6(0.1) 85.8 "
        "75.3(0.2) 55.7(0.2) 71.9(0.2) 20.7(0.2) 83.4(0.1) 67.4(0.1) 62.9",
    },
)
LANGUAGE = _rows(
    list(TASKS),
    {
        "majority": "50.9 23.1 50.0 50.0 50.0 50.0 18.8 0.0 32.7 33.0 33.8 49.5 52.7 81.2 0.0 -",
        "zero-shot": "83.6 35.0 80.8 79.5 67.6 51.4 32.0 2.0 50.8 51.7 49.5 50.8 51.3 61.9 49.7 -3.2",
        "pouf": "89.4(0.0) 44.9(1.6) 86.4(0.9) 86.0(5.6) 78.1(7.8) 80.8(0.1) 36.9(15.1) 1.5(0.1) "
        "55.0(2.3) 56.3(3.4) 64.0(0.2) 68.2(4.0) 64.5(2.5) 81.2(0.1) 53.8(0.1) 20.9(9.3)",
        "fine-tuning": "81.4(3.8) 43.9(2.0) 76.9(5.9) 75.8(3.2) 72.0(3.8) 90.8(1.8) 88.8(2.1) 33.9(14.3) "
        "45.8(6.4) 47.8(6.8) 48.4(4.8) 60.2(6.5) 54.4(3.9) 76.6(2.5) 60.7(4.3) 53.5(8.5)",
        "in-context": "84.8(1.3) 30.6(0.9) 80.5(1.7) 87.4(0.8) 63.8(2.1) 53.6(1.0) 26.2(2.4) -1.5(2.4) "
        "52.0(0.7) 53.4(0.6) 47.1(0.6) 53.8(0.4) 60.4(1.4) 45.7(6.0) 36.1(5.2) 14.3(2.8)",
        "lm-bff": "92.6(0.5) 50.6(1.4) 86.6(2.2) 90.2(1.2) 87.0(1.1) 92.3(0.8) 87.5(3.2) 18.7(8.8) "
        "70.7(1.3) 72.0(1.2) 79.7(1.5) 69.2(1.9) 68.7(2.3) 77.8(2.0) 69.8(1.8) 73.5(5.1)",
        "lm-bff-pouf": "93.2(0.0) 53.6(0.2) 87.6(0.2) 91.8(0.2) 88.0(0.2) 92.9(0.1) 90.1(0.1) 20.6(0.6) "
        "73.8(1.1) 74.9(0.1) 80.0(0.2) 76.3(0.3) 70.5(0.6) 81.8(0.7) 69.0(1.0) 82.1(0.1)",
    },
)
ABLATION = _rows(
    ["office31 average", "RTE"],
    {
        "exact": "86.1(0.2) 58.0(5.5)", "sinkhorn": "86.5(0.2) 63.3(6.0)", "no-transport": "83.3(0.4) 56.9(1.5)",
        "no-information": "84.2(0.2) 58.4(1.3)", "exponential": "87.6(0.5) 61.3(6.3)", "default": "88.0(0.9) 64.5(2.5)",
    },
)  # fmt: skip
UNSEEN = _rows(
    [
        "office31:webcam seen", "office31:webcam unseen", "office31:webcam>amazon seen",
        "office31:webcam>amazon unseen", "office31:amazon seen", "office31:amazon unseen",
        "office31:amazon>webcam seen", "office31:amazon>webcam unseen",
    ],
    {
        "zero-shot": "65.2 87.5 76.5 83.0 76.5 83.0 65.2 87.5",
        "seen": "85.1 92.8 83.6 82.7 84.1 81.7 81.1 89.4",
        "seen+unseen": "75.5 95.7 79.6 85.8 80.6 87.2 72.2 93.1",
    },
)  # fmt: skip
LAMBDAS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1.0")
LAMBDA = _rows(
    ["office31:webcam"],
    dict(zip(LAMBDAS, "87.5 88.3 90.6 91.7 90.8 89.2 90.6 89.8 88.9 91.6".split(), strict=True)),
)
COST = _rows(
    ["parameters", "total", "seconds per step"],
    {"pouf-prompt": "2049 149622785 0.4", "pouf-full": "149620737 149620737 1.8"},
)
