"""Texts of a batch are encoded in groups of similar length: the same step, with less padding."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from helpers import encoded_samples, train, weights
from hypothesis import given
from hypothesis import strategies as st
from small_models import masked_lm, sentence_encoder

from pouf import Classifier, Recipe, Texts
from pouf.training import two_pass
from pouf.training.model import Chunk
from pouf.training.two_pass import length_groups, split_by_length

TEXTS = ["we loved it", "food " * 20, "bad", "a good film " * 6, "the sea", "it was okay " * 6, "air", "who loved it?"]


def cost(groups: list[list[int]], sizes: list[int], group_cost: float) -> float:
    return sum(len(group) * max(sizes[i] for i in group) + group_cost for group in groups)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.sampled_from([0.5, 3.0, 20.0, 1000.0]))
def test_no_other_groups_cost_less(sizes: list[int], group_cost: float) -> None:
    groups = length_groups(sizes, group_cost)
    assert sorted(row for group in groups for row in group) == list(range(len(sizes)))
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    cuts = [cut for n in range(len(sizes)) for cut in combinations(range(1, len(sizes)), n)]
    every = [[order[a:b] for a, b in zip((0, *cut), (*cut, len(order)), strict=True)] for cut in cuts]
    assert cost(groups, sizes, group_cost) == min(cost(other, sizes, group_cost) for other in every)


def test_texts_of_one_length_are_one_group() -> None:
    assert length_groups([7] * 50, 1.0) == [list(range(50))]


def test_padding_is_cut_and_no_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]])
    content = {"input_ids": torch.arange(18).view(3, 6), "attention_mask": mask, "mask_position": torch.arange(3)}
    two_pass.GROUP_COST, before = {"cpu": 0.5}, two_pass.GROUP_COST
    try:
        parts, rows = split_by_length(Chunk(content, 0, 3), torch.device("cpu"))
    finally:
        two_pass.GROUP_COST = before
    assert rows == [2, 0, 1] and [part.rows for part in parts] == [1, 1, 1]
    assert [part.content["input_ids"].shape[1] for part in parts] == [1, 2, 6]
    assert torch.equal(torch.cat([part.content["mask_position"] for part in parts]), torch.tensor([2, 0, 1]))


@pytest.mark.parametrize("kind", ["sentence encoder", "masked LM"])
@pytest.mark.parametrize("chunk", [0, 5])
def test_groups_take_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int) -> None:
    def trained(folder: Path) -> tuple[dict[str, torch.Tensor], float, int]:
        if kind == "masked LM":
            classifier = Classifier.from_pretrained(
                masked_lm(folder, "roberta"), ["bad", "good"], ["{text} it was [MASK]."]
            )
        else:
            classifier = Classifier.from_pretrained(sentence_encoder(folder), ["good", "bad"], ["it is {}"])
        recipe = Recipe(steps=3, batch_size=8, augment="none", temperature=0.1, snapshots=0).with_settings(
            {"optimisation.lr": 1e-2, "optimisation.weight_decay": 0.0, "compute.chunk": chunk}
        )
        calls = encoded_samples(classifier)
        result = train(classifier, Texts(TEXTS), recipe)
        return weights(classifier), result.history[-1].loss, len(calls)

    whole, loss, calls = trained(tmp_path / "whole")  # short texts are one group
    monkeypatch.setattr(two_pass, "GROUP_COST", {"cpu": 1})  # as if a group cost next to nothing
    grouped, other_loss, more_calls = trained(tmp_path / "grouped")
    assert chunk or more_calls > calls
    assert other_loss == pytest.approx(loss, abs=1e-5)
    assert all(torch.allclose(whole[name], grouped[name], atol=1e-5) for name in whole)
