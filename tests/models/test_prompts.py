"""Class names and templates: what is accepted, and what the error says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import clip, sentence_encoder

from pouf import EMBEDDED, Classifier, InputError, Recipe
from pouf.data.class_names import ClassSet, check_classes, class_set, read_classes
from pouf.models.templates import check_templates, class_texts, fill, read_templates


def test_underscores_are_read_as_spaces() -> None:
    (text,), _ = class_texts(class_set(["back_pack", "mug"]))
    assert fill(["a photo of a {}.", "{}"], text) == ["a photo of a back pack.", "back pack"]


def test_braces_in_a_class_name_stay_as_they_are() -> None:
    assert fill(["a {}."], "{0}") == ["a {0}."]


@pytest.mark.parametrize("given", ["cat,dog,sea lion", " cat , dog,sea lion,"])
def test_classes_from_a_list(given: str) -> None:
    assert read_classes(given) == (("cat", "dog", "sea lion"), None)


def test_classes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_text("cat\n\n  dog \nsea, lion\n", encoding="utf-8-sig")
    assert read_classes(str(file)) == (("cat", "dog", "sea, lion"), None)


DESCRIBED = ClassSet(("entity", "number"), (("a thing", "an animal or a product"), ("a date or an amount",)))
FILES = {
    ".json": '{"entity": ["a thing", "an animal or a product"], "number": "a date or an amount"}',
    ".toml": 'entity = ["a thing", "an animal or a product"]\nnumber = "a date or an amount"\n',
}


@pytest.mark.parametrize("ending", FILES)
def test_descriptions_are_read_from_files(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"classes{ending}"
    file.write_text(FILES[ending], encoding="utf-8-sig")
    assert read_classes(str(file)) == class_set(file) == DESCRIBED
    assert class_set(DESCRIBED.as_given()) == DESCRIBED


def test_json_can_hold_names_alone_and_toml_a_table_of_classes(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('["cat", "dog"]')
    assert class_set(tmp_path / "names.json") == (("cat", "dog"), None)
    (tmp_path / "c.toml").write_text('[classes]\ncat = "a cat"\ndog = "a dog"\n')
    assert class_set(tmp_path / "c.toml") == (("cat", "dog"), (("a cat",), ("a dog",)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"cat": "", "dog": "a dog"}', "class 'cat' has an empty description"),
        ('{"cat": [], "dog": "a dog"}', "class 'cat' has an empty description"),
        ('{"cat": 3, "dog": "a dog"}', "class 'cat' has 3 where a description"),
        ('{"cat": "a cat"', "is not valid JSON"),
        ('"cat"', "expected a list of names, or a description for each name"),
    ],
)
def test_descriptions_that_cannot_work_are_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "classes.json").write_text(content)
    with pytest.raises(InputError, match=words):
        class_set(tmp_path / "classes.json")


def test_prompts_are_all_descriptions_in_all_templates(tiny: Classifier) -> None:
    described = Classifier(tiny.backbone, {"round": ["zero", "a six"], "straight": "one"})
    assert described.prompts() == [["zero", "a six"], ["one"]], "a description is a whole prompt, unless told otherwise"
    described = Classifier(tiny.backbone, {"round": ["zero", "six"], "straight": "one"}, ["a {}", "the {}"])
    assert described.prompts() == [["a zero", "the zero", "a six", "the six"], ["a one", "the one"]]
    encoded = F.normalize(tiny.backbone.encode_prompts(["a zero", "the zero", "a six", "the six"]), dim=1)
    assert torch.allclose(described.prototypes()[0], F.normalize(encoded.mean(0), dim=0), atol=1e-6)


def test_a_list_longer_than_a_file_name_may_be_is_still_a_list() -> None:
    names = [f"class number {i}" for i in range(1000)]
    assert len(read_classes(",".join(names)).names) == 1000


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (["cat", "dog", "Cat"], "duplicate class names: cat"),
        (["back_pack", "back pack"], "duplicate class names: back pack"),
        (["cat"], "at least 2"),
        (["cat", "_"], "a class name is empty"),
        ("cat, dog", r"list of names, not the text 'cat, dog': give \['cat', 'dog'\]"),
    ],
)
def test_classes_that_cannot_work_are_refused(classes: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_classes(classes)


def test_a_missing_class_file_is_said() -> None:
    with pytest.raises(InputError, match=r"no such file: 'classes.txt'; expected one with a class name per line, or"):
        read_classes("classes.txt")
    with pytest.raises(InputError, match="one class given, 'zero'; name at least two"):
        read_classes("zero")


@pytest.mark.parametrize("template", ["a photo", "{} and {}", "{name}"])
def test_a_template_without_its_slot_is_refused(template: str) -> None:
    with pytest.raises(InputError, match=r"expected one: write \{\} where the name goes"):
        check_templates([template])


def test_no_template_is_refused() -> None:
    with pytest.raises(InputError, match="no template given"):
        check_templates([])


def test_templates_from_options_and_files(tmp_path: Path) -> None:
    file = tmp_path / "templates.txt"
    file.write_text("a {}.\nthe {}.\n")
    assert read_templates(["{}", str(file)]) == ("{}", "a {}.", "the {}.")


LONG = "a photo of the sea where the film is good and the book is bad and the text is about a dog and about {}"


@pytest.mark.parametrize("build", [clip, sentence_encoder])
def test_classes_that_are_the_same_after_cutting_are_an_error(build: Callable[[Path], Path], tmp_path: Path) -> None:
    """A prompt that ends in the class name loses it first."""
    model, templates = build(tmp_path / "model"), [LONG.replace("good", "good " * 60)]
    with pytest.raises(InputError, match=r"is cut to the \d+ tokens .* the same for 'cat' and 'dog': shorten"):
        Classifier.from_pretrained(model, ["cat", "dog"], templates)
    with pytest.raises(InputError, match="is cut to"):  # one bad template among good ones counts as well
        Classifier.from_pretrained(model, ["cat", "dog"], ["a photo of a {}.", *templates])


def test_names_that_a_tokenizer_does_not_know_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not know the names '犬' and '猫'"):
        Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["犬", "猫"])


def test_a_special_token_in_a_name_or_a_text_is_text(tmp_path: Path) -> None:
    """CLIP's vector is that of the first end token: a name that holds one would be cut there."""
    classifier = Classifier.from_pretrained(EMBEDDED, ["x <|endoftext|> y", "x <|endoftext|> z"])
    one, other = classifier.prototypes()
    assert not torch.allclose(one, other, atol=1e-3)
    sentences = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["cat", "dog"])
    tokens = sentences.backbone.prepare(["good [SEP] film [PAD] sea"])["input_ids"][0].tolist()
    tokenizer = sentences.backbone.tokenizer
    assert tokens.count(tokenizer.sep_token_id) == 1 and tokenizer.pad_token_id not in tokens


UNSEEN = {
    "alone": "\u200b", "between letters": "c\u200bat", "joiner": "c\u200dat", "mark of order": "\ufeffcat",
    "other direction": "\u202ecat", "soft hyphen": "sea\u00adlion", "filler": "\u3164", "selector": "\ufe0f",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["two\nlines", "a\x1b[31mred", "a\u2028b", "half \ud800", "\x00", *UNSEEN.values()], ids=ascii
)
def test_names_of_more_than_one_line_controls_and_what_nobody_sees_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"line break, a control character|no visible character"):
        check_classes([name, "dog"])


def test_other_separators_of_unicode_do_not_end_a_line_of_a_class_file(tmp_path: Path) -> None:
    for separator in "\u2028\x0b\x85":
        (tmp_path / "classes.txt").write_text(f"cat{separator}fish\r\ndog\n", encoding="utf-8", newline="")
        with pytest.raises(InputError, match=r"class name .*cat.*fish.* contains a line break"):
            read_classes(str(tmp_path / "classes.txt"))


def test_a_key_that_occurs_twice_in_a_json_file_of_classes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_text('{"cat": "an animal", "dog": "loud", "cat": "small"}')
    with pytest.raises(InputError, match="'cat' occurs twice"):
        read_classes(str(tmp_path / "classes.json"))


@pytest.mark.parametrize(
    ("one", "other"), [("café", "cafe\u0301"), ("ﬁre", "fire"), ("Straße", "STRASSE"), ("ｃａｔ", "cat")]
)
def test_spellings_that_differ_in_unicode_form_alone_are_one_name(one: str, other: str) -> None:
    with pytest.raises(InputError, match="duplicate class names"):
        check_classes([one, other])


def test_ten_thousand_names_right_to_left_and_emoji_are_names() -> None:
    names = [f"class {i}" for i in range(10_000)] + ["كلب", "חתול", "👩‍🔬", "❤️", "e\u0301tude", "کتاب\u200cها", "☕"]
    assert check_classes(names) == tuple(names)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_files_of_names_may_say_their_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "names.txt").write_text("café\n\nStraße\n", encoding=encoding)
    assert read_classes(str(tmp_path / "names.txt")).names == ("café", "Straße")
    assert read_templates([str(tmp_path / "names.txt")]) == ("café", "Straße")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16-le", "utf-16-be", "cp1252"])
def test_files_in_an_encoding_that_must_be_guessed_are_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "names.txt").write_text("café\nStraße\n", encoding=encoding)
    with pytest.raises(InputError, match=r"is not UTF-8 text .*: save it as UTF-8"):
        read_classes(str(tmp_path / "names.txt"))
    with pytest.raises(InputError, match="is not UTF-8 text"):
        Recipe.load(tmp_path / "names.txt")
