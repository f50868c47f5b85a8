"""K-shot splits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pouf import InputError, Texts
from pouf.bench.archives import few_shot
from pouf.bench.tasks import SEEDS, SHOTS
from pouf.data.labels import Shots


def items(shots: Shots) -> list[str]:
    return [shots.inputs.read(i) for i in range(len(shots.inputs))]


def data(n: int = 200, k: int = 3) -> Shots:
    labels = [i % k for i in range(n)]
    return Shots(Texts([f"text {i}" for i in range(n)]), F.one_hot(torch.tensor(labels), k).float())


@pytest.mark.parametrize("seed", SEEDS)
def test_16_of_each_class_for_training_and_16_others_for_development(seed: int) -> None:
    train, dev = few_shot(data(), seed)
    for part in (train, dev):
        assert part.targets.sum(0).tolist() == [SHOTS] * 3
        assert [int(text.split()[1]) % 3 for text in items(part)] == part.targets.argmax(1).tolist()
    assert not set(items(train)) & set(items(dev))


def test_the_same_seed_gives_the_same_split_and_another_seed_another() -> None:
    first, again, other = few_shot(data(), 42), few_shot(data(), 42), few_shot(data(), 21)
    assert items(first.train) == items(again.train)
    assert items(first.train) != items(other.train)


def test_the_draw_is_lm_bffs() -> None:
    """Shuffle all lines by the seed, then take the first of each class."""
    lines = list(range(200))
    np.random.seed(13)
    np.random.shuffle(lines)
    expected = [f"text {i}" for k in range(3) for i in [line for line in lines if line % 3 == k][:SHOTS]]
    assert items(few_shot(data(), 13).train) == expected


def test_texts_of_the_test_set_and_doubles_are_left_out() -> None:
    texts = [f"text {i // 2 * 2}" for i in range(400)]  # every text twice
    doubled = Shots(Texts(texts), F.one_hot(torch.tensor([i // 2 % 2 for i in range(400)]), 2).float())
    test_texts = {f"text {i}" for i in range(100)}
    train, dev = few_shot(doubled, 42, excluded=test_texts)
    both = [*items(train), *items(dev)]
    assert len(both) == len(set(both)) == 64 and not set(both) & test_texts


def test_a_class_with_too_few_examples_is_named() -> None:
    with pytest.raises(InputError, match=r"class number 2 has 30 different examples .* 32 are needed"):
        few_shot(data(92), 42)
