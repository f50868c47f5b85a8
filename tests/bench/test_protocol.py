"""The paper's protocol, where it is easy to miss: which texts, step, lengths, images and weights."""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import sentence_encoder
from spy import Spy

from pouf import EMBEDDED, Classifier, InputError, Recipe, Texts
from pouf.bench import cells
from pouf.bench.archives import SimilarityFilter, few_shot, read_task
from pouf.bench.cells import run_cell
from pouf.bench.standins import LM
from pouf.bench.tables import Cell, Result, Setting
from pouf.bench.tasks import GRID, IMAGE_SETS, TASKS
from pouf.models.load import embedded_folder

QUICK = {"steps": 2, "snapshots": 2, "batch_size": 8}
REAL = Path(os.environ.get("POUF_DATA", Path(__file__).parents[3] / "shared" / "data")) / "text"


def language(standins: Path, task: str, method: str, table: str = "language", **more: Any) -> Result:
    setting = Setting(str(standins), str(standins / LM), QUICK, **{"limit": 12, **more})
    return run_cell(Cell(table, task, method, 42), setting)


@pytest.mark.skipif(not REAL.is_dir(), reason="the data are not beside the repository, nor where POUF_DATA says")
@pytest.mark.parametrize(
    ("task", "figure"), [("SST-2", 50.9), ("TREC", 18.8), ("MRPC", 81.2), ("RTE", 52.7), ("SST-5", 23.1)]
)
def test_majority_reaches_the_papers_figure_on_real_data(standins: Path, task: str, figure: float) -> None:
    result = run_cell(Cell("language", task, "majority", 42), Setting(str(REAL), str(standins / LM)))
    assert round(100 * result.scores[task].last, 1) == figure


def test_majority_is_that_of_the_whole_training_set(standins: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(standins / TASKS["MR"].layout.folder, tmp_path / TASKS["MR"].layout.folder)
    for file in folder.glob("*.csv"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for i, line in enumerate(lines) if line.startswith("1") or i % 2))
    share = read_task(TASKS["MR"], tmp_path, "test").targets[:, 1].mean().item()
    setting = Setting(str(tmp_path), str(standins / LM))
    score = run_cell(Cell("language", "MR", "majority", 42), setting).scores["MR"].last
    assert share > 0.5 and score == pytest.approx(share), "the second class, which has more"


@pytest.mark.parametrize("method", ["majority", "fine-tuning", "lm-bff"])
def test_a_row_of_the_table_starts_from_the_model_as_it_is(
    standins: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    language(standins, "MR", method, limit=2)
    assert "adapted before" not in caplog.text


def test_kshot_texts_are_those_of_the_seed_without_their_labels(standins: Path, spy: Spy) -> None:
    spy.asked(lambda: language(standins, "MR", "pouf", limit=0))
    test = read_task(TASKS["MR"], standins, "test").inputs
    train = read_task(TASKS["MR"], standins, "train")
    expected = few_shot(train, 42, excluded={test.read(i) for i in range(len(test))}).train.inputs
    assert [spy.data.read(i) for i in range(len(spy.data))] == [expected.read(i) for i in range(32)]
    assert spy.shots is None
    spy.asked(lambda: language(standins, "MR", "pouf", limit=12, unlabelled="train"))
    assert len(spy.data) == len(train.inputs) > 32, "the limit is of the texts that are judged"


def drawn_splits(folder: Path, flipped: str = "") -> None:
    """As LM-BFF hands them out; the labels of one split can be the wrong ones."""
    (folder / "mr/16-42").mkdir(parents=True)
    for split, n in (("train", 16), ("dev", 16), ("test", 20)):
        lines = [f"{(i + (split == flipped)) % 2},the film in place {split} {i} was good .\n" for i in range(2 * n)]
        (folder / f"mr/16-42/{split}.csv").write_text("".join(lines))


def test_splits_that_are_drawn_already_are_taken_whole(standins: Path, tmp_path: Path, spy: Spy) -> None:
    drawn_splits(tmp_path)
    setting = Setting(str(tmp_path), str(standins / LM), QUICK)
    run_cell(Cell("language", "MR", "pouf", 42), setting)
    assert [spy.data.read(i).split()[4] for i in range(len(spy.data))] == ["train"] * 32
    assert {data.read(0).split()[4]: len(data) for data in spy.judged} == {"dev": 32, "test": 40}
    for method, unlabelled in (("majority", "kshot"), ("pouf", "train")):
        with pytest.raises(InputError, match="has the shots of MR alone, the whole training set is needed"):
            run_cell(Cell("language", "MR", method, 42), Setting(str(tmp_path), str(standins / LM), QUICK,
                                                                 unlabelled=unlabelled))  # fmt: skip


class Adapted:
    """A run of two steps whose verdict is known: what a cell makes of it."""

    def __init__(self, advised: str, chosen: int) -> None:
        self.verdict, self.classifier = SimpleNamespace(advised=advised, chosen=chosen), None

    def adapt(self, data: Any, *, method: str, recipe: Recipe, shots: Any, callbacks: Any) -> Any:
        for step in (0, 1, 2):
            callbacks[0].on_checkpoint(step, None)
        self.recipe = recipe
        return self


def test_the_step_is_chosen_on_dev_and_judged_on_the_test() -> None:
    # Zero-shot is judged on the test alone, and the last step once.
    test, dev = iter([0.1, 0.2, 0.3]), iter([0.9, 0.5])
    recipe = Recipe(steps=2, snapshots=2, postprocess="none")
    scores, _ = cells._judged(
        Adapted("last", 2), None, recipe, None, lambda adapted: {"MR": next(test)}, lambda adapted: next(dev)
    )
    assert scores["MR"] == (0.3, 0.3, 0.3, 0.2), "last, chosen, oracle, and the first step, best on dev"


@pytest.mark.parametrize(
    ("task", "table", "method"),
    [("SST-2", "language", "pouf"), ("MR", "language", "lm-bff"), ("office31:dslr", "images", "pouf-prompt"),
     ("office31:dslr", "unseen", "seen"), ("office31:dslr", "ablation", "default")],
)  # fmt: skip
def test_a_run_is_evaluated_ten_times_as_the_papers(
    standins: Path, spy: Spy, task: str, table: str, method: str
) -> None:
    setting = Setting(str(standins), EMBEDDED if ":" in task else str(standins / LM), limit=2)
    assert spy.asked(lambda: run_cell(Cell(table, task, method, 0), setting)).recipe.snapshots == 10


@pytest.mark.parametrize(("advised", "expected"), [("last", 0.3), ("chosen", 0.2), ("zero-shot", 0.1)])
def test_chosen_without_labels_is_what_adapt_would_use(advised: str, expected: float) -> None:
    test = iter([0.1, 0.2, 0.3])
    recipe = Recipe(steps=2, snapshots=2, postprocess="none")
    scores, _ = cells._judged(Adapted(advised, 1), None, recipe, None, lambda adapted: {"MR": next(test)})
    assert scores["MR"].chosen == expected


def test_a_run_that_an_alarm_speaks_against_counts_as_zero_shot(standins: Path) -> None:
    collapsing = {"steps": 20, "snapshots": 4, "batch_size": 32, "optimisation.lr": 0.03, "objective.transport": 0.0,
                  "objective.information": 0.0, "objective.entropy": 1.0}  # fmt: skip
    scores = [
        run_cell(Cell("images", "office31:dslr", method, 0), Setting(str(standins), EMBEDDED, changes)).scores
        for method, changes in (("zero-shot", {}), ("pouf-full", collapsing))
    ]
    zero_shot, collapsed = (score["office31:dslr"] for score in scores)
    assert collapsed.last < zero_shot.last - 0.1
    assert collapsed.chosen == zero_shot.last


@pytest.mark.parametrize("task", ["SST-2", "QQP"])
def test_predictions_are_means_over_the_draws_of_the_task(standins: Path, spy: Spy, task: str) -> None:
    spy.asked(lambda: language(standins, task, "lm-bff", limit=2))
    assert spy.classifier.demonstrations.samples == {"SST-2": 16, "QQP": 4}[task]


def test_no_image_of_an_unseen_class_is_adapted_to(standins: Path, spy: Spy) -> None:
    for method in ("seen", "seen+unseen"):
        cell = Cell("unseen", "office31:dslr", method, 0)
        spy.asked(lambda cell=cell: run_cell(cell, Setting(str(standins), EMBEDDED, QUICK)))
        folders = {name.split("/")[0] for name in spy.data.ids}
        names = set((standins / "office31" / "classes.txt").read_text().split())
        assert len(folders) == len(names) // 2 and folders < names
        assert (set(spy.classifier.classes) == folders) == (method == "seen"), "its prototypes are those it may see"


def test_without_snapshots_the_last_step_stands_alone(standins: Path) -> None:
    setting = Setting(str(standins), str(standins / LM), QUICK | {"snapshots": 0}, limit=12)
    score = run_cell(Cell("language", "MR", "lm-bff", 42), setting).scores["MR"]
    assert score.last is not None and score[1:] == (None, None, None)


def test_dev_is_judged_in_a_real_cell(standins: Path) -> None:
    assert language(standins, "MR", "pouf").scores["MR"].dev is not None
    assert language(standins, "MR", "zero-shot").scores["MR"].dev is None, "there is no step to choose"
    images = run_cell(Cell("images", "office31:dslr", "tent", 0), Setting(str(standins), EMBEDDED, QUICK))
    assert images.scores["office31:dslr"].dev is None


@pytest.mark.parametrize(
    ("task", "method", "length", "limits"),
    [
        ("SST-5", "lm-bff", 256, (110, 20)),
        ("MR", "lm-bff-pouf", 256, (110, 50)),
        ("TREC", "lm-bff", 256, (110, None)),
        ("SST-2", "lm-bff", 128, (None, None)),
        ("RTE", "lm-bff", 256, (None, None)),
        ("SST-5", "in-context", 512, (110, 20)),
        ("SST-2", "in-context", 512, (None, None)),
        ("SST-5", "pouf", 128, None),
    ],
)
def test_lengths_and_limits_are_lm_bffs(
    standins: Path, spy: Spy, task: str, method: str, length: int, limits: tuple | None
) -> None:
    spy.asked(lambda: language(standins, task, method, limit=2))
    demonstrations = spy.classifier.demonstrations
    assert spy.classifier.backbone.texts.max_length == length
    assert (None if demonstrations is None else (demonstrations.own_limit, demonstrations.shot_limit)) == limits


@pytest.mark.parametrize(
    ("table", "method"),
    [("language", m) for m in ("pouf", "fine-tuning", "lm-bff", "lm-bff-pouf")]
    + [("ablation", "no-information"), ("lambda", "0.9")],
)
def test_dropout_is_on_wherever_a_language_row_is_trained(standins: Path, spy: Spy, table: str, method: str) -> None:
    spy.asked(lambda: language(standins, "SST-2", method, table, limit=2))
    assert spy.recipe.optimisation.dropout
    assert not Recipe.default("cloze").optimisation.dropout, "the package's own default"


@pytest.mark.parametrize("method", ["fine-tuning", "lm-bff", "lm-bff-pouf", "pouf"])
def test_the_grid_begins_with_its_own_batch_size_and_rate(standins: Path, spy: Spy, method: str) -> None:
    recipe = spy.asked(lambda: language(standins, "MR", method, limit=4, grid="paper")).recipe
    # The paper's own rows have one setting.
    expected = (8, 1e-5) if "pouf" in method else tuple(values[0] for values in GRID.values())
    assert (recipe.batch_size, recipe.optimisation.lr) == expected


@pytest.mark.parametrize("snapshots", [0, 2])
def test_the_grid_takes_the_batch_size_and_rate_that_are_best_on_dev(standins: Path, spy: Spy, snapshots: int) -> None:
    tried: list[tuple[int, float]] = []
    spy.before = lambda: tried.append((spy.recipe.batch_size, spy.recipe.optimisation.lr))
    changes = {"steps": 2, "snapshots": snapshots}
    setting = Setting(str(standins), str(standins / LM), changes, limit=4, grid="paper")
    facts = run_cell(Cell("language", "MR", "fine-tuning", 42), setting).facts
    assert tried == [(size, rate) for size in (2, 4, 8) for rate in (1e-5, 2e-5, 5e-5)]
    assert 0 <= facts["dev"] <= 1 and (facts["batch_size"], facts["optimisation.lr"]) in tried
    if snapshots:
        alone: dict[tuple[int, float], float] = {}
        for size, rate in tried[:9]:
            own = {**changes, "batch_size": size, "optimisation.lr": rate}
            single = replace(setting, changes=own, grid="")
            alone[size, rate] = run_cell(Cell("language", "MR", "fine-tuning", 42), single).facts["dev"]
        assert max(alone, key=lambda values: alone[values]) == (facts["batch_size"], facts["optimisation.lr"])
        assert facts["dev"] == max(alone.values())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.mark.parametrize("method", ["lm-bff", "lm-bff-pouf", "in-context"])
def test_filtered_demonstrations_are_drawn_from_the_half_of_each_class_that_is_most_similar(
    standins: Path, encoder: Path, spy: Spy, method: str
) -> None:
    spy.asked(lambda: language(standins, "MR", method, limit=2, demo_filter=str(encoder)))
    demonstrations = spy.classifier.demonstrations
    text = demonstrations.shots[0][0]
    drawn = [demonstrations.show(text, random.Random(seed)) for seed in range(80)]
    found = {shot for example in drawn for shot in (*example.before, *example.after)}
    similar = set(SimilarityFilter(str(encoder))(text, demonstrations.shots))
    assert len(demonstrations.shots) == 32 and len(similar) == 14
    assert found == (set(demonstrations.shots[1:]) if method == "in-context" else similar)
    assert all(example.cut_solved for example in drawn)


@pytest.mark.parametrize("pairs", [False, True])
def test_the_filter_takes_the_half_of_a_class_that_is_most_similar(encoder: Path, pairs: bool) -> None:
    texts = ["cat", "great film", "good sea", "the it", "dog . how", "bad cat", "air about", "a book", "who", "many"]
    samples = [(text, "of the air") for text in texts] if pairs else texts
    shots = tuple((sample, i % 2) for i, sample in enumerate(samples))
    classifier = Classifier.from_pretrained(encoder, ["a", "b"])
    features = classifier.encode(Texts([" ".join(s) for s in samples] if pairs else texts)).features
    similarity = torch.nn.functional.cosine_similarity(features[:1], features)
    order = similarity.argsort(descending=True).tolist()
    expected = [[i for i in order if i % 2 == k and i][:2] for k in (0, 1)]
    assert SimilarityFilter(str(encoder))(samples[0], shots) == tuple(shots[i] for group in expected for i in group)


def test_a_filter_is_a_sentence_encoder() -> None:
    with pytest.raises(InputError, match="is no sentence encoder"):
        SimilarityFilter(EMBEDDED)


def test_fine_tuning_on_scores_has_one_output_and_squared_error(standins: Path, spy: Spy) -> None:
    spy.asked(lambda: language(standins, "STS-B", "fine-tuning", limit=4))
    assert spy.classifier.backbone.model.config.num_labels == 1 and spy.recipe.objective.label_loss == "mse"
    spy.asked(lambda: language(standins, "SST-2", "fine-tuning", limit=4))
    assert spy.classifier.backbone.model.config.num_labels == 2


@pytest.mark.parametrize("task", ["MRPC", "QQP", "RTE"])
def test_ablation_and_lambda_use_the_weights_of_the_task(standins: Path, spy: Spy, task: str) -> None:
    transport, information = (1.0, 0.6) if task == "RTE" else (1e-2, 1e-4)
    for table, method, expected in (
        ("language", "pouf", (transport, information)),
        ("ablation", "default", (transport, information)),
        ("ablation", "no-transport", (0.0, information)),
        ("lambda", "0.9", (transport, 0.9)),
    ):
        spy.asked(lambda method=method, table=table: language(standins, task, method, table, limit=2))
        assert (spy.recipe.objective.transport, spy.recipe.objective.information) == expected, (table, method)


@pytest.mark.parametrize("method", ["pouf-prompt", "coop"])
def test_domainnet_adapts_to_one_list_and_is_judged_on_the_other(standins: Path, spy: Spy, method: str) -> None:
    run_cell(Cell("images", "domainnet:sketch", method, 0), Setting(str(standins), EMBEDDED, QUICK))
    lists = {
        split: {
            line.rsplit(" ", 1)[0].removeprefix("sketch/")
            for line in (standins / "domainnet" / f"sketch_{split}.txt").read_text().splitlines()
        }
        for split in ("train", "test")
    }
    learned = set((spy.data if spy.shots is None else spy.shots.inputs).ids)
    assert (
        {name for data in spy.judged for name in data.ids} == lists["test"]
        and learned <= lists["train"]
        and not learned & lists["test"]
    )
    assert spy.shots is not None or learned == lists["train"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded one in another place, so that the recipes are the paper's."""
    return str(shutil.copytree(embedded_folder(), tmp_path_factory.mktemp("model") / "clip"))


def test_tent_upl_and_prompt_tuning_share_their_settings_in_the_table(standins: Path, model: str, spy: Spy) -> None:
    recipes: list[Recipe] = []
    for method in ("pouf-prompt", "tent", "upl"):
        cell = Cell("images", "office-home:art", method, 0)
        recipes.append(spy.asked(lambda cell=cell: run_cell(cell, Setting(str(standins), model))).recipe)
    for recipe in recipes:
        assert recipe.optimisation == Recipe.load("office-home-prompt").optimisation
        assert (recipe.steps, recipe.batch_size, recipe.augment) == (5000, 96, "crop-flip")
        assert recipe.tuner == recipes[0].tuner


@pytest.mark.parametrize("method", ["pouf-prompt", "tent", "upl", "coop"])
def test_beside_the_papers_prompts_on_office31_the_temperature_has_its_own_rate(
    standins: Path, model: str, spy: Spy, method: str
) -> None:
    cell = Cell("images", "office31:dslr", method, 0)
    recipe = spy.asked(lambda: run_cell(cell, Setting(str(standins), model))).recipe
    assert (recipe.optimisation.lr, recipe.optimisation.temperature_lr) == (1e-3, 5e-7)


@pytest.mark.parametrize(("task", "images", "fine"), [("office31:dslr", 1, False), ("office31:dslr", 2, True),
                                                      ("domainnet:sketch", 1, True)])  # fmt: skip
def test_coop_says_which_class_has_too_few_images(
    standins: Path, tmp_path: Path, spy: Spy, task: str, images: int, fine: bool
) -> None:
    name, domain = task.split(":")
    folder = shutil.copytree(standins / IMAGE_SETS[name].folder, tmp_path / IMAGE_SETS[name].folder)
    first = (folder / "classes.txt").read_text().split()[0]
    for file in sorted((folder / IMAGE_SETS[name].domains[domain]).rglob(f"{first}/*.jpg"))[images:]:
        file.unlink()
    for listed in folder.glob(f"{domain}_*.txt"):
        lines = listed.read_text().splitlines(keepends=True)
        own = [line for line in lines if line.split("/")[1] == first]
        listed.write_text("".join(line for line in lines if line not in own[images:]))
    cell, setting = Cell("images", task, "coop", 0), Setting(str(tmp_path), EMBEDDED, QUICK)
    if fine:
        assert spy.asked(lambda: run_cell(cell, setting)).shots is not None
    else:
        with pytest.raises(InputError, match=r"class '\w+' has 1 image in .* one of each class to learn from, and"):
            run_cell(cell, setting)


def test_labels_of_dev_change_nothing_that_is_learned(standins: Path, tmp_path: Path, spy: Spy) -> None:
    def learned(flipped: str) -> tuple[tuple[float, ...], torch.Tensor]:
        drawn_splits(tmp_path / f"flipped {flipped}", flipped)
        setting = Setting(str(tmp_path / f"flipped {flipped}"), str(standins / LM), QUICK)
        score = run_cell(Cell("language", "MR", "pouf", 42), setting).scores["MR"]
        return (score.last, score.chosen), spy.classifier.backbone.prototypes(()).detach()

    (plain, weights), (flipped, same) = learned(""), learned("dev")
    assert plain == flipped and torch.equal(weights, same)
