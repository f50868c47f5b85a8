"""Methods by name: each is a recipe over the one loop, and does what the paper says of it."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import REVIEWS, TEXTS, groups, train
from PIL import Image
from small_models import masked_lm, sentence_encoder

from pouf import EMBEDDED, Classifier, Images, InputError, Recipe, Shots, Texts, Vectors
from pouf.data.base import Subset
from pouf.demo import DIGITS
from pouf.losses import conditional_transport, entropy, mutual_information
from pouf.models.precomputed import Precomputed
from pouf.options import AdaptOptions
from pouf.recipe import PRESETS, Kind
from pouf.training.methods import METHODS
from pouf.training.plan import make_plan, resolve_plan
from pouf.training.teachers import surest


def shots(inputs, labels: list[int], classes: int) -> Shots:
    return Shots(inputs, F.one_hot(torch.tensor(labels), classes).float())


def run(name: str, classifier: Classifier, data, kind, given: Shots | None = None, known_shares=None, **settings):
    method = METHODS[name]
    method.check(name, kind, given)
    recipe = method.recipe(kind)
    short = {"augment": "none", "batch_size": 6, "steps": min(recipe.steps, 2), "min_class_usage": 0.0}
    recipe = recipe.with_settings({**short, **settings})
    classifier = method.preparation(given, seed=0).applied_to(classifier)
    learns = given if recipe.objective.labels > 0 else None
    return train(classifier, data, recipe, shots=learns, known_shares=known_shares)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "image" in method.kinds])
def test_every_method_for_images_runs(name: str, pictures: list[Image.Image]) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    given = shots(Images(pictures[:5]), [0, 1, 2, 2, 3], 10) if METHODS[name].needs_shots else None
    data = None if name == "coop" else Images(pictures)
    result = run(name, classifier, data, "image", given)
    assert len(result.history) == (0 if METHODS[name].recipe("image").steps == 0 else 2)
    proba = classifier.predict_proba(pictures)
    assert proba.shape == (12, 10) and torch.allclose(proba.sum(1), torch.ones(12), atol=1e-4)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "cloze" in method.kinds])
def test_every_method_for_masked_language_models_runs(name: str, tmp_path: Path) -> None:
    folder = masked_lm(tmp_path / "lm", "bert")
    classifier = Classifier.from_pretrained(folder, ["bad", "good"], ["{text} it was [MASK]."])
    given = shots(Texts(TEXTS[:4]), [1, 0, 0, 1], 2) if METHODS[name].needs_shots else None
    trains_on_shots = name in ("coop", "fine-tuning", "lm-bff", "lm-bff-pouf")
    run(name, classifier, None if trains_on_shots else Texts(TEXTS), "cloze", given)
    assert classifier.predict_proba(TEXTS).shape == (6, 2)


def test_tent_is_entropy_on_the_prompt_and_nothing_else(pictures: list[Image.Image]) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    start = {name: p.detach().clone() for name, p in classifier.backbone.named_parameters()}
    with torch.no_grad():
        features = classifier.encode(Images(pictures)).features
        expected = entropy(classifier.backbone.scores(features, classifier.prototypes()).logits).item()
    history = run("tent", classifier, Images(pictures), "image", batch_size=12).history
    assert history[0].terms == {"entropy": pytest.approx(expected, abs=1e-3)}
    assert history[0].loss == pytest.approx(0.3 * expected, abs=1e-3)
    moved = [name for name, p in classifier.backbone.named_parameters() if not torch.equal(p, start[name])]
    assert all("logit_scale" in name for name in moved)


def test_upl_takes_the_surest_of_each_predicted_class() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    other = torch.tensor([[0.95, 0.05]])
    places, labels = surest([([10, 11, 12, 13], *probabilities.log().max(1)), ([14], *other.log().max(1))], 2)
    assert list(zip(places, labels, strict=True)) == [(14, 0), (10, 0), (13, 1)], "the second class has only one"


def test_upl_learns_from_what_zero_shot_was_sure_of(few_digits: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data = Images.from_folder(few_digits)
    before = classifier.infer(data).log_probabilities
    places, labels = surest([(list(range(len(data))), *before.max(1))], 16)
    result = run("upl", classifier, data, "image", steps=10, batch_size=64, **{"optimisation.lr": 0.05})
    after = result.at("last").infer(Subset(data, places)).log_probabilities
    picked = torch.arange(len(places)), torch.tensor(labels)
    assert after[picked].mean() > before[places][picked].mean()


def test_majority_says_the_same_of_everything(pictures: list[Image.Image]) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    result = run("majority", classifier, Images(pictures), "image", shots(Images(pictures[:3]), [4, 4, 7], 10))
    assert set(result.classifier.predict(pictures)) == {"four"}


def test_another_tuner_brings_its_own_rate_unless_one_is_given(tmp_path: Path) -> None:
    def rate(recipe: object = None, method: str = "pouf", **changes: object) -> float:
        settled = METHODS[method].recipe("image", recipe, {"tuner.name": "prompt", **changes})
        assert settled.tuner.name == "prompt"
        return settled.optimisation.lr

    (tmp_path / "slow.toml").write_text("steps = 7\n")
    (tmp_path / "own.toml").write_text("optimisation.lr = 0.5\n")
    (tmp_path / "full.toml").write_text('tuner.name = "full"\n')
    assert METHODS["pouf"].recipe("image", None, {"tuner.name": "full"}) == Recipe.load("office31-full")
    assert METHODS["pouf"].recipe("image", tmp_path / "full.toml") == Recipe.load("office31-full"), "not features'"
    assert METHODS["pouf"].recipe("text", None, {"tuner.name": "prototypes"}) == Recipe.preset("fast", "text")
    assert rate("paper") == rate("fast") == 1e-3
    assert rate() == rate("office31-full") == rate(tmp_path / "slow.toml") == 1e-3
    assert METHODS["pouf"].recipe("image", tmp_path / "slow.toml", {"tuner.name": "prompt"}).steps == 7
    assert rate(**{"optimisation.lr": 5e-7}) == 5e-7
    assert rate(tmp_path / "own.toml") == 0.5
    assert rate("domainnet-prompt") == 5e-7, "the paper's, and asked for by name"
    presets = {Recipe.preset(name, "image").optimisation.lr for name in PRESETS}
    for lr in (*presets, 4e-3):
        (tmp_path / "rate.toml").write_text(f'optimisation.lr = {lr}\ntuner.name = "full"\n')
        assert rate(Recipe().with_settings({"optimisation.lr": lr}, steps=9)) == rate(tmp_path / "rate.toml") == lr
    assert rate(Recipe()) == rate(Recipe().with_settings({"optimisation.clip": 1.0})) == 1e-3, "which sets none"
    for recipe in (None, "paper", "office31-full"):
        prompt = METHODS["pouf"].recipe("image", recipe, {"tuner.name": "prompt"}).optimisation
        assert prompt.temperature_lr == 5e-7, "of the temperature beside a prompt, with the prompt's rate"


def test_a_changed_tuner_reaches_adapt_with_its_rate(pictures: list[Image.Image]) -> None:
    for settings, rate in (({"tuner.name": "prompt"}, 1e-3), ({"tuner.name": "full"}, 5e-7)):
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        result = classifier.adapt(Images(pictures), settings={**settings, "steps": 1, "snapshots": 0}, prior="paper")
        assert (result.history[0].lr, result.recipe.objective.prior) == (rate, "paper")


@pytest.mark.parametrize("kind", ["image", "text", "cloze", "causal"])
def test_tent_upl_and_prompt_tuning_share_their_settings(kind: Kind) -> None:
    ours = METHODS["pouf"].recipe(kind, None, {"tuner.name": "prompt"}).model_dump()
    beside = {"objective", "pseudo_labels", "postprocess", "keep_shares_max_classes"}
    for name in ("tent", "upl", "coop"):
        theirs = METHODS[name].recipe(kind).model_dump()
        assert {part for part in ours if ours[part] != theirs[part]} <= beside, name


@pytest.mark.parametrize("kind", ["image", "text", "cloze", "causal"])
@pytest.mark.parametrize("tuner", ["prompt", "layernorm"])
def test_few_weights_are_not_trained_at_the_rate_of_all(kind: Kind, tuner: str) -> None:
    """At full tuning's rate neither a prompt nor a LayerNorm moves in the steps of a run."""
    rates = {each: METHODS["pouf"].recipe(kind, None, {"tuner.name": each}).optimisation.lr for each in (tuner, "full")}
    assert rates[tuner] >= 10 * rates["full"]


def test_methods_say_what_they_need() -> None:
    with pytest.raises(InputError, match="'coop' learns from labelled examples: give it shots"):
        METHODS["coop"].check("coop", "image", None)
    with pytest.raises(InputError, match=r"'lm-bff' is for texts with a \[MASK\] template"):
        METHODS["lm-bff"].check("lm-bff", "image", None)


def test_an_adjusted_classifier_is_saved_with_its_adjustment(pictures: list[Image.Image], tmp_path: Path) -> None:
    for name in ("prior-correction", "propagation", "zlap", "inmap"):
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        run(name, classifier, Images(pictures), "image", known_shares=torch.arange(1, 11) / 55)
        classifier.save_pretrained(tmp_path / name)
        again = Classifier.from_pretrained(tmp_path / name)
        assert torch.allclose(again.predict_proba(pictures), classifier.predict_proba(pictures), atol=1e-5)
        plain = Classifier.from_pretrained(EMBEDDED, DIGITS).predict_proba(pictures)
        assert torch.allclose(
            Classifier.from_pretrained(tmp_path / name, use="zero-shot").predict_proba(pictures), plain, atol=1e-6
        )


def test_a_known_prior_is_pulled_towards(few_digits: Path) -> None:
    """Told that most digits are ones, more of them are taken for ones."""
    shares = {}
    for told in (False, True):
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        shares_of = torch.tensor([0.5 if name == "one" else 0.5 / 9 for name in DIGITS]) if told else None
        recipe = Recipe.load("demo").with_settings(steps=12, batch_size=100, snapshots=0)
        train(classifier, Images.from_folder(few_digits), recipe, known_shares=shares_of)
        shares[told] = classifier.infer(Images.from_folder(few_digits)).log_probabilities.exp().mean(0)[1].item()
    assert shares[True] > shares[False] + 0.05


def test_the_papers_prior_enters_the_transport_alone() -> None:
    """Four of six classes are missing from the data: the plan learns it, and the predictions are not pulled there."""
    features, prototypes = groups(present=2, k=6, n=120)

    def terms(prior: str) -> list[dict[str, float]]:
        classifier = Classifier(Precomputed(prototypes, temperature=0.1), [f"class {k}" for k in range(6)])
        changes = {"objective.prior": prior, "min_class_usage": 0.0, "postprocess": "none"}
        recipe = Recipe.load("features").with_settings(changes, steps=3)
        return [step.terms for step in train(classifier, Vectors(features), recipe).history]

    uniform, papers, ours = terms("uniform"), terms("paper"), terms("estimated")
    assert papers[0] == uniform[0], "the first plan is made with equal shares"
    assert papers[1]["transport"] != pytest.approx(uniform[1]["transport"], abs=1e-4)
    assert papers[1]["information"] == pytest.approx(uniform[1]["information"], abs=1e-3)
    assert ours[1]["information"] != pytest.approx(uniform[1]["information"], abs=1e-3)


@pytest.mark.parametrize("papers", [True, False])
@pytest.mark.parametrize("k", [2, 6])
def test_known_shares_enter_the_transport_as_in_the_paper_or_the_information_as_ours(k: int, papers: bool) -> None:
    """The first loss of a run on all inputs, beside the formulas."""
    features, prototypes = groups(present=2, k=k, n=120)
    classifier = Classifier(Precomputed(prototypes, temperature=0.1), [f"class {i}" for i in range(k)])
    sim = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T
    prior = torch.tensor([0.6, *[0.4 / (k - 1)] * (k - 1)])
    settings = {"steps": 1, "snapshots": 0, "min_class_usage": 0.0, "objective.prior": "paper" if papers else "uniform"}
    result = classifier.adapt(Vectors(features), recipe="features", prior=prior.tolist(), settings=settings)
    transport = conditional_transport(sim, 0.1, prior if papers else None).cost.item()
    information = mutual_information(sim / 0.1, None if papers else prior, known=True).item()
    assert result.history[0].terms == pytest.approx({"transport": transport, "information": -information}, abs=1e-5)
    assert result.recipe.postprocess == "clusters"


def test_the_papers_estimate_is_not_replaced_by_the_shares_of_zero_shot() -> None:
    """Two classes, which otherwise keep them; a recipe that names the paper's estimate means it."""
    features, prototypes = groups(present=1, k=2, n=120)
    classifier = Classifier(Precomputed(prototypes, temperature=0.1), ["a", "b"])
    settings = {"steps": 2, "snapshots": 0, "min_class_usage": 0.0, "objective.prior": "paper"}
    result = classifier.adapt(Vectors(features), recipe="features", settings=settings)
    assert result.recipe.postprocess == "clusters"


@pytest.mark.parametrize("prior", [[0.5, 0.5], [0.1] * 9 + [0.0], [0.1] * 9 + [float("nan")]])
def test_a_prior_that_fits_no_classes_is_refused(prior: list[float]) -> None:
    with pytest.raises(InputError, match="expected one proportion above 0 for each of the 10 classes"):
        Classifier.from_vectors(torch.eye(10), DIGITS).adapt(torch.eye(10), prior=prior)


def test_shares_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(InputError, match=r"the proportions sum to 1.4, expected 1"):
        Classifier.from_vectors(torch.eye(2), ["a", "b"]).adapt(torch.eye(2), prior=[0.7, 0.7])


@pytest.mark.parametrize("small", [15, 30, 50])
def test_known_shares_are_those_of_the_predictions_and_never_hurt(digits_folder: Path, small: int) -> None:
    """Fours and nines, which zero-shot mixes up, in three proportions."""
    classes, rates = ["four", "nine"], {}
    paths = [
        p for name, n in (("four", 100 - small), ("nine", small)) for p in sorted((digits_folder / name).iterdir())[:n]
    ]
    truth = [path.parent.name for path in paths]
    recipe = Recipe.load("demo").with_settings(steps=15, snapshots=0, batch_size=50)
    for prior in (None, [1 - small / 100, small / 100]):
        classifier = Classifier.from_pretrained(EMBEDDED, classes)
        rates["zero-shot"] = sum(a == b for a, b in zip(classifier.predict(paths), truth, strict=True))
        classifier = classifier.adapt(paths, recipe=recipe, prior=prior).classifier
        said = classifier.predict(paths)
        rates["known" if prior else "uniform"] = sum(a == b for a, b in zip(said, truth, strict=True))
        if prior:
            assert abs(said.count("nine") - small) <= 1, "as a whole, just what is known"
    assert rates["known"] >= max(rates["zero-shot"], rates["uniform"]) - 1
    assert rates["known"] > rates["zero-shot"]


@pytest.mark.parametrize(("present", "trained"), [(30, True), (3, False)])
def test_where_few_of_the_classes_are_there_nothing_is_trained(
    present: int, trained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Training would spread the inputs over classes that are not there."""
    features, prototypes = groups(present, 30, 300, 32, 0.25, 0.15)
    classifier = Classifier.from_vectors(prototypes, [f"c{i}" for i in range(30)], temperature=0.05)
    before = classifier.predict(Vectors(features))
    with caplog.at_level("INFO", "pouf"):
        result = classifier.adapt(Vectors(features))
        classifier = result.classifier
    assert bool(result.history) == trained == (result.recipe.postprocess == "clusters")
    assert ("nothing is trained" in caplog.text) != trained
    truth = [f"c{i % present}" for i in range(300)]
    right = [sum(a == b for a, b in zip(said, truth, strict=True)) for said in (before, classifier.predict(features))]
    assert not result.verdict.alarms and right[1] > right[0]
    cautions = [caution.name for caution in result.verdict.cautions]
    assert cautions == ([] if trained else ["unclear names"]), "which most of the named classes missing looks like"
    told = Classifier.from_vectors(prototypes, [f"c{i}" for i in range(30)], temperature=0.05)
    assert told.adapt(Vectors(features), settings={"min_class_usage": 0.0, "steps": 2}).history, (
        "it can be had otherwise"
    )


def all_like_the_first(much: float, temperature: float) -> tuple[Classifier, Vectors, torch.Tensor]:
    """All six classes are there, and everything looks like the first of them."""
    features, prototypes = groups(n=120)
    classifier = Classifier.from_vectors(prototypes, list("abcdef"), temperature=temperature)
    data = Vectors(torch.as_tensor(features) + much * torch.as_tensor(prototypes)[0])
    return classifier, data, torch.arange(120) % 6


def test_a_model_that_can_not_tell_which_classes_are_there_is_left_alone_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    classifier, data, _ = all_like_the_first(1.0, 0.3)
    before = classifier.predict_proba(data)
    with caplog.at_level("INFO", "pouf"):
        result = classifier.adapt(data)
        classifier = result.classifier
    assert not result.history and torch.equal(classifier.predict_proba(data), before)
    assert "predictions stay as they are" in caplog.text and "give a prior" in caplog.text
    assert "nothing changed" in {each.name for each in result.verdict.cautions}
    assert "Using zero-shot as it is." in str(result.verdict)


def test_what_a_model_says_of_every_input_alike_is_taken_away_where_it_says_little_else() -> None:
    classifier, data, labels = all_like_the_first(6.0, 0.5)
    result = classifier.adapt(data)
    before, after = (each.predict_proba(data).argmax(1) for each in (classifier, result.at("last")))
    assert not result.history and (after == labels).double().mean() > (before == labels).double().mean() + 0.4
    assert not result.verdict.trusted, "a run that moves so much says so"


def one_sided_world(n: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two classes, of which the first holds three quarters; zero-shot is right about that."""
    draw = torch.Generator().manual_seed(0)
    prototypes = torch.eye(2, 8)
    labels = (torch.arange(n) >= 3 * n // 4).long()
    return prototypes[labels] + 0.35 * torch.randn(n, 8, generator=draw), prototypes, labels


def test_two_classes_keep_zero_shots_shares_unless_something_is_known_of_them() -> None:
    """A bias of the model and a skew of the data look the same: a pull to equal shares would be a guess."""
    features, prototypes, labels = one_sided_world()
    settings = {"optimisation.lr": 0.1, "steps": 30, "min_class_usage": 0.0}

    def after(**options: Any) -> tuple[int, float]:
        classifier = Classifier.from_vectors(prototypes, ["a", "b"], temperature=0.3)
        classifier = classifier.adapt(Vectors(features), settings=settings, **options).at("last")
        said = classifier.predict_proba(Vectors(features)).argmax(1)
        return int((said == 1).sum()), (said == labels).double().mean().item()

    before = Classifier.from_vectors(prototypes, ["a", "b"], temperature=0.3).predict_proba(Vectors(features)).argmax(1)
    zero_shot, right = int((before == 1).sum()), (before == labels).double().mean().item()
    kept, rate = after()
    assert abs(kept - zero_shot) <= 1 and rate >= right
    assert after(prior="uniform")[0] > zero_shot + 10, "unless the user says that shares are equal"
    assert after(prior=[0.9, 0.1])[0] == pytest.approx(20, abs=1), "or which they are"


def test_two_classes_ask_for_their_shares_in_one_line_and_take_them_without_training() -> None:
    features, prototypes, _ = one_sided_world()
    classifier = Classifier.from_vectors(prototypes, ["a", "b"], temperature=0.3)
    result = classifier.adapt(Vectors(features))
    found = result.verdict.diagnostics
    assert found is not None and found.largest_class == "a" and found.largest_share == pytest.approx(0.75, abs=0.05)
    assert found.uniform_changes == pytest.approx(0.25, abs=0.05) and "--prior uniform" in str(result.verdict)
    told = classifier.adapt(Vectors(features), prior=[0.7, 0.3]).verdict
    assert told.diagnostics is not None and not told.diagnostics.largest_class and "--prior uniform" not in str(told)
    before = result.classifier.predict_proba(Vectors(features)).argmax(1)
    even = result.with_prior("uniform").predict_proba(Vectors(features)).argmax(1)
    assert abs(int((even == 0).sum()) - 100) <= 1
    assert (even != before).double().mean() == pytest.approx(found.uniform_changes, abs=0.02)
    assert torch.equal(result.classifier.predict_proba(Vectors(features)).argmax(1), before), "it has stayed as it was"
    given = result.classifier.with_prior([0.6, 0.4], Vectors(features)).predict_proba(Vectors(features)).argmax(1)
    assert abs(int((given == 0).sum()) - 120) <= 1
    with pytest.raises(InputError, match="more than one"):
        classifier.with_prior("uniform", Vectors(features[:1]))


@pytest.mark.parametrize(("k", "chosen"), [(12, "full"), (13, "prototypes")])
def test_texts_of_many_classes_leave_the_weights_alone(k: int, chosen: str, tmp_path: Path) -> None:
    names = "cat dog sea air good bad great film book photo text many who".split()
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path), names[:k])
    texts = Texts(TEXTS)

    def tuner(**options: Any) -> str:
        return resolve_plan(classifier, texts, AdaptOptions(**options)).recipe.tuner.name

    assert tuner() == tuner(recipe="balanced") == chosen
    assert tuner(recipe="texts") == tuner(settings={"tuner.name": "full"}) == "full", "what was asked for is done"


@pytest.mark.parametrize(("kind", "chosen"), [("bert", "upper"), ("albert", "full")])
def test_the_light_preset_tunes_upper_layers_where_a_model_has_some(kind: str, chosen: str, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(masked_lm(tmp_path, kind), ["bad", "good"], ["{text} it was [MASK]."])
    plan = resolve_plan(classifier, Texts(TEXTS), AdaptOptions(recipe="light"))
    assert plan.recipe == Recipe.load("masked-upper" if chosen == "upper" else "masked")
    assert plan.recipe.tuner.name == chosen


@pytest.mark.parametrize(("kind", "usual"), [("bert", "masked-upper"), ("albert", "masked")])
def test_a_masked_language_model_on_a_cpu_has_its_upper_layers_tuned_by_default(
    kind: str, usual: str, tmp_path: Path
) -> None:
    classifier = Classifier.from_pretrained(masked_lm(tmp_path, kind), ["bad", "good"], ["{text} it was [MASK]."])
    texts, labelled = Texts(TEXTS), shots(Texts(TEXTS[:2]), [0, 1], 2)

    def recipe(**options: Any) -> Recipe:
        return resolve_plan(classifier, texts, AdaptOptions(**options)).recipe

    assert recipe() == Recipe.load(usual)
    assert recipe(recipe="balanced") == Recipe.load("masked"), "what was asked for is done"
    assert recipe(settings={"lr": 1e-3}).tuner.name == recipe(shots=labelled).tuner.name == "full"
    classifier.to("meta")
    assert recipe() == Recipe.load("masked")


@pytest.mark.parametrize(("clear", "chosen"), [(True, "prototypes"), (False, "full")])
def test_weights_are_left_alone_where_clusters_show_the_classes(clear: bool, chosen: str, tmp_path: Path) -> None:
    words = "cat dog sea air".split()
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path), words, ["{}"])
    order = random.Random(0)
    others = "photo text book film who many where how".split()
    texts = Texts([f"{word} {word} {word} {other}" if clear else " ".join(order.sample(others, 4))
                   for word in words for other in others])  # fmt: skip

    def tuner(**options: Any) -> str:
        return make_plan(classifier, texts, AdaptOptions(**options)).recipe.tuner.name

    assert tuner() == tuner(recipe="balanced") == tuner(settings={"steps": 3}) == chosen
    assert tuner(settings={"tuner.name": "full"}) == tuner(recipe="texts") == "full", "what was asked for is done"


def test_a_batch_follows_the_number_of_classes() -> None:
    features, prototypes = groups(present=6, k=6, n=120)

    def samples(**settings: Any) -> tuple[int, int]:
        classifier = Classifier(Precomputed(prototypes, temperature=0.1), [f"class {k}" for k in range(6)])
        recipe = Recipe.load("features").with_settings(settings, steps=1, min_class_usage=0.0)
        used = train(classifier, Vectors(features), recipe).recipe
        return used.batch_size, used.compute.chunk

    assert samples(batch_size=10, batch_per_class=4) == (24, 10)
    assert samples(batch_size=30, batch_per_class=4) == (30, 0)


def test_a_batch_that_holds_hardly_all_classes_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    features, prototypes = groups(present=6, k=6, n=120)
    classifier = Classifier(Precomputed(prototypes, temperature=0.1), [f"class {k}" for k in range(6)])
    for size, warned in ((11, True), (12, False)):
        caplog.clear()
        train(classifier, Vectors(features), Recipe.load("features").with_settings(batch_size=size, steps=1))
        assert ("too few for the mutual information" in caplog.text) is warned


def test_a_tuner_that_does_not_fit_is_refused_with_those_that_do() -> None:
    for kind, tuner, words in (
        ("vector", "full", "vectors: choose one of prototypes, map"),
        ("text", "map", "full, pr"),
    ):
        with pytest.raises(InputError, match=words):
            METHODS["pouf"].recipe(kind, None, {"tuner.name": tuner})


def test_a_new_baseline_takes_five_lines() -> None:
    """As docs/methods.md says: entropy and no transport, on the prototypes."""
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    block = text.split("## A method of your own")[1].split("```python\n")[1].split("```")[0]
    features, prototypes = groups()
    names = {"prototypes": prototypes, "features": features, "classes": list("abcdef")}
    try:
        exec(block, names)
        assert names["result"].method == "entropy" and names["result"].recipe.objective.transport == 0
        assert set(names["clf"].predict(features)) <= set("abcdef")
    finally:
        METHODS.pop("entropy", None)


def test_two_classes_of_texts_that_keep_their_shares_learn_at_a_third_of_the_rate(tmp_path: Path) -> None:
    """Unless a rate was asked for; and with more classes at the whole of it."""

    model = sentence_encoder(tmp_path / "m")

    def rate(classes: list[str], settings: dict[str, Any]) -> float:
        clf = Classifier.from_pretrained(model, classes)
        result = clf.adapt(REVIEWS, settings={"steps": 1, "snapshots": 0, "batch_per_class": 0} | settings)
        return result.history[0].lr

    whole = Recipe.load("texts").optimisation.lr
    assert rate(["good", "bad"], {}) == pytest.approx(whole / 3, rel=1e-2)
    assert rate(["good", "bad"], {"optimisation.lr": 1e-3}) == pytest.approx(1e-3)
    assert rate(["good", "bad", "film"], {}) == pytest.approx(whole)
