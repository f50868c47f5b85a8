"""Filled templates as tokens: context, truncation, label words."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import BERT_MARKS, MASKED_LMS, masked_lm_tokenizer, word_piece_tokenizer

from pouf import InputError
from pouf.models.masked_text import MaskedText
from pouf.models.templates import Cloze, Example

WORDS = (("terrible",), ("great",))
LONG = " ".join(["the film was so very good and we loved it"] * 20)


def masked_text(kind: str, template: str = "{text} it was [MASK].", max_length: int = 32, words=WORDS) -> MaskedText:
    _, build, marks, _ = MASKED_LMS[kind]
    return MaskedText(masked_lm_tokenizer(build, marks), Cloze(template, words, max_length), longest=64)


def tokens_of(reader: MaskedText, *samples) -> list[list[str]]:
    batch = reader(list(samples))
    rows = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert all(
        row[position] == reader.tokenizer.mask_token_id
        for row, position in zip(rows, batch["mask_position"], strict=True)
    )
    return [reader.tokenizer.convert_ids_to_tokens(row) for row in rows]


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_the_template_is_read_as_running_text(kind: str) -> None:
    reader = masked_text(kind)
    tokenizer = reader.tokenizer
    expected = tokenizer(f"we loved the film it was {tokenizer.mask_token}.")["input_ids"]
    assert reader(["we loved the film"])["input_ids"].tolist() == [expected]


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_a_long_text_is_cut_at_its_end_and_the_template_stays(kind: str) -> None:
    reader = masked_text(kind)
    (tokens,) = tokens_of(reader, LONG)
    (short,) = tokens_of(reader, "it")
    template = short[2:]  # after the start mark and the text's only token
    assert tokens[-len(template) :] == template
    assert 30 <= len(tokens) <= 32, "as much of the text as there is room for"
    assert tokens[1 : -len(template)] == reader.tokenizer.tokenize(LONG)[: len(tokens) - len(template) - 1]


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_the_longer_text_of_a_pair_is_cut_first(kind: str) -> None:
    reader = masked_text(kind, "{text_a}? [MASK], {text_b}")
    (tokens,) = tokens_of(reader, (LONG, "we loved the food"))
    joined = reader.tokenizer.convert_tokens_to_string(tokens)
    assert "we loved the food" in joined and "the film was so very good" in joined and len(tokens) <= 32


def test_a_text_with_a_limit_is_cut_to_it() -> None:
    reader = masked_text("bert", "{text_a:first=3}? [MASK], {text_b}")
    (tokens,) = tokens_of(reader, ("the film was so very good", "we loved it"))
    assert tokens == ["[CLS]", "the", "film", "was", "?", "[MASK]", ",", "we", "loved", "it", "[SEP]"]


def test_only_the_longest_of_a_batch_is_padded_to() -> None:
    batch = masked_text("bert")(["it", "we loved the film"])
    assert batch["input_ids"].shape == (2, 1 + 4 + 4 + 1)
    assert batch["attention_mask"].sum(1).tolist() == [7, 10]
    assert batch["mask_position"].tolist() == [4, 7]


def test_room_is_left_for_soft_vectors() -> None:
    assert masked_text("bert")([LONG], room=5)["input_ids"].shape[1] == 27


def test_a_template_longer_than_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="needs 7 tokens without its texts, but the maximum length is 6"):
        masked_text("bert", "{text} so it was [MASK].", max_length=6)(["we loved it"])


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_a_text_that_names_special_tokens_is_only_a_text(kind: str) -> None:
    reader = masked_text(kind)
    marks = " ".join(reader.tokenizer.all_special_tokens)
    (tokens,) = tokens_of(reader, marks)
    assert tokens.count(reader.tokenizer.mask_token) == 1
    assert tokens.count(reader.tokenizer.sep_token) == 1


def test_solved_examples_stand_after_the_sample_each_behind_a_separator() -> None:
    reader = masked_text("bert")
    (tokens,) = tokens_of(reader, Example("it", after=(("bad food", 0), ("good food", 1))))
    expected = "[CLS] it it was [MASK] . [SEP] bad food it was terrible . [SEP] good food it was great . [SEP]"
    assert tokens == expected.split()


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_what_stands_between_separators_has_the_tokens_that_it_has_in_the_whole(kind: str) -> None:
    reader = masked_text(kind, max_length=64)
    tokenizer = reader.tokenizer
    solved = (("bad food", 0), ("we loved it", 1))
    own, shown = f"the film it was {tokenizer.mask_token}.", ["bad food it was terrible.", "we loved it it was great."]
    batch = reader([Example("the film", after=solved), Example("the film", before=solved)])
    rows = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert rows == tokenizer([tokenizer.sep_token.join(parts) for parts in ([own, *shown], [*shown, own])])["input_ids"]


def test_a_template_that_is_shown_often_is_tokenized_once() -> None:
    reader, tokenized = masked_text("bert"), []
    reader.tokenizer = Listening(reader.tokenizer, tokenized)
    demonstrations = [("bad food", 0), ("good food", 1), ("so good", 1)]
    first = reader([Example("it", after=(demonstrations[0], other)) for other in demonstrations[1:]])
    again = reader([Example("it", after=(demonstrations[0], other)) for other in demonstrations[1:]])
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert len(tokenized) == len(set(tokenized)) == 4, "the sample and three shots"


class Listening:
    """A tokenizer that notes the texts that it is given."""

    def __init__(self, tokenizer: Any, seen: list[str]) -> None:
        self._tokenizer, self._seen = tokenizer, seen

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self._seen.extend(texts)
        return self._tokenizer(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_solved_examples_before_a_sample_are_left_out_where_they_do_not_fit() -> None:
    reader = masked_text("bert", max_length=24)
    shots = tuple((f"{word} food", 0) for word in ("okay", "bad", "terrible", "good"))
    (tokens,) = tokens_of(reader, Example("we loved it", before=shots))
    expected = "[CLS] terrible food it was terrible . [SEP] good food it was terrible . [SEP] we loved it it was [MASK]"
    assert tokens == [*expected.split(), ".", "[SEP]"]


def test_a_text_is_cut_to_its_own_limit_before_examples_are_left_out() -> None:
    reader = masked_text("bert", "{text:first=2} it was [MASK].", max_length=24)
    (tokens,) = tokens_of(reader, Example(LONG, before=(("bad food", 0), ("good food", 1))))
    expected = "[CLS] bad food it was terrible . [SEP] good food it was great . [SEP] the film it was [MASK] . [SEP]"
    assert tokens == expected.split()


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_a_word_of_several_tokens_is_refused_with_its_pieces_and_words_near_it(kind: str) -> None:
    with pytest.raises(InputError) as caught:
        masked_text(kind, words=(("terribly",), ("great",))).label_ids()
    message = str(caught.value)
    assert "label word 'terribly' is" in message and " + " in message and "Try terrible" in message


def test_a_word_that_the_tokenizer_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match=r"'🙂' is unknown to this model's tokenizer \(\[UNK\]\)"):
        masked_text("bert", words=(("🙂",), ("great",))).label_ids()


def test_a_words_token_is_the_one_it_has_in_the_gap() -> None:
    """In a byte-pair tokenizer a word after a space and the same word glued to a bracket are different tokens."""
    after_space = masked_text("roberta", "{text} it was [MASK].").label_ids()
    at_start = masked_text("roberta", "[MASK]: {text}").label_ids()
    glued = masked_text("roberta", "{text} ([MASK])").label_ids()
    tokenizer = masked_text("roberta").tokenizer
    assert tokenizer.convert_ids_to_tokens([row[0] for row in after_space]) == ["Ġterrible", "Ġgreat"]
    assert at_start == after_space
    assert tokenizer.convert_ids_to_tokens([row[0] for row in glued]) == ["terrible", "great"]


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    tokenizer = masked_lm_tokenizer(word_piece_tokenizer, BERT_MARKS)
    tokenizer.mask_token = None
    with pytest.raises(InputError, match="no mask token"):
        MaskedText(tokenizer, Cloze("{text} [MASK]", WORDS), longest=64)


@pytest.mark.parametrize("word", ["[MASK]", "[SEP]", "[PAD]"])
def test_a_special_token_is_no_label_word(word: str) -> None:
    tokenizer = masked_lm_tokenizer(*MASKED_LMS["bert"][1:3])
    with pytest.raises(InputError, match="is a special token of this model"):
        MaskedText(tokenizer, Cloze("{text} It was [MASK].", ((word,), ("good",))), 64).label_ids()


def test_a_text_of_100_000_characters_full_of_masks_leaves_one_mask() -> None:
    tokenizer = masked_lm_tokenizer(*MASKED_LMS["roberta"][1:3])
    texts = MaskedText(tokenizer, Cloze("{text} It was [MASK].", (("terrible",), ("great",))), 64)
    batch = texts(["the <mask> film " * 6000, "<mask>", "</s><s>"])
    assert batch["input_ids"].shape[1] <= 64
    assert (batch["input_ids"] == tokenizer.mask_token_id).sum(1).tolist() == [1, 1, 1]
