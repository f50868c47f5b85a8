"""Pre-train the embedded tiny CLIP on rendered glyphs and write it in the Hugging Face layout.

    python tools/train_tiny_clip.py --out src/pouf/assets/tiny-clip

Pictures are digits, letters and a few symbols drawn with the fonts that matplotlib brings, bent, thickened,
blurred and set on noisy grounds. Captions are the glyph's name in one of several templates. No handwritten
character is used: scikit-learn's digits, on which `pouf demo` adapts the model, are not read here.

The same seed, versions and number of threads give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

FONTS = (
    "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSansMono DejaVuSansMono-Oblique DejaVuSerif DejaVuSerif-Bold "
    "DejaVuSerif-Italic STIXGeneral STIXGeneralBol STIXGeneralItalic STIXGeneralBolIta cmr10 cmss10 cmtt10 cmb10 cmti10"
).split()

DIGITS = dict(zip("0123456789", "zero one two three four five six seven eight nine".split(), strict=True))
LETTERS = {chr(65 + i): f"letter {chr(97 + i)}" for i in range(26)}
SYMBOLS = {
    "+": "plus sign", "=": "equals sign", "?": "question mark", "!": "exclamation mark", "%": "percent sign",
    "&": "ampersand", "#": "hash sign", "$": "dollar sign", "@": "at sign", "/": "slash", "*": "asterisk",
}  # fmt: skip
GLYPHS = DIGITS | LETTERS | SYMBOLS

TEMPLATES = (
    "a photo of a {}.", "a photo of the {}.", "a picture of a {}.", "an image of the {}.", "a drawing of a {}.",
    "a printed {}.", "the {}.", "a {}.", "{}.", "{}", "a blurry photo of a {}.", "a scan of the character {}.",
)  # fmt: skip

CANVAS, SIZE = 48, 32


def render(glyph: str, font: str) -> Tensor:
    """One glyph, white on black, its ink centred and as high as the canvas allows: (CANVAS, CANVAS) in [0, 1]."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    face = ImageFont.truetype(str(path), 2 * CANVAS)
    left, top, right, bottom = face.getbbox(glyph)
    ink = Image.new("L", (int(right - left), int(bottom - top)))
    ImageDraw.Draw(ink).text((-left, -top), glyph, fill=255, font=face)
    inner = CANVAS - 8
    zoom = min(inner / ink.width, inner / ink.height)
    ink = ink.resize((max(1, round(ink.width * zoom)), max(1, round(ink.height * zoom))), Image.Resampling.LANCZOS)
    image = Image.new("L", (CANVAS, CANVAS))
    image.paste(ink, ((CANVAS - ink.width) // 2, (CANVAS - ink.height) // 2))
    return torch.tensor(list(image.tobytes()), dtype=torch.float32).view(CANVAS, CANVAS) / 255


def photograph(ink: Tensor, generator: torch.Generator) -> Tensor:
    """Bend, thicken, blur, recolour and soil glyphs: (n, CANVAS, CANVAS) -> (n, 3, SIZE, SIZE) in [0, 1]."""
    n = len(ink)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *shape, generator=generator)

    x = ink[:, None]  # (n, 1, CANVAS, CANVAS)
    thick = F.max_pool2d(x, 5, stride=1, padding=2)
    mix = uniform(0, 1, 1, 1, 1)
    x = mix * thick + (1 - mix) * x
    angle, shear = uniform(-0.25, 0.25), uniform(-0.3, 0.3)
    zoom_x, zoom_y = uniform(0.8, 1.5), uniform(0.8, 1.2)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0], theta[:, 0, 1] = angle.cos() * zoom_x, (shear - angle.sin()) * zoom_y
    theta[:, 1, 0], theta[:, 1, 1] = angle.sin() * zoom_x, angle.cos() * zoom_y
    theta[:, :, 2] = uniform(-0.12, 0.12, 2)
    grid = F.affine_grid(theta, [n, 1, SIZE, SIZE], align_corners=False)
    # A smooth random field bends the strokes, as no two hands draw the same curve.
    field = uniform(0, 0.12, 1, 1, 1) * torch.randn(n, 2, 4, 4, generator=generator)
    bend = F.interpolate(field, size=SIZE, mode="bicubic").permute(0, 2, 3, 1)  # (n, SIZE, SIZE, 2)
    x = F.grid_sample(x, grid + bend, align_corners=False)
    coarse = F.interpolate(F.adaptive_avg_pool2d(x, 8), size=SIZE, mode="bicubic").clamp(0, 1)
    medium = F.interpolate(F.adaptive_avg_pool2d(x, 16), size=SIZE, mode="bicubic").clamp(0, 1)
    choice = torch.randint(0, 3, (n, 1, 1, 1), generator=generator)
    x = torch.where(choice == 0, x, torch.where(choice == 1, medium, coarse))
    ground, figure = uniform(0, 0.3, 3, 1, 1), uniform(0.6, 1.0, 3, 1, 1)
    x = ground + (figure - ground) * x
    negative = torch.rand(n, 1, 1, 1, generator=generator) < 0.5
    x = torch.where(negative, 1 - x, x)
    return (x + uniform(0, 0.1, 1, 1, 1) * torch.randn(n, 3, SIZE, SIZE, generator=generator)).clamp(0, 1)


def build_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-pair tokenizer with the few hundred pieces that the captions need, and every byte for the rest."""
    captions = [template.format(name) for template in TEMPLATES for name in GLYPHS.values()]
    alphabet = sorted(ByteLevel.alphabet())
    specials = ["<|startoftext|>", "<|endoftext|>"]
    bare = CLIPTokenizer(vocab={piece: i for i, piece in enumerate(alphabet + specials)}).backend_tokenizer
    learner = Tokenizer(BPE(end_of_word_suffix="</w>"))
    learner.normalizer, learner.pre_tokenizer = bare.normalizer, bare.pre_tokenizer
    trainer = BpeTrainer(initial_alphabet=alphabet, end_of_word_suffix="</w>", min_frequency=2, show_progress=False)
    learner.train_from_iterator(captions, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet), *("".join(pair) for pair in merges), *specials]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def build_model(tokenizer: CLIPTokenizer) -> CLIPModel:
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        **ids,
    }
    vision = {
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": 8,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def train(steps: int, batch_size: int, seed: int) -> tuple[CLIPModel, CLIPTokenizer]:
    """Contrastive training: each picture against one caption of every glyph, in a template drawn anew at each step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    names = list(GLYPHS.values())
    bank = torch.stack(
        [torch.stack([render(glyph, font) for font in FONTS]) for glyph in GLYPHS]
    )  # (glyphs, fonts, C, C)
    # Half of the pictures are digits, so that the ten classes of the demo are known as well as all others together.
    weights = torch.tensor(
        [1 / len(DIGITS) if glyph in DIGITS else 1 / (len(GLYPHS) - len(DIGITS)) for glyph in GLYPHS]
    )
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(names)} glyphs, {len(FONTS)} fonts")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda it: min(1, (it + 1) / 100) * 0.5 * (1 + math.cos(math.pi * it / steps))
    )
    start = time.perf_counter()
    for step in range(steps):
        glyph = torch.multinomial(weights, batch_size, replacement=True, generator=generator)
        font = torch.randint(0, len(FONTS), (batch_size,), generator=generator)
        pixels = (photograph(bank[glyph, font], generator) - 0.5) / 0.5
        template = torch.randint(0, len(TEMPLATES), (len(names),), generator=generator)
        tokens = tokenizer(
            [TEMPLATES[t].format(name) for t, name in zip(template, names, strict=True)],
            padding=True,
            return_tensors="pt",
        )
        output = model(pixel_values=pixels, **tokens)
        loss = F.cross_entropy(output.logits_per_image, glyph)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))  # as CLIP does
        if step % 100 == 99 or step == steps - 1:
            accuracy = (output.logits_per_image.argmax(1) == glyph).float().mean()
            seconds = time.perf_counter() - start
            print(f"step {step + 1:5d}  loss {loss.item():.3f}  rendered glyphs right {accuracy:.1%}  {seconds:.0f} s")
    return model.eval(), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, tokenizer = train(arguments.steps, arguments.batch_size, arguments.seed)
    size = {"height": SIZE, "width": SIZE}
    processor = CLIPImageProcessor(size=size, crop_size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    for part in (model, tokenizer, processor):
        part.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
