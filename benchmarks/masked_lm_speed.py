"""One training step of a masked language model, ours against the usual way, in one run.

    python benchmarks/masked_lm_speed.py --out benchmarks/results/masked_lm_speed.json

RoBERTa-base shapes with random weights (no download), sentences of 25 tokens in their template. The usual way pads
them to 128 and computes logits over the whole vocabulary at every position, as the published code does; ours pads to
the longest of the batch and sends only the mask through the head, against the label words alone. Both compute the same
loss on the same sentences, and its gradient, and take an AdamW step. Times are medians of steps taken in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

from pouf import Recipe
from pouf.losses.objective import Objective
from pouf.models.base import Scores
from pouf.models.masked_lm import MaskedLM
from pouf.models.templates import Cloze
from pouf.runs.folder import versions

LENGTH, PADDED, BATCH = 25, 128, 8
MARKS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEMPLATE = Cloze("{text} it was [MASK] .", (("terrible",), ("great",)), max_length=PADDED)
OF_TEMPLATE = 6  # its words, the mask and the two marks around it


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: the words do not matter here, their number does."""
    words = [*MARKS, "it", "was", ".", "terrible", "great", *(f"word{i}" for i in range(1000))]
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bare.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>",
        unk_token="<unk>", pad_token="<pad>", mask_token="<mask>", model_max_length=512,
    )  # fmt: skip


def step_of(backbone: MaskedLM, scores: Callable[[], Scores]) -> Callable[[], float]:
    objective = Objective(Recipe.load("masked").objective, 2)
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=0.0)  # the weights stay, so that the losses can be compared

    def step() -> float:
        loss = objective([scores()]).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1))
    backbone = MaskedLM(model.eval(), tokenizer(), TEMPLATE)
    draw = random.Random(0)
    texts = [" ".join(f"word{draw.randrange(1000)}" for _ in range(LENGTH - OF_TEMPLATE)) for _ in range(BATCH)]

    def ours() -> Scores:
        batch = backbone.prepare(texts)
        assert batch["input_ids"].shape == (BATCH, LENGTH)
        return backbone.scores(backbone.encode_inputs(batch), backbone.prototypes(()))

    def usual() -> Scores:
        batch = backbone.prepare(texts)
        room = PADDED - batch["input_ids"].shape[1]
        ids = F.pad(batch["input_ids"], (0, room), value=model.config.pad_token_id)
        hidden = model.roberta(
            input_ids=ids, attention_mask=F.pad(batch["attention_mask"], (0, room))
        ).last_hidden_state
        rows = torch.arange(BATCH)
        position = batch["mask_position"]
        transformed = backbone.head.transform(hidden)  # (batch, 128, width)
        logits: Tensor = model.lm_head.decoder(transformed)[rows, position][
            :, backbone.label_ids
        ]  # (…, vocabulary) first
        return backbone.scores(transformed[rows, position], backbone.prototypes(()))._replace(logits=logits)

    ways = {"ours": step_of(backbone, ours), "usual": step_of(backbone, usual)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for repetition in range(given.steps + 1):
        for name, step in ways.items():
            start = time.perf_counter()
            losses[name] = step()
            if repetition:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    facts = {
        "ratio": round(medians["usual"] / medians["ours"], 2),
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "loss_difference": abs(losses["ours"] - losses["usual"]),
        "length": LENGTH, "padded": PADDED, "batch": BATCH, "threads": torch.get_num_threads(), "versions": versions(),
    }  # fmt: skip
    print(json.dumps(facts, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
