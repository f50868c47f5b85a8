"""Class names against ordinary words, and names that seem not to occur."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pouf import Backbone, Classifier, InferenceConfig, InputError, Texts, Vectors
from pouf.losses.objective import gated_shares
from pouf.validation.names import absent_names, check_names, judge_wording, names_fit, ordinary_words, word_prototypes

K, D = 12, 16
PLACES = 1021  # a prime: few triples share one


class Letters(Backbone):
    """Reads any text: the counts of its letter triples."""

    modality = "text"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("logit_scale", torch.tensor(2.3))
        self.scale = torch.nn.Parameter(torch.ones(PLACES))

    def prepare(self, samples: Sequence[str]) -> dict[str, Tensor]:
        return {"counts": torch.stack([self._counts(text) for text in samples])}

    def encode_inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["counts"] * self.scale

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        return torch.stack([self._counts(text) for text in prompts]).to(self.scale) * self.scale

    def _counts(self, text: str) -> Tensor:
        found = torch.zeros(PLACES)
        for i in range(len(text) - 2):
            found[int.from_bytes(text[i : i + 3].lower().encode(), "big") % PLACES] += 1
        return found


TEXTS = [f"{place} a {animal}" for animal in ("elephant", "crocodile") for place in ordinary_words()[:30]]


def statistics(x: Tensor, prototypes: Tensor) -> tuple[float, float]:
    """One input after the other, and the projection by the normal equations."""
    near = sum(max(float(f @ w) for w in prototypes) for f in x) / len(x)
    basis = (prototypes - prototypes.mean(0))[:-1]  # centred: the last is a sum of the others
    inside = total = 0.0
    for f in x - x.mean(0):
        shadow = basis.T @ torch.linalg.solve(basis @ basis.T, basis @ f)
        inside, total = inside + float(shadow @ shadow), total + float(f @ f)
    return near, inside / total


def test_the_ranks_are_those_of_a_plain_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    x, words = (F.normalize(torch.randn(n, 24, generator=draw), dim=1) for n in (40, 120))
    named = F.normalize(x[:5] + 0.2 * torch.randn(5, 24, generator=draw), dim=1)
    found = names_fit(x, named, words, list("abcde"), seed=3)
    again = torch.Generator().manual_seed(3)
    null = [statistics(x, words[torch.randperm(120, generator=again)[:5]]) for _ in range(300)]
    ours = statistics(x, named)
    for rank, i in ((found.nearness, 0), (found.span, 1)):
        assert rank == pytest.approx(sum(each[i] < ours[i] for each in null) / 300, abs=0.004)


def test_names_of_what_is_there_fit_and_others_do_not() -> None:
    features = Classifier(Letters(), ["elephant", "crocodile"]).encode(Texts(TEXTS)).features
    fits = check_names(Classifier(Letters(), ["elephant", "crocodile"]), features)
    wrong = check_names(Classifier(Letters(), ["qzqz", "xjxjx"]), features)
    mixed = check_names(Classifier(Letters(), ["elephant", "qzqz", "crocodile"]), features)
    assert fits is not None and min(fits[:2]) > 0.9
    assert wrong is not None and wrong.nearness < 0.05 and wrong.span < 0.5
    assert mixed is not None and mixed.worst[0] == "qzqz"
    assert check_names(Classifier(Letters(), ["elephant", "crocodile"]), features[:20]) is None, "too few to tell"


def test_a_run_with_unfitting_names_raises_an_alarm_that_names_them() -> None:
    told = {}
    for names in (("elephant", "crocodile"), ("qzqz", "xjxjx")):
        verdict = Classifier(Letters(), names).adapt(Texts(TEXTS), method="prior-correction").verdict
        told[names] = {alarm.name: alarm.message for alarm in verdict.alarms}
    fitting, wrong = told.values()
    assert "unfitting names" not in fitting
    assert "qzqz" in wrong["unfitting names"] and "xjxjx" in wrong["unfitting names"]


def test_wordings_are_compared_without_labels() -> None:
    told = {
        names: judge_wording(Classifier(Letters(), names), Texts(TEXTS), InferenceConfig())
        for names in (("elephant", "crocodile"), ("qzqz", "xjxjx"))
    }
    fitting, wrong = told.values()
    assert fitting.agreement > 0.9 > 0.5 > wrong.agreement
    assert fitting.confused == [("elephant", "crocodile")] and 0.5 <= wrong.confidence <= 1
    three = judge_wording(
        Classifier(Letters(), ["elephant", "elephants", "crocodile"]), Texts(TEXTS), InferenceConfig()
    )
    assert three.confused[0] == ("elephant", "elephants")
    with pytest.raises(InputError, match="at least 30"):
        judge_wording(Classifier(Letters(), ["elephant", "crocodile"]), Texts(TEXTS[:20]), InferenceConfig())


class Closed(Letters):
    """Knows its classes and no other word."""

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        return torch.eye(2, PLACES)[[["elephant", "crocodile"].index(prompt) for prompt in prompts]]


def test_models_that_read_no_ordinary_word_are_not_asked() -> None:
    assert word_prototypes(Classifier.from_vectors(torch.eye(3), ["a", "b", "c"])) is None
    assert word_prototypes(Classifier(Closed(), ["elephant", "crocodile"])) is None


def sparse_world(present: int, temperature: float = 0.1) -> tuple[Classifier, Vectors]:
    draw = torch.Generator().manual_seed(1)
    centres = F.normalize(torch.randn(K, D, generator=draw), dim=1)
    labels = torch.arange(120) % present
    features = F.normalize(centres[labels] + 0.15 * torch.randn(120, D, generator=draw), dim=1)
    return Classifier.from_vectors(centres, [f"class {i}" for i in range(K)], temperature), Vectors(features)


@pytest.mark.parametrize("present", [1, 3, K])
def test_names_that_do_not_occur_are_found(present: int) -> None:
    classifier, data = sparse_world(present)
    encoded = classifier.encode(data)
    assert absent_names(classifier, encoded) == [f"class {i}" for i in range(present, K)]
    assert absent_names(classifier, classifier.encode(Vectors(data.array[:10]))) == [], "of ten inputs nothing is said"


def test_of_names_nothing_is_said_where_predictions_tell_little() -> None:
    """Everything looks like one class to this model, and the others can't be told from missing ones."""
    classifier, data = sparse_world(K, temperature=0.2)
    pulled = Vectors(data.array + 3 * classifier.fixed_prototypes()[0].numpy())
    encoded = classifier.encode(pulled)
    assert (gated_shares(classifier.scores(encoded).logits.softmax(1)) * len(pulled) < 1).sum() == K - 1
    assert absent_names(classifier, encoded) == []


def test_a_run_tells_which_names_do_not_occur(tmp_path: Path) -> None:
    classifier, data = sparse_world(3)
    result = classifier.adapt(data, output=tmp_path / "run")
    missing = [f"class {i}" for i in range(3, K)]
    assert result.absent == missing == json.loads((tmp_path / "run" / "details/run.json").read_text())["absent"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "9 of 12 class names seem not to occur" in page and "class 11" in page.split('id="absent"')[1][:400]
