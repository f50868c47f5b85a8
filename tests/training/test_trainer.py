"""The loop: it learns, it repeats itself exactly, it never sees a label, and it stops before harm is done."""

import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import TEXTS, Steps, same, train, weights
from PIL import Image
from small_models import masked_lm

from pouf import EMBEDDED, Callback, Classifier, Diverged, Images, Recipe, Step, Texts
from pouf.demo import DIGITS
from pouf.recipe import Optimisation
from pouf.training.model import OPTIMIZERS, SCHEDULES, learning_rate, make_optimizer
from pouf.tuners import describe_trainable

SHORT = Recipe.load("demo").with_settings(steps=4, batch_size=24)


def adapted(data: Images, recipe: Recipe = SHORT) -> dict[str, torch.Tensor]:
    return weights(train(Classifier.from_pretrained(EMBEDDED, DIGITS), data, recipe).classifier)


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
@pytest.mark.parametrize("how", ["folders renamed", "files moved", "files moved and renamed", "flat"])
def test_adapt_gives_the_same_weights_whatever_the_labels_are(
    few_digits: Path, tmp_path: Path, how: str, augment: str
) -> None:
    """Class sub-folders are the only labels a folder has: shuffling them must not change one bit."""
    rng = random.Random(0)
    names = list(DIGITS)
    renamed = dict(zip(names, rng.sample(names, len(names)), strict=True))
    for i, path in enumerate(sorted(few_digits.rglob("*.png"))):
        folder = {"folders renamed": renamed[path.parent.name], "flat": "."}.get(how, rng.choice(names))
        name = f"{rng.random()}-{i}.png" if "and renamed" in how else path.name
        (tmp_path / folder).mkdir(exist_ok=True)
        shutil.copyfile(path, tmp_path / folder / name)
    recipe = SHORT.with_settings(augment=augment)
    assert same(adapted(Images.from_folder(few_digits), recipe), adapted(Images.from_folder(tmp_path), recipe))


def test_the_same_seed_repeats_the_run_and_another_does_not(few_digits: Path) -> None:
    data = Images.from_folder(few_digits)
    assert same(adapted(data), adapted(data))
    assert not same(adapted(data), adapted(data, SHORT.with_settings(seed=1)))


def test_the_callers_random_numbers_are_left_alone(few_digits: Path, tiny: Classifier) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(tiny, Images.from_folder(few_digits), SHORT)
    assert torch.equal(torch.rand(3), expected)


def test_one_sgd_step_is_the_gradient_of_the_papers_loss(few_digits: Path, tiny: Classifier) -> None:
    """Recomputed from the pseudocode with the whole folder as one batch."""
    data = Images.from_folder(few_digits)
    recipe = SHORT.with_settings(
        steps=1, batch_size=len(data), **{"optimisation.weight_decay": 0.0, "optimisation.nesterov": False}
    )
    reference = Classifier.from_pretrained(EMBEDDED, DIGITS)
    features = reference.backbone.encode_inputs(reference.backbone.prepare([data.read(i) for i in range(len(data))]))
    f, w = features / features.norm(dim=1, keepdim=True), reference.prototypes()
    sim = f @ w.T
    scale = reference.backbone.model.logit_scale.exp()
    p = torch.softmax(sim * scale, 1)
    transport = ((1 - sim) * torch.softmax(sim * scale, 0)).sum(0).mean() + ((1 - sim) * p).sum(1).mean()
    mi = (-p * torch.log(p + 1e-12)).sum(1).mean() + (p.mean(0) * torch.log(p.mean(0) + 1e-12)).sum()
    (transport + 0.3 * mi).backward()
    train(tiny, data, recipe)
    for (name, ours), theirs in zip(tiny.named_parameters(), reference.parameters(), strict=True):
        expected = theirs.detach() - recipe.optimisation.lr * theirs.grad
        assert torch.allclose(ours, expected, atol=1e-6), name


def test_a_batch_holds_no_sample_twice_and_an_epoch_holds_every_sample(pictures: list[Image.Image]) -> None:
    data = Images(pictures)
    batches = data.random_batches(5, torch.Generator().manual_seed(0))
    drawn = [[draw.position for draw in next(batches)] for _ in range(40)]
    assert all(len(set(batch)) == 5 for batch in drawn)
    for first, second in zip(drawn[::2], drawn[1::2], strict=True):  # 12 samples: two batches an epoch, two left over
        assert len(set(first) | set(second)) == 10
    assert {index for batch in drawn for index in batch} == set(range(12))


def test_data_smaller_than_the_batch_come_whole(pictures: list[Image.Image]) -> None:
    batches = Images(pictures).random_batches(96, torch.Generator().manual_seed(0))
    assert [sorted(draw.position for draw in next(batches)) for _ in range(3)] == [list(range(12))] * 3
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    assert len(train(classifier, Images(pictures), SHORT.with_settings(batch_size=96)).history) == 4


def test_one_image_is_enough_to_run(pictures: list[Image.Image], tiny: Classifier) -> None:
    assert math.isfinite(train(tiny, Images(pictures[:1]), SHORT).history[-1].loss)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("tune", ["full", "prompt", "layernorm"])
def test_the_loss_falls(few_digits: Path, tiny: Classifier, tune: str, optimizer: str) -> None:
    lr = {"sgd": 1e-2, "adamw": 1e-3}[optimizer]
    recipe = SHORT.with_settings(
        steps=12,
        batch_size=96,
        **{"tuner.name": tune, "optimisation.name": optimizer, "optimisation.lr": lr},
    )
    history = train(tiny, Images.from_folder(few_digits), recipe).history
    assert sum(step.loss for step in history[-4:]) < sum(step.loss for step in history[:4])


@pytest.mark.parametrize("lr", [1e6, 1e30])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_weights(
    few_digits: Path, tiny: Classifier, lr: float
) -> None:
    seen = Steps()
    recipe = SHORT.with_settings(steps=50, **{"optimisation.lr": lr})
    with pytest.raises(Diverged, match=r"not a finite number.*learning rate below") as error:
        train(tiny, Images.from_folder(few_digits), recipe, callbacks=[seen])
    assert all(parameter.isfinite().all() for parameter in tiny.parameters())
    assert tiny.predict_proba(Images.from_folder(few_digits)).isfinite().all()
    assert error.value.step <= len(seen.steps) + 1


class Poison(Callback):
    """After some steps the loss is no number."""

    def __init__(self, step: int, classifier: Classifier) -> None:
        self.step, self.classifier, self.history = step, classifier, [weights(classifier)]

    def on_step(self, step: Step) -> None:
        self.history.append(weights(self.classifier))
        if step.step == self.step:
            with torch.no_grad():
                self.classifier.backbone.logit_scale.fill_(math.nan)


@pytest.mark.parametrize(("step", "restored"), [(4, 0), (10, 0), (13, 10), (25, 20)])
def test_weights_go_back_to_the_last_copy_of_ten_steps(
    few_digits: Path, tiny: Classifier, step: int, restored: int
) -> None:
    poison = Poison(step, tiny)
    recipe = SHORT.with_settings(steps=30, batch_size=8, snapshots=0, **{"tuner.name": "prompt"})
    with pytest.raises(Diverged, match=f"the weights of step {restored} ") as error:
        train(tiny, Images.from_folder(few_digits), recipe, callbacks=[poison])
    assert (error.value.step, error.value.restored) == (step + 1, restored)
    back = weights(tiny)
    assert torch.equal(back["prompt.vectors"], poison.history[restored or 1]["prompt.vectors"]) is (restored > 0)
    assert all(parameter.isfinite().all() for parameter in back.values())


def test_the_last_good_weights_are_those_before_the_fatal_update(few_digits: Path) -> None:
    """With a learning rate that no weight survives, these are the weights it started from."""
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    before = weights(classifier)
    with pytest.raises(Diverged):
        train(classifier, Images.from_folder(few_digits), SHORT.with_settings(**{"optimisation.lr": 1e38}))
    assert same(weights(classifier), before)


@pytest.mark.parametrize("lr", [1e38, 1e300])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_rate_beyond_what_numbers_hold_is_a_run_that_diverged(
    few_digits: Path, tiny: Classifier, optimizer: str, lr: float
) -> None:
    changes = {"optimisation.lr": lr, "optimisation.name": optimizer}
    with pytest.raises(Diverged, match="learning rate below"):
        train(tiny, Images.from_folder(few_digits), SHORT.with_settings(changes))
    assert all(parameter.isfinite().all() for parameter in tiny.parameters())


def test_gradient_clipping_bounds_the_step(few_digits: Path, tiny: Classifier) -> None:
    before = weights(tiny)
    clipped = {"optimisation.clip": 1e-3, "optimisation.weight_decay": 0.0, "optimisation.nesterov": False}
    train(tiny, Images.from_folder(few_digits), SHORT.with_settings(steps=1, **clipped))
    moved = math.sqrt(sum((weights(tiny)[name] - value).square().sum().item() for name, value in before.items()))
    assert moved == pytest.approx(1e-3 * SHORT.optimisation.lr, rel=1e-2)


def test_frozen_features_are_computed_once(few_digits: Path, tiny: Classifier) -> None:
    calls = []
    tiny.backbone.model.vision_model.register_forward_hook(lambda *_: calls.append(1))
    train(tiny, Images.from_folder(few_digits), SHORT.with_settings(steps=20, snapshots=0, **{"tuner.name": "prompt"}))
    assert len(calls) == math.ceil(len(Images.from_folder(few_digits)) / 64)


def test_the_temperature_can_be_set(few_digits: Path, tiny: Classifier) -> None:
    history = train(tiny, Images.from_folder(few_digits), SHORT.with_settings(temperature=0.05)).history
    assert history[0].temperature == pytest.approx(0.05)
    assert tiny.temperature == 0.05


def test_it_says_how_much_it_trains_and_keeps(
    few_digits: Path, tiny: Classifier, caplog: pytest.LogCaptureFixture
) -> None:
    told = Steps()
    with caplog.at_level("INFO", "pouf"):
        train(tiny, Images.from_folder(few_digits), SHORT, callbacks=[told])
    total = sum(parameter.numel() for parameter in tiny.parameters())
    assert "checkpoints take up to 7 MB in" in caplog.text, "before the first is written"
    assert told.started == [(total, total)] and told.checkpoints == [0, 1, 2, 3, 4]
    assert describe_trainable(*told.started[0]) == f"trainable {total:,} of {total:,} (100 %)"


def test_the_papers_schedule_and_the_others_at_known_points() -> None:
    def rates(name: str) -> list[float]:
        return [learning_rate(Optimisation(lr=2.0, schedule=name), step, 100) for step in (0, 50, 100)]

    assert rates("paper") == pytest.approx([2.0, 2 * 1.01**-0.75, 2 * 1.02**-0.75])
    assert rates("linear") == pytest.approx([2.0, 1.0, 0.0])
    assert rates("cosine") == pytest.approx([2.0, 1.0, 0.0])
    assert rates("constant") == [2.0, 2.0, 2.0]
    assert sorted(SCHEDULES) == ["constant", "cosine", "linear", "paper"]


def test_the_optimizer_gets_the_recipes_settings() -> None:
    parameters = {"weight": torch.nn.Parameter(torch.zeros(2))}
    sgd = make_optimizer(parameters, Optimisation()).param_groups[0]
    assert (sgd["momentum"], sgd["nesterov"], sgd["weight_decay"], sgd["lr"]) == (0.9, True, 1e-3, 5e-7)
    adamw = make_optimizer(parameters, Optimisation(name="adamw", weight_decay=0.2))
    assert isinstance(adamw, torch.optim.AdamW) and adamw.param_groups[0]["weight_decay"] == 0.2


def test_the_temperature_can_have_a_rate_of_its_own(few_digits: Path) -> None:
    def moved(**settings: float) -> tuple[float, float]:
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        before = classifier.backbone.logit_scale.item()
        plain = {"tuner.name": "prompt", "optimisation.weight_decay": 0.0, "optimisation.nesterov": False}
        recipe = SHORT.with_settings({**plain, **settings}, steps=1, snapshots=0)
        train(classifier, Images.from_folder(few_digits), recipe)
        return classifier.backbone.logit_scale.item() - before, classifier.prompt.vectors.sum().item()

    lr = SHORT.optimisation.lr
    (same, context), (slow, as_before) = moved(), moved(**{"optimisation.temperature_lr": lr / 4})
    assert slow == pytest.approx(same / 4, rel=1e-2) and same != 0
    assert as_before == context


def noisy(folder: Path, seed: int = 0, **settings: object) -> tuple[Classifier, Recipe]:
    """A masked language model with dropout of its own, and how it is trained."""
    classifier = Classifier.from_pretrained(folder, ["bad", "good"], ["{text} it was [MASK]."], words=["bad", "good"])
    recipe = Recipe.load("masked").with_settings({"optimisation.dropout": True}, steps=2, batch_size=6, seed=seed)
    return classifier, recipe.with_settings(settings)


def test_dropout_is_on_in_training_alone_and_repeats_itself(tmp_path: Path) -> None:
    folder, seen = masked_lm(tmp_path, "roberta"), []

    class Modes(Callback):
        def on_checkpoint(self, step: int, classifier: Classifier) -> None:
            seen.append(classifier.training)

        def on_step(self, step: Step) -> None:
            seen.append(classifier.training)

    def run(**settings: object) -> dict[str, torch.Tensor]:
        nonlocal classifier
        classifier, recipe = noisy(folder, **settings)
        train(classifier, Texts(TEXTS), recipe, callbacks=[Modes()])
        assert not any(module.training for module in classifier.modules()) and not any(seen)
        return weights(classifier)

    classifier = noisy(folder)[0]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = run()
    assert torch.equal(torch.rand(3), expected), "the caller's random numbers are left alone"
    assert same(first, run()) and seen
    assert not same(first, run(**{"optimisation.dropout": False}))
    assert same(first, run(**{"compute.checkpointing": True})), "what is computed again drops the same units"


def test_chunks_that_are_computed_again_drop_the_same_units(tmp_path: Path) -> None:
    computed: list[torch.Tensor] = []

    def remember(module: torch.nn.Module, given: object, output: Sequence[torch.Tensor]) -> None:
        if module.training:
            computed.append(output[0].detach().clone())

    classifier, recipe = noisy(masked_lm(tmp_path, "roberta"), **{"compute.chunk": 3, "steps": 1, "snapshots": 0})
    classifier.backbone.model.base_model.register_forward_hook(remember)
    train(classifier, Texts(TEXTS), recipe)
    one, two, one_again, two_again = computed
    assert torch.equal(one, one_again) and torch.equal(two, two_again)
