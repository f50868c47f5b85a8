"""Batches in chunks, in bf16, compiled, checkpointed: the same step."""

import shutil
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from helpers import TEXTS, encoded_samples, train, weights
from PIL import Image
from small_models import masked_lm, sentence_encoder

from pouf import EMBEDDED, Backbone, Classifier, Images, InputError, Recipe, Texts
from pouf.demo import DIGITS
from pouf.errors import Unreadable
from pouf.inference.encode import InferenceConfig
from pouf.training.batches import Batches
from pouf.tuners import tune


def images() -> Classifier:
    return Classifier.from_pretrained(EMBEDDED, DIGITS)


def texts(folder: Path) -> Classifier:
    return Classifier.from_pretrained(sentence_encoder(folder), ["good", "bad"], ["it is {}"])


def cloze(folder: Path) -> Classifier:
    return Classifier.from_pretrained(masked_lm(folder, "bert"), ["bad", "good"], ["{text} it was [MASK]."])


def recipe(tune: str = "full", **settings: object) -> Recipe:
    """Three plain steps: what differs in the gradient shows in the weights."""
    return Recipe(steps=3, batch_size=12, augment="none", temperature=0.1, snapshots=0).with_settings(
        **{"tuner.name": tune, "optimisation.lr": 1e-2, "optimisation.weight_decay": 0.0, **settings}
    )


def weights_after(classifier: Classifier, data, settings: Recipe) -> dict[str, torch.Tensor]:
    train(classifier, data, settings)
    return weights(classifier)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.allclose(one[name], other[name], atol=atol), name


@pytest.mark.parametrize("tune", ["full", "layernorm"])
@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_chunks_give_the_gradient_of_the_whole_batch(pictures: list[Image.Image], tune: str, chunk: int) -> None:
    whole = weights_after(images(), Images(pictures), recipe(tune))
    chunked = weights_after(images(), Images(pictures), recipe(tune, **{"compute.chunk": chunk}))
    assert_same(whole, chunked)
    start = dict(images().named_parameters())
    assert any(not torch.allclose(whole[name], start[name], atol=1e-4) for name in whole), "the steps moved something"


@pytest.mark.parametrize("build", [texts, cloze])
def test_chunks_of_texts_too_where_one_model_makes_features_and_prototypes(tmp_path: Path, build) -> None:
    whole = weights_after(build(tmp_path / "a"), Texts(TEXTS), recipe())
    chunked = weights_after(build(tmp_path / "b"), Texts(TEXTS), recipe(**{"compute.chunk": 4}))
    assert_same(whole, chunked)


def test_only_a_chunk_is_in_the_graph_at_a_time(pictures: list[Image.Image]) -> None:
    classifier, events = images(), []

    class Noted(Images):
        def read(self, index: int, side: int | None = None) -> Image.Image:
            events.append("read")
            return super().read(index, side)

    sizes = encoded_samples(classifier)
    classifier.backbone.model.vision_model.register_forward_hook(
        lambda *_: events.append((sizes[-1], torch.is_grad_enabled()))
    )
    train(classifier, Noted(pictures), recipe(steps=1, **{"compute.chunk": 4}))
    assert [event for event in events if event != "read"] == [(4, False)] * 3 + [(4, True)] * 3
    waiting = accumulate(1 if event == "read" else -4 for event in events)
    assert max(waiting) <= 8, "nor are more pictures in memory than those and the next"


class Vanishing(Images):
    """Pictures of which some can be read once, and others at a second reading alone."""

    def __init__(self, pictures: list[Image.Image], once: set[int], later: set[int]) -> None:
        super().__init__(pictures)
        self.once, self.later, self.times = once, later, [0] * len(pictures)

    def read(self, index: int, side: int | None = None) -> Image.Image:
        self.times[index] += 1
        if (index in self.once and self.times[index] > 1) or (index in self.later and self.times[index] == 1):
            raise Unreadable("gone")
        return super().read(index, side)


def test_a_sample_that_goes_within_a_step_is_left_out_of_its_gradient_and_shifts_no_other(
    pictures: list[Image.Image],
) -> None:
    data = Vanishing(pictures[:7], once={1, 5, 6}, later={3})
    classifier, settings = images(), recipe(batch_size=7, **{"compute.chunk": 2})
    tuner = tune(classifier, settings.tuner)
    (side,) = next(Batches(classifier, tuner, data, None, settings, InferenceConfig())).inputs
    chunks = list(side.chunks())
    gradient = torch.randn(sum(chunk.rows for chunk in chunks), 2)
    row_of = {index: row for row, index in enumerate(side.indices)}
    again = list(side.chunks_again(gradient))
    assert side.chunked and set(side.indices) == {0, 1, 2, 4, 5, 6}, "what can be read later has no part in this step"
    rows = torch.cat([rows for _, rows in again])
    order = [index for index in side.indices if index not in data.once]
    assert torch.equal(rows, gradient[[row_of[index] for index in order]])
    read = torch.cat([chunk.content["pixel_values"] for chunk, _ in again])
    assert torch.equal(read, classifier.backbone.prepare([pictures[index] for index in order])["pixel_values"])
    assert sum(chunk.rows for chunk, _ in again) == len(order)
    seeds = [chunk.seed for chunk in chunks]
    assert all(chunk.seed in seeds for chunk, _ in again), "the same units are dropped"


@pytest.mark.parametrize("tune", ["full", "prompt", "layernorm"])
def test_forgetting_activations_changes_nothing(pictures: list[Image.Image], tune: str) -> None:
    plain = weights_after(images(), Images(pictures), recipe(tune))
    classifier = images()
    calls = []
    layer = classifier.backbone.model.text_model.encoder.layers[0].self_attn
    layer.register_forward_hook(lambda *_: calls.append(1))
    again = weights_after(classifier, Images(pictures), recipe(tune, **{"compute.checkpointing": True}))
    assert_same(plain, again)
    assert len(calls) == 2 * 3, "computed twice at each step: that is the price"
    assert not any(module.training for module in classifier.modules())


def test_activations_are_forgotten_after_a_checkpoint_too(pictures: list[Image.Image]) -> None:
    """What looks at the classifier between steps leaves it in the mode that it was in."""
    classifier = images()
    training: list[bool] = []
    layer = classifier.backbone.model.text_model.encoder.layers[0]
    layer.register_forward_hook(
        lambda module, *_: training.append(module.training) if torch.is_grad_enabled() else None
    )
    train(classifier, Images(pictures), recipe(snapshots=3, **{"compute.checkpointing": True}))
    assert len(training) >= 3 and all(training)


def test_a_model_that_can_not_forget_says_so(pictures: list[Image.Image]) -> None:
    class Bare(Backbone):
        modality = "image"

        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = torch.nn.Parameter(torch.tensor(1.0))
            self.table = torch.nn.Parameter(torch.eye(3))

        def prepare(self, samples):
            return {"x": torch.rand(len(samples), 3)}

        def encode_inputs(self, batch):
            return batch["x"] @ self.table

        def encode_prompts(self, prompts):
            return self.table[: len(prompts)]

    with pytest.raises(InputError, match=r"Bare can't forget activations"):
        train(Classifier(Bare(), ["a", "b"]), Images(pictures), recipe(**{"compute.checkpointing": True}))


def test_bf16_is_near_and_its_losses_and_weights_are_fp32(pictures: list[Image.Image]) -> None:
    plain, half = images(), images()
    one = train(plain, Images(pictures), recipe())
    other = train(half, Images(pictures), recipe(**{"compute.precision": "bf16"}))
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert other.history[0].loss != one.history[0].loss, "something was rounded"
    assert other.history[-1].loss == pytest.approx(one.history[-1].loss, abs=0.05)


class Small(Backbone):
    """A model so small that compiling it takes seconds."""

    modality = "image"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.0))
        self.table = torch.nn.Parameter(torch.randn(3, 8))
        self.encode = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))

    def prepare(self, samples):
        return {"x": torch.stack([torch.tensor(image.resize((1, 1)).getpixel((0, 0))) for image in samples]) / 255}

    def encode_inputs(self, batch):
        return self.encode(batch["x"])

    def encode_prompts(self, prompts):
        return self.table


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_encoder_takes_the_same_steps(pictures: list[Image.Image], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, **k: compiled.append(what) or original(what, **k))
    plain = weights_after(Classifier(Small(), list("abc")), Images(pictures), recipe())
    assert not compiled
    again = weights_after(Classifier(Small(), list("abc")), Images(pictures), recipe(**{"compute.compile": True}))
    assert len(compiled) == 1
    assert_same(plain, again, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_workers_change_nothing(pictures: list[Image.Image], augment: str, chunk: int) -> None:
    settings = recipe(augment=augment, **{"compute.chunk": chunk})
    alone = weights_after(images(), Images(pictures), settings)
    together = weights_after(images(), Images(pictures), settings.with_settings(**{"compute.workers": 2}))
    assert_same(alone, together, atol=0)


def test_a_batch_larger_than_the_data_is_the_data_whole_in_chunks_too(few_digits: Path) -> None:
    data = Images.from_folder(few_digits)
    whole = weights_after(images(), data, recipe(steps=1, batch_size=len(data)))
    chunked = weights_after(images(), data, recipe(steps=1, batch_size=4096, **{"compute.chunk": 32}))
    assert_same(whole, chunked)
