"""The paper's 15 language tasks (16 columns, as MNLI has two test sets), with the templates and words of LM-BFF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SEEDS = (42, 21, 87, 13, 100)
IN_CONTEXT_LENGTH = 512
SHOTS = 16  # labelled training examples a class, and as many for development
# Gao et al.'s settings for each seed, the best on D_dev taken: the paper's figures of these rows were made so.
GRID: dict[str, tuple[float, ...]] = {"batch_size": (2, 4, 8), "optimisation.lr": (1e-5, 2e-5, 5e-5)}
GRID_METHODS = ("fine-tuning", "lm-bff")

ONE_SENTENCE_SENTIMENT = "{text} It was [MASK]."
INFERENCE = "{text_a:drop_last}? [MASK], {text_b:lower_first}"
PARAPHRASE = "{text_a} [MASK], {text_b:lower_first}"


@dataclass(frozen=True)
class Layout:
    """Where a task lies in the archives of GLUE and LM-BFF.

    Columns are names where the file has a header, else positions.
    """

    folder: str
    columns: tuple[str, ...] | tuple[int, ...]
    label: str | int
    test: str = "dev"  # the file that has labels and is not for training: GLUE keeps those of its test to itself
    labelled_test: bool = False  # the archive has a test with labels too, and the paper judges on dev all the same


@dataclass(frozen=True)
class Task:
    """One column of the paper's table.

    Args:
        words: label → the word that stands for it, in the order of LM-BFF. The last one is the positive class.
        raw: what the archives write for these labels, where it is not the label itself.
        also: what the hub calls them, where that is neither.
        metrics: the first is the one in the table.
        scale: for a regression between two words, the score of the second.
        draws: demonstrations that a prediction of LM-BFF is averaged over.
        double: twice the length where LM-BFF shows demonstrations.
        own_limit, shot_limit: most tokens of a text beside solved ones, and of each solved one's.
        transport, information: weights in the unsupervised setting, where they are not the usual 1 and .6.
    """

    name: str
    template: str
    words: dict[str, str]
    layout: Layout
    raw: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    max_length: int = 128
    scale: float | None = None
    draws: int = 16
    double: bool = False
    own_limit: int | None = None
    shot_limit: int | None = None
    transport: float = 1.0
    information: float = 0.6

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.words)

    @property
    def pair(self) -> bool:
        return "{text}" not in self.template

    def length(self, demonstrations: Literal["", "after", "before"]) -> int:
        """Most tokens: as many as the model reads in context, before a text; LM-BFF's own numbers after it."""
        if demonstrations == "before":
            return IN_CONTEXT_LENGTH
        return self.max_length * (2 if demonstrations and self.double else 1)


BAD_OR_GOOD = {"negative": "terrible", "positive": "great"}
FIVE_STEPS = {
    "very negative": "terrible",
    "negative": "bad",
    "neutral": "okay",
    "positive": "good",
    "very positive": "great",
}
THREE_WAYS = {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"}
TWO_WAYS = {"not_entailment": "No", "entailment": "Yes"}
SAME_OR_NOT = {"not_equivalent": "No", "equivalent": "Yes"}
QUESTIONS = {
    "description": "Description", "entity": "Entity", "abbreviation": "Expression", "human": "Human",
    "location": "Location", "number": "Number",
}  # fmt: skip
BINARY = ("0", "1")
SHORT = ("neg", "pos")
PAIR = ("sentence1", "sentence2")
DOUBLE: dict[str, Any] = {"double": True, "own_limit": 110}
RTE_TEMPLATE = INFERENCE.replace("drop_last", "drop_last,first=240")


def _csv(folder: str) -> Layout:
    """LM-BFF's own files: no header, label and text."""
    return Layout(folder, (1,), 0, test="test")


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("SST-2", ONE_SENTENCE_SENTIMENT, BAD_OR_GOOD, Layout("SST-2", ("sentence",), "label"), BINARY, SHORT),
        Task("SST-5", ONE_SENTENCE_SENTIMENT, FIVE_STEPS, _csv("sst-5"), ("0", "1", "2", "3", "4"),
             **DOUBLE, shot_limit=20),
        Task("MR", ONE_SENTENCE_SENTIMENT, BAD_OR_GOOD, _csv("mr"), BINARY, SHORT, **DOUBLE, shot_limit=50),
        Task("CR", ONE_SENTENCE_SENTIMENT, BAD_OR_GOOD, _csv("cr"), BINARY, SHORT, **DOUBLE, shot_limit=50),
        Task("MPQA", ONE_SENTENCE_SENTIMENT, BAD_OR_GOOD, _csv("mpqa"), BINARY, SHORT, **DOUBLE),
        Task("Subj", "{text} This is [MASK].", {"subjective": "subjective", "objective": "objective"},
             _csv("subj"), BINARY, **DOUBLE, shot_limit=50),
        Task("TREC", "[MASK]: {text}", QUESTIONS, _csv("trec"), ("0", "1", "2", "3", "4", "5"),
             ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM"), **DOUBLE),
        Task("CoLA", "{text} This is [MASK].", {"not_grammatical": "incorrect", "grammatical": "correct"},
             Layout("CoLA", (3,), 1), BINARY, ("unacceptable", "acceptable"), metrics=("matthews", "accuracy")),
        Task("MNLI", INFERENCE, THREE_WAYS, Layout("MNLI", PAIR, "gold_label", test="dev_matched"),
             max_length=256, draws=4),
        Task("MNLI-mm", INFERENCE, THREE_WAYS, Layout("MNLI", PAIR, "gold_label", test="dev_mismatched"),
             max_length=256, draws=4),
        Task("SNLI", INFERENCE, THREE_WAYS, Layout("SNLI", PAIR, "gold_label", labelled_test=True), max_length=256,
             draws=4),
        Task("QNLI", INFERENCE, TWO_WAYS, Layout("QNLI", ("question", "sentence"), "label")),
        Task("RTE", RTE_TEMPLATE, TWO_WAYS, Layout("RTE", PAIR, "label"), max_length=256),
        Task("MRPC", PARAPHRASE, SAME_OR_NOT, Layout("MRPC", ("#1 String", "#2 String"), "Quality"), BINARY,
             metrics=("f1", "accuracy"), transport=1e-2, information=1e-4),
        Task("QQP", PARAPHRASE, SAME_OR_NOT, Layout("QQP", ("question1", "question2"), "is_duplicate"), BINARY,
             ("not_duplicate", "duplicate"),
             metrics=("f1", "accuracy"), draws=4, transport=1e-2, information=1e-4),
        Task("STS-B", PARAPHRASE, {"0": "No", "1": "Yes"}, Layout("STS-B", PAIR, "score"),
             metrics=("pearson", "spearman"), scale=5.0),
    )
}  # fmt: skip
