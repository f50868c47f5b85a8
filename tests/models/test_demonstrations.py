"""Solved examples beside a sample, and labelled shots in the one loop."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import adapt, train
from small_models import masked_lm

from pouf import METHODS, Classifier, InputError, Recipe, Texts
from pouf.data.labels import NO_LABEL, Labelled, Shots, read_shots
from pouf.inference.encode import Transform
from pouf.losses import squared_error
from pouf.models.demonstrations import EXAMPLES_AT_ONCE, Demonstrations
from pouf.models.templates import Example

BAD = ["we hated the food", "the film was bad", "very bad service", "they hated it"]
GOOD = ["we loved the food", "the film was good", "very good service", "they loved it"]
OTHERS = ["so it was okay", "the book is not bad", "who loved the service?", "food"]
CLASSES = ["negative", "positive"]
QUIET = {"optimisation.dropout": False}  # what is claimed here is exact
FEW = Recipe.load("lm-bff").with_settings({"optimisation.lr": 1e-3, **QUIET}, steps=12, batch_size=4)


def shots() -> Shots:
    return Shots(Texts(BAD + GOOD), F.one_hot(torch.tensor([0] * 4 + [1] * 4), 2).float())


def classifier_of(folder: Path) -> Classifier:
    return Classifier.from_pretrained(folder, CLASSES, ["{text} it was [MASK]."], words=["terrible", "great"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return masked_lm(tmp_path_factory.mktemp("base"), "roberta")


def test_one_shot_of_each_class_is_shown_and_never_the_sample_itself() -> None:
    demonstrations = Demonstrations.from_shots(shots())
    for seed in range(50):
        example = demonstrations.show(BAD[0], random.Random(seed))
        assert [label for _, label in example.after] == [0, 1]
        assert BAD[0] not in [text for text, _ in example.after]


def test_in_context_examples_come_before_and_only_once_each() -> None:
    demonstrations = Demonstrations.from_shots(shots(), place="before", count=6)
    example = demonstrations.show("food", random.Random(0))
    assert len({text for text, _ in example.before}) == 6 and not example.after


def test_a_changed_sample_is_seen_changed_among_its_demonstrations(base: Path) -> None:
    classifier = classifier_of(base)
    classifier.demonstrations = Demonstrations.from_shots(shots(), samples=2)
    plain, changed = (
        classifier.encode(Texts(OTHERS), transform=c).features for c in (None, Transform("x", lambda s, _: "it"))
    )
    assert not torch.allclose(plain, changed)


def test_the_sample_and_the_shots_have_limits_of_their_own(base: Path) -> None:
    long = ["the film " * 30 + f"was {word}" for word in ("bad", "good")]
    given = Shots(Texts(long), torch.eye(2))
    read = classifier_of(base).backbone.texts

    def tokens(**limits: int) -> int:
        demonstrations = Demonstrations.from_shots(given, **limits)
        return len(read([demonstrations.show("the book " * 40, random.Random(0))])["input_ids"][0])

    cut = tokens(own_limit=10, shot_limit=5)
    assert tokens(own_limit=13, shot_limit=5) == cut + 3
    assert tokens(own_limit=10, shot_limit=9) == cut + 2 * 4, "there are two shots"
    assert tokens(own_limit=10) > cut + 20 and tokens(shot_limit=5) > cut + 20


@pytest.mark.parametrize("place", ["after", "before"])
def test_solved_examples_can_lose_their_far_end_as_lm_bff_cuts_them(base: Path, place: str) -> None:
    """The tail where they stand after the sample, the head where they stand before it; the sample stays whole."""
    classifier = classifier_of(base)
    read, mask = classifier.backbone.texts, classifier.backbone.tokenizer.mask_token_id
    example = Demonstrations.from_shots(shots(), place=place).show("food", random.Random(0))
    (whole,) = read([example])["input_ids"].tolist()
    read.max_length = len(whole) - 7
    (cut,) = read([example._replace(cut_solved=True)])["input_ids"].tolist()
    assert cut == (whole[:-7] if place == "after" else whole[7:])
    (ours,) = read([example])["input_ids"].tolist()
    assert ours != cut and len(ours) <= read.max_length, "otherwise every text gives a part, or the farthest shot goes"
    long = example._replace(sample="the film " * 100, cut_solved=True)
    (full,) = read([long])["input_ids"].tolist()
    assert full.count(mask) == 1 and len(full) == read.max_length, "where the sample alone is too long, the mask stays"


def test_a_class_without_a_shot_is_refused() -> None:
    only_bad = Shots(Texts(BAD), torch.tensor([[1.0, 0.0]] * 4))
    with pytest.raises(InputError, match="no shot of class number 1"):
        Demonstrations.from_shots(only_bad)


def test_a_prediction_is_the_mean_of_the_logits_over_the_draws(base: Path) -> None:
    """All draws together, in parts of about one length and the same input once, as in a plain loop over the draws."""
    classifier = classifier_of(base)
    classifier.demonstrations = Demonstrations.from_shots(shots(), samples=80, seed=5)
    views = [[classifier.demonstrations.show(t, random.Random(f"5 {i} {t}")) for t in OTHERS] for i in range(80)]
    plain = classifier_of(base).backbone
    logits, padded = torch.zeros(4, 2), 0
    for view in views:
        with torch.no_grad():
            batch = plain.prepare(view)
            padded += batch["input_ids"].numel()
            logits += plain.scores(plain.encode_inputs(batch), plain.prototypes(())).logits / 80
    different = {example for view in views for example in view}
    encoded: list[torch.Tensor] = []
    encode = classifier.backbone.encode_inputs
    classifier.backbone.encode_inputs = lambda batch: encoded.append(batch["input_ids"]) or encode(batch)
    assert torch.allclose(classifier.predict_proba(OTHERS), logits.softmax(1), atol=1e-5)
    assert sum(map(len, encoded)) == len(different) < 4 * 80 and max(map(len, encoded)) == EXAMPLES_AT_ONCE
    assert sum(ids.numel() for ids in encoded) < 0.9 * padded


def test_predictions_do_not_depend_on_the_neighbours(base: Path) -> None:
    classifier = classifier_of(base)
    classifier.demonstrations = Demonstrations.from_shots(shots(), samples=2)
    together = classifier.predict_proba(OTHERS)
    alone = torch.cat([classifier.predict_proba([text]) for text in reversed(OTHERS)]).flip(0)
    assert torch.allclose(together, alone, atol=1e-6)


def test_a_saved_classifier_keeps_its_demonstrations(base: Path, tmp_path: Path) -> None:
    classifier = classifier_of(base)
    classifier.demonstrations = Demonstrations.from_shots(shots(), samples=2)
    train(classifier, None, FEW.with_settings(steps=2), shots=shots())
    classifier.save_pretrained(tmp_path)
    again = Classifier.from_pretrained(tmp_path)
    assert again.demonstrations == classifier.demonstrations
    assert torch.equal(again.predict_proba(OTHERS), classifier.predict_proba(OTHERS))
    # What has seen labels is not zero-shot.
    assert torch.equal(
        Classifier.from_pretrained(tmp_path, use="zero-shot").predict_proba(OTHERS),
        classifier_of(base).predict_proba(OTHERS),
    )


def fresh(base: Path, seed: int) -> Classifier:
    return classifier_of(base).with_new_head(seed)


def test_training_draws_new_demonstrations_at_each_step(base: Path) -> None:
    classifier = classifier_of(base)
    classifier.demonstrations = Demonstrations.from_shots(shots())
    prepared: list[Example] = []
    prepare = classifier.backbone.prepare
    classifier.backbone.prepare = lambda samples: prepared.extend(samples) or prepare(samples)
    train(classifier, None, FEW.with_settings(steps=8, batch_size=8), shots=shots())
    assert len(prepared) == 64
    of_first = {example.after for example in prepared if example.sample == BAD[0]}
    assert len(of_first) > 3


@pytest.mark.parametrize("recipe", ["lm-bff", "lm-bff-pouf"])
def test_shots_are_learned(base: Path, recipe: str) -> None:
    classifier = classifier_of(base)
    settings = Recipe.load(recipe).with_settings({"optimisation.lr": 1e-3, **QUIET}, steps=40, batch_size=8)
    result = train(classifier, None, settings, shots=shots())
    assert classifier.predict(BAD + GOOD) == ["negative"] * 4 + ["positive"] * 4
    assert result.history[-1].terms["labels"] < 0.2 < result.history[0].terms["labels"]
    assert set(result.history[0].terms) == (
        {"labels"} if recipe == "lm-bff" else {"transport", "information", "labels"}
    )


def test_with_data_of_their_own_both_terms_see_their_own_batch(base: Path) -> None:
    classifier = classifier_of(base)
    settings = Recipe.load("lm-bff-pouf").with_settings(QUIET, steps=1, batch_size=4)
    first = train(classifier, Texts(OTHERS), settings, shots=Shots(Texts(BAD[:2] + GOOD[:2]), shots().targets[2:6]))
    plain = classifier_of(base)
    unlabelled = train(
        plain, Texts(OTHERS), Recipe.load("masked").with_settings(steps=1, batch_size=4, keep_shares_max_classes=0)
    )
    for term in ("transport", "information"):
        assert first.history[0].terms[term] == pytest.approx(unlabelled.history[0].terms[term], abs=1e-6)
    few = classifier_of(base)
    labelled = train(
        few, None, FEW.with_settings(steps=1), shots=Shots(Texts(BAD[:2] + GOOD[:2]), shots().targets[2:6])
    )
    assert first.history[0].terms["labels"] == pytest.approx(labelled.history[0].terms["labels"], abs=1e-6)


def test_targets_stay_with_their_samples_however_these_are_ordered(base: Path) -> None:
    """A batch is a permutation of the shots; the loss must pair each with its own target."""
    order = [5, 0, 7, 2, 4, 1, 6, 3]
    shuffled = Shots(Texts([(BAD + GOOD)[i] for i in order]), shots().targets[order])
    settings = FEW.with_settings(steps=3, batch_size=8)
    one = train(classifier_of(base), None, settings, shots=shots())
    other = train(classifier_of(base), None, settings, shots=shuffled)
    assert [step.loss for step in one.history] == [step.loss for step in other.history]


def test_soft_targets_are_reached(base: Path) -> None:
    classifier = classifier_of(base)
    soft = Shots(Texts(BAD + GOOD), torch.tensor([[0.8, 0.2]] * 4 + [[0.4, 0.6]] * 4))
    train(classifier, None, FEW.with_settings(steps=80, batch_size=8), shots=soft)
    assert torch.allclose(classifier.predict_proba(BAD + GOOD), soft.targets, atol=0.1)


def test_a_fresh_head_is_fitted_to_scores_by_squared_error(base: Path) -> None:
    classifier = fresh(base, 0)
    soft = Shots(Texts(BAD + GOOD), torch.tensor([[0.8, 0.2]] * 4 + [[0.4, 0.6]] * 4))
    recipe = FEW.with_settings(steps=80, batch_size=8, **{"objective.label_loss": "mse"})
    first, *_, last = train(classifier, None, recipe, shots=soft).history
    p = classifier.predict_proba(BAD + GOOD)
    assert (p - soft.targets).square().mean().item() < 0.01
    assert last.terms["labels"] < 0.01 < first.terms["labels"]


def test_a_regression_has_one_output_and_squared_error(base: Path, tmp_path: Path) -> None:
    classifier = classifier_of(base).with_new_head(0, regression=True)
    texts, shares = BAD + GOOD, torch.tensor([[0.8, 0.2]] * 4 + [[0.4, 0.6]] * 4)
    backbone = classifier.backbone
    y = backbone.encode_inputs(backbone.prepare(texts))
    assert y.shape == (8, 1)
    recipe = FEW.with_settings({"objective.label_loss": "mse"}, steps=120, batch_size=8, snapshots=0)
    history = train(classifier, None, recipe, shots=Shots(Texts(texts), shares)).history
    near = y.detach()[:, 0].clamp(1e-4, 1 - 1e-4)
    assert history[0].terms["labels"] == pytest.approx((near - shares[:, 1]).square().mean().item(), abs=1e-5)
    assert torch.allclose(classifier.predict_proba(texts)[:, 1], backbone.encode_inputs(backbone.prepare(texts))[:, 0],
                          atol=1e-3)  # fmt: skip
    assert torch.allclose(classifier.predict_proba(texts), shares, atol=0.1)
    classifier.save_pretrained(tmp_path)
    again = Classifier.from_pretrained(tmp_path)
    assert torch.equal(again.predict_proba(OTHERS), classifier.predict_proba(OTHERS))
    beyond = torch.tensor([[-0.5], [1.5]], requires_grad=True)
    squared_error(backbone.scores(beyond, torch.eye(2)).logits, torch.tensor([[0.5, 0.5]] * 2)).backward()
    assert beyond.grad[0] < 0 < beyond.grad[1], "it finds back"
    with pytest.raises(InputError, match="between two classes, not 3"):
        names = ["a", "b", "c"]
        Classifier.from_pretrained(base, names, ["{text} it was [MASK]."], words=["bad", "good", "okay"]).with_new_head(
            0, regression=True
        )


def test_a_fresh_heads_temperature_is_that_of_its_recipe(base: Path) -> None:
    classifier = fresh(base, 0)
    result = train(classifier, None, Recipe.load("lm-bff-pouf").with_settings(steps=1), shots=shots())
    assert result.history[0].temperature == pytest.approx(0.1)


@pytest.mark.parametrize("settings", [{"place": "beside"}, {"samples": 0}, {"count": 0}])
def test_demonstrations_that_make_no_sense_are_refused(settings: dict) -> None:
    with pytest.raises(InputError, match=r"unknown place|at least one"):
        Demonstrations.from_shots(shots(), **settings)


def test_a_fresh_head_learns_from_shots_and_is_saved_as_the_library_saves_it(base: Path, tmp_path: Path) -> None:
    classifier = fresh(base, 1)
    same = fresh(base, 1)
    assert torch.equal(classifier.predict_proba(OTHERS), same.predict_proba(OTHERS))
    assert not torch.equal(classifier.predict_proba(OTHERS), fresh(base, 0).predict_proba(OTHERS))
    train(classifier, None, FEW.with_settings(steps=60, batch_size=8), shots=shots())
    assert classifier.predict(BAD + GOOD) == ["negative"] * 4 + ["positive"] * 4
    classifier.save_pretrained(tmp_path)
    assert torch.equal(Classifier.from_pretrained(tmp_path).predict_proba(OTHERS), classifier.predict_proba(OTHERS))
    assert torch.equal(
        Classifier.from_pretrained(tmp_path, use="zero-shot").predict_proba(OTHERS), same.predict_proba(OTHERS)
    )


@pytest.mark.parametrize(
    ("data", "given", "recipe", "message"),
    [
        (None, None, "masked", "nothing to learn from"),
        (Texts(OTHERS), None, "lm-bff", "there are no labelled shots"),
        (Texts(OTHERS), shots(), "masked", "need a weight"),
        (Texts(OTHERS), shots(), "lm-bff", "learns from labelled shots alone"),
        (None, Shots(Texts(BAD), torch.eye(4)), "lm-bff", r"shape \(4, 4\), expected one row for each of the 4"),
    ],
)
def test_shots_and_recipe_must_fit(base: Path, data, given, recipe: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(classifier_of(base), data, Recipe.load(recipe), shots=given)


def test_rows_without_a_label_are_no_shots_of_the_first_class(tmp_path: Path) -> None:
    rows = [{"text": text, "label": CLASSES[i < 2]} for i, text in enumerate(GOOD[:2] + BAD[:1])]
    lines = [*map(json.dumps, rows), *(json.dumps({"text": text}) for text in OTHERS)]
    (tmp_path / "shots.jsonl").write_text("".join(f"{line}\n" for line in lines))
    given = read_shots(tmp_path / "shots.jsonl", CLASSES, "text")
    assert given.targets.sum(1).tolist() == [1.0] * 3 + [0.0] * 4 and sorted(given.inputs.skipped) == [3, 4, 5, 6]
    assert Demonstrations.from_shots(given).shots == ((GOOD[0], 1), (GOOD[1], 1), (BAD[0], 0))
    postprocessor = METHODS["majority"].preparation(given, 0).postprocessor
    assert postprocessor is not None and int(postprocessor.bias.argmax()) == 1
    bare = Shots.from_labelled(Labelled(Texts(OTHERS), [0, NO_LABEL, 1, 1]), 2)
    assert list(bare.inputs.skipped) == [1] and [label for _, label in Demonstrations.from_shots(bare).shots] == [
        0,
        1,
        1,
    ]


class Ending(Texts):
    """Reading is interrupted, or fails, after some texts."""

    def read(self, index: int, side: int | None = None) -> str:
        if index > 2:
            raise self.error
        return super().read(index)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_demonstrations_stay_where_reading_ends_before_the_first_step(base: Path, error: BaseException) -> None:
    classifier = classifier_of(base)
    classifier.demonstrations = Demonstrations.from_shots(shots())
    data = Ending(BAD + GOOD)
    data.error = error
    recipe = FEW.with_settings({"objective.labels": 0.0, "objective.information": 1.0}, snapshots=1)
    with pytest.raises(type(error)):
        adapt(classifier, data, recipe)
    assert classifier.demonstrations is not None
