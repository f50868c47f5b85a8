"""Features that are kept: found again by model, preprocessing and content, and by nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import encoded_samples, train
from PIL import Image
from small_models import clip, masked_lm, sentence_encoder

from pouf import EMBEDDED, Classifier, Images, InputError, Recipe, Texts
from pouf.data.views import crop_flip
from pouf.demo import DIGITS
from pouf.inference.cache import FeatureCache
from pouf.inference.encode import InferenceConfig
from pouf.training.batches import Crop


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache")


def test_nothing_is_encoded_twice(cache: FeatureCache, tiny: Classifier, few_digits: Path) -> None:
    plain = tiny.encode(Images.from_folder(few_digits))
    first = tiny.encode(Images.from_folder(few_digits), InferenceConfig(cache=cache))
    counts = encoded_samples(tiny)
    again = tiny.encode(Images.from_folder(few_digits), InferenceConfig(cache=cache))
    assert counts == []
    assert plain.indices == first.indices == again.indices
    assert torch.equal(plain.features, first.features) and torch.equal(plain.features, again.features)


def test_what_was_computed_before_an_interruption_is_kept(tiny: Classifier, few_digits: Path, tmp_path: Path) -> None:
    cache, seen = FeatureCache(tmp_path, every=0), []

    def interrupt(n: int) -> None:
        seen.append(n)
        if sum(seen) >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.encode(Images.from_folder(few_digits), InferenceConfig(10, cache=cache, on_batch=interrupt))
    counts = encoded_samples(tiny)
    data = Images.from_folder(few_digits)
    again = tiny.encode(data, InferenceConfig(cache=cache))
    assert sum(counts) == len(data) - 20
    assert torch.allclose(again.features, tiny.encode(data).features, atol=1e-5)


def test_what_is_new_is_encoded_and_nothing_else(
    cache: FeatureCache, tiny: Classifier, few_digits: Path, tmp_path: Path
) -> None:
    """Names and folders play no part: a moved file is found again, a changed one is not."""
    tiny.encode(Images.from_folder(few_digits), InferenceConfig(cache=cache))
    paths = sorted(few_digits.rglob("*.png"))[:5]
    for i, path in enumerate(paths):
        (tmp_path / f"moved{9 - i}.png").write_bytes(path.read_bytes())
    new = np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)
    Image.fromarray(new).save(tmp_path / "new.png")
    (tmp_path / "broken.png").write_bytes(b"no")
    data = Images.from_folder(tmp_path)
    expected = tiny.encode(Images.from_folder(tmp_path))
    counts = encoded_samples(tiny)
    found = tiny.encode(data, InferenceConfig(cache=cache))
    assert counts == [1] and list(data.skipped) == [0]
    # In a batch of its own a picture can come out with other rounding.
    assert found.indices == expected.indices and torch.allclose(found.features, expected.features, atol=1e-5)


def test_features_are_mapped_from_their_file_and_not_copied(cache: FeatureCache) -> None:
    digests = [bytes([i]) * 16 for i in range(5)]
    cache.open("model").put(digests, torch.rand(5, 3))
    kept = cache.open("model")
    mapped = kept.shard(0)
    kept.shard = lambda number: mapped
    assert isinstance(mapped, np.memmap) and np.shares_memory(kept.get(digests).numpy(), mapped)
    some = kept.get([digests[3], digests[1]])
    assert torch.equal(some, kept.get(digests)[[3, 1]])
    some.zero_()
    kept.get(digests).zero_()
    assert cache.open("model").get(digests).abs().sum() > 0, "the file is never changed"


def test_prompt_tuning_and_its_prediction_share_features(cache: FeatureCache, few_digits: Path, tmp_path: Path) -> None:
    """The text side and the temperature have no part in the features of images."""
    recipe = Recipe.load("demo-prompt").with_settings(steps=3)
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    train(classifier, Images.from_folder(few_digits), recipe, cache=cache)
    classifier.save_pretrained(tmp_path / "run")
    again = Classifier.from_pretrained(tmp_path / "run")
    counts = encoded_samples(again)
    cached = again.infer(Images.from_folder(few_digits), InferenceConfig(cache=cache))
    assert counts == []
    assert torch.equal(cached.log_probabilities, again.infer(Images.from_folder(few_digits)).log_probabilities)


def test_other_weights_are_another_model(cache: FeatureCache, tiny: Classifier, few_digits: Path) -> None:
    before = tiny.encode(Images.from_folder(few_digits), InferenceConfig(cache=cache)).features
    with torch.no_grad():
        tiny.backbone.model.visual_projection.weight[0, 0] += 1e-3
    after = tiny.encode(Images.from_folder(few_digits), InferenceConfig(cache=cache)).features
    assert not torch.equal(before, after)
    assert torch.equal(after, tiny.encode(Images.from_folder(few_digits)).features)


def test_fingerprints_tell_preprocessing_pooling_and_template_apart(tmp_path: Path) -> None:
    folder = clip(tmp_path / "clip")
    one = Classifier.from_pretrained(folder, ["cat", "dog"]).backbone
    other = Classifier.from_pretrained(folder, ["cat", "dog"]).backbone
    assert one.fingerprint() == other.fingerprint()
    other.image_processor.image_mean = [0.1, 0.1, 0.1]
    assert one.fingerprint() != other.fingerprint()
    mean, first = (
        Classifier.from_pretrained(sentence_encoder(tmp_path / pooling, "bert", pooling), ["cat", "dog"]).backbone
        for pooling in ("mean_tokens", "cls_token")
    )
    assert mean.fingerprint() != first.fingerprint()
    lm = masked_lm(tmp_path / "lm", "bert")
    other = Classifier.from_pretrained(folder, ["cat", "dog"]).backbone
    other.model.config.vision_config.hidden_act = "gelu"
    assert one.fingerprint() != other.fingerprint(), "the same weights can compute something else"
    was, seems = (
        Classifier.from_pretrained(lm, ["bad", "good"], [f"{{text}} it {verb} [MASK]."]).backbone
        for verb in ("was", "is")
    )
    assert was.fingerprint() != seems.fingerprint()


def test_texts_are_kept_by_their_words(cache: FeatureCache, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path), ["good", "bad"])
    classifier.encode(Texts(["a cat", "a dog", "a cat"]), InferenceConfig(cache=cache))
    counts = encoded_samples(classifier)
    found = classifier.encode(Texts(["the sea", "a dog", "a cat"]), InferenceConfig(cache=cache))
    assert counts == [1] and found.indices == [0, 1, 2]


def test_views_are_kept_apart_and_chosen_by_the_draw(cache: FeatureCache, tiny: Classifier, few_digits: Path) -> None:
    recipe = Recipe.load("demo-prompt").with_settings(steps=6, batch_size=50, augment="crop-flip", views=3, snapshots=0)
    crop = Crop(crop_flip, 32)
    tables = [
        tiny.encode(Images.from_folder(few_digits), transform=crop.view(seed, number)).features
        for seed, number in ((0, 0), (0, 1), (1, 0))
    ]
    assert not any(torch.equal(one, other) for one, other in ((tables[0], tables[1]), (tables[0], tables[2])))
    assert torch.equal(tables[0], tiny.encode(Images.from_folder(few_digits), transform=crop.view(0, 0)).features)
    counts = encoded_samples(tiny)
    first = train(tiny, Images.from_folder(few_digits), recipe, cache=cache)
    assert sum(counts) == 3 * 150, "three crops of each image, and none later"
    counts.clear()
    again = train(Classifier.from_pretrained(EMBEDDED, DIGITS), Images.from_folder(few_digits), recipe, cache=cache)
    assert counts == [] and [s.loss for s in first.history] == [s.loss for s in again.history]
    plain = train(
        Classifier.from_pretrained(EMBEDDED, DIGITS),
        Images.from_folder(few_digits),
        recipe.with_settings(augment="none"),
    )
    assert plain.history[0].loss != first.history[0].loss


def test_a_crop_depends_on_its_seed_alone(pictures) -> None:
    crop = Crop(crop_flip, 16)
    assert crop(pictures[0], 5) == crop(pictures[0], 5) != crop(pictures[0], 6)


def test_a_file_without_a_fingerprint_does_not_keep_the_others_from_the_cache(
    cache: FeatureCache, tiny: Classifier, tmp_path: Path, pictures: list[Image.Image]
) -> None:
    for i, picture in enumerate(pictures[:3]):
        picture.save(tmp_path / f"{i}.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "broken.png").write_bytes(b"no")
    tiny.encode(Images.from_folder(tmp_path), InferenceConfig(cache=cache))
    counts = encoded_samples(tiny)
    again = tiny.encode(Images.from_folder(tmp_path), InferenceConfig(cache=cache))
    assert counts == [] and len(again.indices) == 3
    assert len(list(cache.folder.rglob("*.digests.npy"))) == 1, "nothing new, so nothing written"


def test_a_shard_without_its_digests_does_not_count(cache: FeatureCache) -> None:
    """As an interruption would leave it."""
    kept = cache.open("model")
    kept.put([b"0" * 16], torch.ones(1, 4))
    next((cache.folder / "model").glob("*.digests.npy")).unlink()
    assert b"0" * 16 not in cache.open("model")


def test_a_folder_that_can_not_be_written_is_a_warning(
    tiny: Classifier, pictures: list[Image.Image], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "features").write_text("a file in the way")
    found = tiny.encode(Images(pictures), InferenceConfig(cache=FeatureCache(tmp_path)))
    assert torch.equal(found.features, tiny.encode(Images(pictures)).features)
    assert "features can't be stored in the cache" in caplog.text


def flip(content: bytearray) -> bytearray:
    content[-5] ^= 4
    return content


def a_nan(content: bytearray) -> bytearray:
    content[-4:] = np.float32("nan").tobytes()
    return content


DAMAGE = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "any bytes": lambda content: bytes(range(256)) * 3,
    "longer": lambda content: content + b"0000",
    "flipped": flip,
    "not a number": a_nan,
    "a pickle": lambda content: b"\x80\x04}.",
    "another shape": lambda content: content.replace(b"(12", b"(11", 1),
    "gone": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("part", [".features.npy", ".digests.npy"])
def test_a_damaged_shard_is_dropped_said_and_computed_again(
    cache: FeatureCache,
    tiny: Classifier,
    pictures: list[Image.Image],
    caplog: pytest.LogCaptureFixture,
    damage: str,
    part: str,
) -> None:
    data, inference = Images(pictures), InferenceConfig(cache=cache)
    expected = tiny.encode(data, inference).features.clone()
    (file,) = cache.folder.rglob(f"*{part}")
    if DAMAGE[damage] is None:
        file.unlink()
    else:
        file.write_bytes(DAMAGE[damage](bytearray(file.read_bytes())))
    counts = encoded_samples(tiny)
    for _ in range(2):
        assert torch.equal(tiny.encode(data, inference).features, expected)
    changed = (damage, part) != ("longer", part)  # numpy reads as much as its header says
    assert counts == ([12] if changed else []), "once, and kept"
    without_digests = damage == "gone" and part == ".digests.npy"
    assert ("was damaged" in caplog.text) == (changed and not without_digests)


def test_a_file_that_changes_while_it_is_read_does_not_poison_the_cache(
    cache: FeatureCache, tiny: Classifier, tmp_path: Path, pictures: list[Image.Image]
) -> None:
    pictures[0].save(tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()
    original = Images.read

    class Changing(Images):
        def read(self, index: int, side: int | None = None) -> Image.Image:
            pictures[1].save(tmp_path / "a.png")
            return original(self, index, side)

    data = Changing([tmp_path / "a.png"])
    for of, expected in ((data, pictures[:1]), (Images.from_folder(tmp_path), pictures[1:2])):
        found = tiny.encode(of, InferenceConfig(cache=cache)).features
        assert torch.allclose(found, tiny.encode(Images(expected)).features, atol=1e-5)
    (tmp_path / "a.png").write_bytes(before)
    again = tiny.encode(Images.from_folder(tmp_path), InferenceConfig(cache=cache)).features
    assert torch.allclose(again, tiny.encode(Images(pictures[:1])).features, atol=1e-5)


def test_what_a_model_has_no_finite_answer_to_is_skipped(tiny: Classifier, pictures: list[Image.Image]) -> None:
    original = tiny.backbone.encode_inputs

    def overflowing(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        features = original(batch).clone()
        features[2] = float("inf")
        return features

    tiny.backbone.encode_inputs = overflowing
    data = Images(pictures)
    assert tiny.encode(data).indices == [0, 1, *range(3, 12)]
    assert data.skipped == {2: "the model gives numbers for it that are not finite"}


def test_what_one_model_has_no_answer_to_another_answers(pictures: list[Image.Image]) -> None:
    def model() -> Classifier:
        return Classifier.from_pretrained(EMBEDDED, DIGITS)

    bad, data = model(), Images(pictures)
    with torch.no_grad():
        for parameter in bad.backbone.parameters():
            parameter.fill_(float("nan"))
    for ask in (bad.infer, bad.predict, bad.adapt):
        with pytest.raises(InputError, match="none of the 12 inputs"):
            ask(data)
    assert not data.skipped and model().infer(data).skipped == {}
    assert len(model().predict(data)) == 12
    assert model().adapt(data, settings={"steps": 1}).sources["data"].skipped == {}
