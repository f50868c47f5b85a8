"""CLIP, SigLIP and SigLIP 2 from local folders: the same numbers as transformers gives, without the padding."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from small_models import clip, siglip, siglip2, word_tokenizer
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from pouf import Classifier, InputError
from pouf.models import load_backbone
from pouf.models.text_side import PROMPTS_AT_ONCE, special_tokens
from pouf.models.vision import DualEncoder

PROMPTS = ["a photo of a cat.", "dog", "a photo of the sea, about many good books", "a", "the air"]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip(tmp_path_factory.mktemp("clip"))


def padded_features(folder: Path, length: int) -> torch.Tensor:
    """What transformers computes for prompts padded to the full length."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(PROMPTS, padding="max_length", max_length=length, return_tensors="pt")
    assert tokens["input_ids"].shape == (len(PROMPTS), length)
    with torch.no_grad():
        return model.get_text_features(**tokens).pooler_output


@pytest.mark.parametrize("eos_token_id", [None, 2], ids=["end token from config", "OpenAI's wrong end token"])
def test_prompts_at_their_own_length_equal_prompts_padded_to_77(tmp_path: Path, eos_token_id: int | None) -> None:
    folder = clip(tmp_path, eos_token_id)
    backbone = load_backbone(folder).eval()
    lengths = []
    backbone.model.text_model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        ours = backbone.encode_prompts(PROMPTS)
    assert max(lengths) < 40, "the prompts were padded further than the longest of them"
    assert torch.allclose(ours, padded_features(folder, 77), atol=1e-5)


def test_padding_is_the_end_token_and_the_first_one_is_read(clip_folder: Path) -> None:
    """CLIP pads with its end token, so that a sentence holds it several times; the features are those of the first."""
    backbone = load_backbone(clip_folder).eval()
    tokenizer = backbone.tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    tokens = backbone.text_side.pad([backbone.text_side.token_ids(p, special=True) for p in PROMPTS])
    ends = (tokens["input_ids"] == tokenizer.eos_token_id).int()
    assert (ends.sum(1) > 1).any(), "no prompt of this test was padded"
    with torch.no_grad():
        together = backbone.encode_prompts(PROMPTS)
        alone = torch.cat([backbone.encode_prompts([prompt]) for prompt in PROMPTS])
    assert torch.allclose(together, alone, atol=1e-5)


def test_prompts_come_back_in_the_order_given(clip_folder: Path) -> None:
    backbone = load_backbone(clip_folder).eval()
    with torch.no_grad():
        forth, back = backbone.encode_prompts(PROMPTS), backbone.encode_prompts(PROMPTS[::-1])
    assert torch.allclose(forth, back.flip(0), atol=1e-6)


def test_more_prompts_than_a_chunk_holds_are_all_encoded(clip_folder: Path) -> None:
    backbone, times = load_backbone(clip_folder).eval(), PROMPTS_AT_ONCE // len(PROMPTS) + 1
    with torch.no_grad():
        alone, many = backbone.encode_prompts(PROMPTS), backbone.encode_prompts(PROMPTS * times)
    assert torch.allclose(many, alone.repeat(times, 1), atol=1e-5)


def test_a_prompt_longer_than_the_model_is_cut_and_keeps_its_end_token(clip_folder: Path) -> None:
    backbone = load_backbone(clip_folder)
    ids = backbone.text_side.token_ids("cat " * 200, special=True)
    assert len(ids) == 77
    assert ids[-1] == backbone.tokenizer.eos_token_id


@pytest.mark.parametrize("build", [clip, siglip, siglip2])
def test_scores_are_those_of_the_model_itself(tmp_path: Path, build: object, pictures: list[Image.Image]) -> None:
    """logits_per_image of transformers' own forward pass, up to SigLIP's bias, which the softmax ignores."""
    folder = build(tmp_path)
    classes, template = ["cat", "dog", "sea"], "a photo of a {} ."
    classifier = Classifier.from_pretrained(folder, classes, [template])
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    length = {clip: 77, siglip: 16, siglip2: 32}[build]
    texts = tokenizer(
        [template.format(c) for c in classes], padding="max_length", max_length=length, return_tensors="pt"
    )
    if build is not clip:
        texts.pop("attention_mask")  # SigLIP is trained to attend to its padding
    images = AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt")
    with torch.no_grad():
        expected = model(**texts, **images).logits_per_image.softmax(1)
    assert torch.allclose(classifier.predict_proba(pictures), expected, atol=1e-5)


def test_siglip_pads_as_it_was_trained_since_its_padding_counts(tmp_path: Path) -> None:
    backbone = load_backbone(siglip(tmp_path)).eval()
    tokens = backbone.text_side.pad([[3, 4, 1]])
    assert tokens["input_ids"].shape == (1, 16)
    assert "attention_mask" not in tokens


def test_several_templates_are_averaged_after_normalisation(clip_folder: Path) -> None:
    classes, templates = ["cat", "dog"], ["a photo of a {}.", "{}", "the {} is good"]
    prototypes = Classifier.from_pretrained(clip_folder, classes, templates).prototypes()
    single = [Classifier.from_pretrained(clip_folder, classes, [template]).prototypes() for template in templates]
    mean = torch.stack(single).mean(0)
    assert torch.allclose(prototypes, mean / mean.norm(dim=1, keepdim=True), atol=1e-5)


def test_half_precision_checkpoints_are_read_as_fp32(tmp_path: Path) -> None:
    folder = clip(tmp_path)
    AutoModel.from_pretrained(folder).half().save_pretrained(folder)
    assert {p.dtype for p in load_backbone(folder).parameters()} == {torch.float32}


def test_a_model_without_a_logit_scale_gets_a_fixed_temperature(clip_folder: Path) -> None:
    backbone = load_backbone(clip_folder)
    del backbone.model.logit_scale
    again = DualEncoder(backbone.model, backbone.tokenizer, backbone.image_processor)
    again.set_temperature(0.05)
    assert again.logit_scale.exp().item() == pytest.approx(20)
    assert "fixed_scale" not in dict(again.named_parameters())


def test_the_token_frame_is_found_for_tokenizers_with_and_without_a_start_token(clip_folder: Path) -> None:
    text_side = load_backbone(clip_folder).text_side
    assert special_tokens(text_side.tokenizer) == (
        [text_side.tokenizer.bos_token_id],
        [text_side.tokenizer.eos_token_id],
    )
    text_side.tokenizer = word_tokenizer()
    assert special_tokens(text_side.tokenizer) == ([], [1])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./no/such/folder", "no model folder"),
        ("/no/such/folder", "no model folder"),
        ("nobody/has-this-model", "can't load model 'nobody/has-this-model'"),
    ],
)
def test_an_unknown_model_is_one_clear_line(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        load_backbone(name)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't load model"):
        load_backbone(tmp_path)
