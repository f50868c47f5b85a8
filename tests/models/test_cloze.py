"""Templates with a gap, as text."""

import pytest

from pouf import InputError
from pouf.bench.tasks import TASKS
from pouf.data.class_names import ClassSet
from pouf.models.templates import Cloze, Piece, make_cloze, read_words

TWO = (("terrible",), ("great",))


def filled(template: str, sample: str | tuple[str, ...]) -> str:
    return "".join(piece.string for piece in Cloze(template, TWO).fill(sample, "<mask>"))


def test_a_text_goes_into_its_slot_and_the_mask_into_the_gap() -> None:
    assert filled("{text} It was [MASK].", "  Good fun. ") == "Good fun. It was <mask>."


def test_lm_bffs_edits_turn_a_pair_into_a_question_and_its_answer() -> None:
    template = "{text_a:drop_last}? [MASK], {text_b:lower_first}"
    assert filled(template, ("It rained.", "The road is wet.")) == "It rained? <mask>, the road is wet."


def test_edits_are_made_in_the_order_they_are_written() -> None:
    assert filled("{text:drop_last,lower_first} [MASK]", "A.") == "a <mask>"
    assert filled("{text:lower_first,drop_last} [MASK]", "AB") == "a <mask>"


def test_a_solved_template_has_the_first_word_of_the_class_in_its_gap() -> None:
    cloze = Cloze("{text} It was [MASK].", (("terrible", "bad"), ("great",)))
    assert "".join(piece.string for piece in cloze.solve("Dull.", 0)) == "Dull. It was terrible."


def test_a_word_at_the_very_start_keeps_the_space_that_its_token_has() -> None:
    assert Cloze("[MASK]: {text}", TWO).solve("Who?", 1)[0] == Piece(" great")


def test_a_limit_belongs_to_its_text_alone() -> None:
    pieces = Cloze("{text_a:drop_last,first=3}? [MASK], {text_b}", TWO).fill(("abc.", "def"), "m")
    assert [(p.string, p.limit) for p in pieces if p.is_text] == [("abc", 3), ("def", None)]


def test_columns_are_those_of_the_slots() -> None:
    assert Cloze("{text} [MASK]", TWO).columns == ("text",)
    assert Cloze("{text_b} [MASK] {text_a}", TWO).columns == ("text_a", "text_b")
    assert Cloze("{text_b} [MASK]", TWO).columns == ("text_a", "text_b")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{text} It was.", "0 masks, expected one"),
        ("{text} [MASK] [MASK]", "2 masks, expected one"),
        ("It was [MASK].", "no slot for the text"),
        ("{txt} [MASK]", "unknown slot '{txt}'"),
        ("{} [MASK]", "unknown slot '{}'"),
        ("{text:upper} [MASK]", "unknown edit 'upper': use drop_last, lower_first or first=N"),
        ("{text:first=0} [MASK]", "unknown edit 'first=0'"),
        ("{text} {text_b} [MASK]", "mixes"),
    ],
)
def test_bad_templates_are_refused(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cloze(template, TWO)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["great"], "1 label words for 2 classes"),
        (["great", ""], "a class has no label word"),
        (["great", []], "a class has no label word"),
        (["great", "great"], "must differ between and within"),
    ],
)
def test_bad_words_are_refused(words: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_cloze(ClassSet(("negative", "positive")), ["{text} [MASK]"], words, None)


def test_words_without_a_template_are_refused() -> None:
    with pytest.raises(InputError, match=r"exactly one template with \[MASK\]"):
        make_cloze(ClassSet(("negative", "positive")), None, ["bad", "good"], None)


def test_a_template_without_a_mask_is_no_cloze() -> None:
    assert make_cloze(ClassSet(("cat", "dog")), ["a photo of a {}."], None, None) is None


def test_words_from_the_command_line() -> None:
    assert read_words("bad|awful,good") == [["bad", "awful"], ["good"]]


SENTIMENT, INFER = "{text} It was [MASK].", "{text_a:drop_last}? [MASK], {text_b:lower_first}"
SAME = "{text_a} [MASK], {text_b:lower_first}"
# Template, words in the order of the classes, first metric, length, weights of transport and information.
PAPER = {
    "SST-2": (SENTIMENT, "terrible great", "accuracy", 128, 1, 0.6),
    "SST-5": (SENTIMENT, "terrible bad okay good great", "accuracy", 128, 1, 0.6),
    "MR": (SENTIMENT, "terrible great", "accuracy", 128, 1, 0.6),
    "CR": (SENTIMENT, "terrible great", "accuracy", 128, 1, 0.6),
    "MPQA": (SENTIMENT, "terrible great", "accuracy", 128, 1, 0.6),
    "Subj": ("{text} This is [MASK].", "subjective objective", "accuracy", 128, 1, 0.6),
    "TREC": ("[MASK]: {text}", "Description Entity Expression Human Location Number", "accuracy", 128, 1, 0.6),
    "CoLA": ("{text} This is [MASK].", "incorrect correct", "matthews", 128, 1, 0.6),
    "MNLI": (INFER, "No Yes Maybe", "accuracy", 256, 1, 0.6),
    "MNLI-mm": (INFER, "No Yes Maybe", "accuracy", 256, 1, 0.6),
    "SNLI": (INFER, "No Yes Maybe", "accuracy", 256, 1, 0.6),
    "QNLI": (INFER, "No Yes", "accuracy", 128, 1, 0.6),
    "RTE": (INFER.replace("drop_last", "drop_last,first=240"), "No Yes", "accuracy", 256, 1, 0.6),
    "MRPC": (SAME, "No Yes", "f1", 128, 1e-2, 1e-4),
    "QQP": (SAME, "No Yes", "f1", 128, 1e-2, 1e-4),
    "STS-B": (SAME, "No Yes", "pearson", 128, 1, 0.6),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_is_as_the_paper_and_lm_bff_have_it(task) -> None:
    cloze = make_cloze(ClassSet(tuple(task.labels)), [task.template], list(task.words.values()), task.max_length)
    weights = (task.transport, task.information)
    words = " ".join(word for (word,) in cloze.words)
    assert (cloze.template, words, task.metrics[0], cloze.max_length, *weights) == PAPER[task.name]
    assert task.draws == (4 if task.name in ("QQP", "MNLI", "MNLI-mm", "SNLI") else 16)
    sample = ("It rained.", "The road is wet.") if task.pair else "It rained."
    assert "<mask>" in "".join(piece.string for piece in cloze.fill(sample, "<mask>"))
