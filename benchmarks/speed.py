"""How fast a step is, against the paper's pseudocode executed as written, in one run.

    python benchmarks/speed.py --out benchmarks/results/speed.json          # everything, about 20 minutes on two cores
    python benchmarks/speed.py --only prompt help                           # some of it

CLIP ViT-B/16 with random weights (no download: speed does not depend on them) and pictures of noise. "As written" pads
every prompt to 77 tokens and runs the image tower at each step, trained or not. The two take turns, one step each; the
first of both is left out, and ratios are of medians. (Sequences padded to 128 are in `masked_lm_speed.py`.)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from pouf import Callback, Classifier, Images, InferenceConfig, Recipe, Step
from pouf.models.vision import DualEncoder
from pouf.runs.folder import versions

WORDS = 400  # each a token of its own: class names of one or two words are as long as CLIP's
NOISE = np.random.default_rng(0)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<|startoftext|>", "<|endoftext|>", *"a photo of .".split(), *(f"thing{i}" for i in range(WORDS))]
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("<|startoftext|>", 0), ("<|endoftext|>", 1)]
    bare.post_processor = processors.TemplateProcessing(single="<|startoftext|> $A <|endoftext|>", special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<|startoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        unk_token="a", model_max_length=77,
    )  # fmt: skip


def vit(patch: int = 16) -> DualEncoder:
    torch.manual_seed(0)
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "patch_size": patch}
    config = CLIPConfig(text_config={"eos_token_id": 1}, vision_config=vision, projection_dim=512)
    return DualEncoder(CLIPModel(config).eval(), tokenizer(), CLIPImageProcessor())


def names(k: int) -> list[str]:
    return [f"thing{i}" if i % 2 else f"thing{i} thing{i + 1}" for i in range(k)]


def pictures(n: int) -> list[Image.Image]:
    return [Image.fromarray(NOISE.integers(0, 256, (224, 224, 3), dtype=np.uint8)) for _ in range(n)]


def pseudocode_loss(model: CLIPModel, pixels: torch.Tensor, ids: torch.Tensor, lam: float = 0.3) -> torch.Tensor:
    """The paper's algorithm as written, with its own lines."""
    image = F.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=1)
    text = F.normalize(model.get_text_features(input_ids=ids).pooler_output, dim=1)
    sim = image @ text.T
    logits = sim * model.logit_scale.exp()
    forward, backward, cost = logits.softmax(1), logits.softmax(0), 1 - sim
    transport = (cost * forward).sum(1).mean() + (cost * backward).sum(0).mean()
    p = logits.softmax(1)
    entropy = -(p * (p + 1e-8).log()).sum(1).mean()
    marginal = p.mean(0)
    return transport + lam * (entropy + (marginal * (marginal + 1e-8).log()).sum())


def padded(backbone: DualEncoder, k: int) -> torch.Tensor:
    prompts = [f"a photo of a {name}." for name in names(k)]
    return backbone.tokenizer(prompts, padding="max_length", max_length=77, return_tensors="pt")["input_ids"]


def step_as_written(backbone: DualEncoder, k: int, batch: int, tune: str) -> Callable[[], None]:
    ids, images = padded(backbone, k), pictures(batch)
    backbone.requires_grad_(tune == "full")
    embedding = backbone.model.text_model.get_input_embeddings()
    context = torch.nn.Parameter(embedding.weight[ids[0, 1:5]].detach().clone())
    parameters = list(backbone.parameters()) if tune == "full" else [context, backbone.model.logit_scale]
    for parameter in parameters:
        parameter.requires_grad_()
    if tune == "prompt":  # the same four vectors after the start of every prompt
        embedding.register_forward_hook(
            lambda module, given, out: torch.cat([out[:, :1], context.expand(len(out), -1, -1), out[:, 5:]], dim=1)
        )
    optimizer = torch.optim.SGD(parameters, lr=1e-7, momentum=0.9, nesterov=True)

    def step() -> None:
        pixels = backbone.prepare(images)["pixel_values"]
        loss = pseudocode_loss(backbone.model, pixels, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def rows_by_rank(k: int, batch: int, steps: int, tune: str) -> dict[str, float]:
    """One of our steps, then one as written, and so on."""
    as_written = step_as_written(vit(), k, batch, tune)
    ours: list[float] = []
    written: list[float] = []

    class TakeTurns(Callback):
        mark = time.perf_counter()

        def on_step(self, step: Step) -> None:
            ours.append(time.perf_counter() - self.mark)
            written.append(seconds_of(as_written))
            self.mark = time.perf_counter()

    recipe = Recipe(steps=steps + 1, batch_size=batch, augment="none", snapshots=0).with_settings(
        **{"tuner.name": tune}
    )
    classifier = Classifier(vit(), names(k))
    classifier.adapt(Images(pictures(batch)), recipe=recipe, callbacks=[TakeTurns()])
    a, b = statistics.median(ours[1:]), statistics.median(written[1:])
    return {"ours_seconds": round(a, 3), "as_written_seconds": round(b, 3), "ratio": round(b / a, 1)}


def prompt(steps: int) -> dict[str, float]:
    """Prompt tuning, K = 31, batch 96, after the first epoch: features are looked up."""
    return rows_by_rank(31, 96, steps, "prompt")


def full(steps: int) -> dict[str, float]:
    """Full tuning as on DomainNet: K = 345, batch 16."""
    return rows_by_rank(345, 16, steps, "full")


def flops(k: int, length: int, batch: int, patch: int = 32) -> float:
    """Of one full step: 6 for each weight of the blocks and each token (forward 2, backward 4), attention apart."""
    text, image = 12 * 12 * 512**2, 12 * 12 * 768**2
    tokens = (224 // patch) ** 2 + 1
    attention = 12 * 12 * (k * length**2 * 512 + batch * tokens**2 * 768)
    return 6.0 * (k * length * text + batch * tokens * image) + attention


def costs(steps: int) -> list[dict[str, float]]:
    """Full steps with ViT-B/32 against the number of classes, the batch and the length of prompts."""
    rows = []
    for k, words, batch in ((31, 5, 8), (31, 5, 32), (345, 5, 8), (345, 20, 8)):
        classifier = Classifier(vit(32), names(k), ["a " * (words - 1) + "{}"])
        length = (
            classifier.backbone.text_side._tokenize(  # type: ignore[union-attr]
                tuple("a " * (words - 1) + name for name in names(k))
            )[-1]
            .tokens["input_ids"]
            .shape[1]
        )
        recipe = Recipe(steps=steps + 1, batch_size=batch, augment="none", snapshots=0)
        times = [step.seconds for step in classifier.adapt(Images(pictures(batch)), recipe=recipe).history]
        seconds = statistics.median(later - earlier for earlier, later in pairwise(times))
        work = flops(k, length, batch) / 1e9
        rows.append({"classes": k, "tokens": length, "batch": batch, "seconds": round(seconds, 3),
                     "gflop": round(work), "gflop_per_second": round(work / seconds)})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def encoding(steps: int) -> dict[str, float]:
    """Pictures per second through `Classifier.encode` against a bare loop over the model, in turns."""
    n = 64
    classifier, images = Classifier(vit(32), names(31)), pictures(n)
    backbone = classifier.backbone

    @torch.no_grad()
    def bare() -> None:
        for start in range(0, n, 32):
            backbone.encode_inputs(backbone.prepare(images[start : start + 32]))

    def ours() -> None:
        classifier.encode(Images(images), InferenceConfig(32))

    pairs = []
    for turn in range(5 * steps + 1):  # who goes first changes: the second finds a warmer machine
        if turn % 2:
            a, b = seconds_of(ours), seconds_of(bare)
        else:
            b, a = seconds_of(bare), seconds_of(ours)
        pairs.append((a, b))
    a, b = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    return {"ours_per_second": round(n / a, 1), "bare_per_second": round(n / b, 1), "ratio": round(b / a, 3)}


MEMORY = {
    "full": {"tuner.name": "full"},
    "full, chunks of 4": {"tuner.name": "full", "compute.chunk": 4},
    "full, checkpointing": {"tuner.name": "full", "compute.checkpointing": True},
    "layernorm": {"tuner.name": "layernorm"},
    "prompt": {"tuner.name": "prompt"},
}


def memory(steps: int) -> dict[str, float]:
    """Peak memory in GB of two steps with 32 pictures and 31 classes, each tuner in a process of its own."""
    found = {}
    for name in MEMORY:
        child = subprocess.run(
            [sys.executable, __file__, "--memory-of", name], capture_output=True, text=True, check=True
        )
        found[name] = json.loads(child.stdout.strip().splitlines()[-1])
        print(name, found[name], flush=True)
    return found


def memory_of(name: str) -> float:
    recipe = Recipe(steps=2, batch_size=32, augment="none", snapshots=0).with_settings(**MEMORY[name])
    Classifier(vit(), names(31)).adapt(Images(pictures(32)), recipe=recipe)
    # Of this process alone: what getrusage tells is passed on from the parent.
    peak = next(line for line in _lines("/proc/self/status") if line.startswith("VmHWM"))
    return round(int(peak.split()[1]) / 2**20, 2)


def help_(steps: int) -> dict[str, float]:
    """From `pouf --help` to the screen."""
    times = [
        seconds_of(lambda: subprocess.run([sys.executable, "-m", "pouf", "--help"], capture_output=True, check=True))
        for _ in range(max(steps, 5))
    ]
    return {"seconds": round(statistics.median(times), 3)}


PARTS: dict[str, Callable[[int], Any]] = {
    "help": help_, "prompt": prompt, "full": full, "costs": costs, "encoding": encoding, "memory": memory,
}  # fmt: skip


def machine() -> dict[str, Any]:
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {"cpu": cpu or platform.processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _lines(file: str) -> list[str]:
    return Path(file).read_text().splitlines() if Path(file).is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the results, JSON; what is in it stays and is added to")
    parser.add_argument("--memory-of", choices=list(MEMORY), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_of:
        print(json.dumps(memory_of(given.memory_of)))
        return
    facts = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {}
    for name in given.only:
        facts[name] = PARTS[name](given.steps)
        print(name, facts[name], flush=True)
        if given.out is not None:
            facts |= {"machine": machine(), "versions": versions()}
            given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
