"""One cell of a table: a task, a method and a seed, run and judged."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pouf import EMBEDDED, METHODS, Adaptation, Callback, Classifier, InferenceConfig, InputError, Recipe, Shots
from pouf.bench.archives import (
    Columns,
    FewShot,
    PublishedDemonstrations,
    SimilarityFilter,
    few_shot,
    has_drawn_splits,
    read_task,
    subset,
)
from pouf.bench.tables import ABLATIONS, Cell, Result, Score, Setting
from pouf.bench.tasks import GRID, GRID_METHODS, IMAGE_SETS, SHOTS, TASK_METRICS, TASKS, Task
from pouf.data.base import Subset, Unlabelled
from pouf.data.labels import Labelled

EVALUATIONS = 10  # along a run, of which the paper takes the best
Judge = Callable[[Classifier], dict[str, float]]  # on labelled data, by column


def _judged(
    classifier: Classifier,
    data: Unlabelled | None,
    recipe: Recipe,
    shots: Shots | None,
    judge: Judge,
    judge_dev: Callable[[Classifier], float] | None = None,
    method: str = "pouf",
) -> tuple[dict[str, Score], Adaptation]:
    """Adapt, and judge at each checkpoint. The labels are read by `judge` and `judge_dev`, and not by the choice."""
    scores_at: dict[int, dict[str, float]] = {}
    dev: dict[int, float] = {}  # after training began: zero-shot is none of the paper's ten evaluations

    class Judging(Callback):
        def on_checkpoint(self, step: int, classifier: Classifier) -> None:
            scores_at[step] = judge(classifier)
            if judge_dev is not None and step > 0 and recipe.snapshots > 1:
                dev[step] = judge_dev(classifier)

    result = classifier.adapt(data, method=method, recipe=recipe, shots=shots, callbacks=[Judging()])
    # A checkpoint is scored as it is reached, without the postprocessor that is fitted at the end.
    final = scores_at if recipe.postprocess == "none" else {}
    last = final.get(recipe.steps) or judge(result.at("last"))
    if recipe.steps and not recipe.snapshots:
        return {column: Score(last[column]) for column in last}, result
    verdict, chosen = result.verdict, last
    if verdict.advised != "last":
        chosen = final.get((verdict.chosen or 0) * (verdict.advised == "chosen")) or judge(result.classifier)
    best = scores_at[max(dev, key=dev.__getitem__)] if dev else last
    scores = {}
    for column in last:
        oracle = max(each[column] for each in [*scores_at.values(), last])
        scores[column] = Score(last[column], chosen[column], oracle, None if judge_dev is None else best[column])
    return scores, result


def _facts(result: Adaptation) -> dict[str, float]:
    times = [step.seconds for step in result.history]
    a_step = statistics.median([later - earlier for earlier, later in pairwise(times)]) if len(times) > 1 else 0.0
    return {"parameters": result.trainable, "total": result.total, "seconds per step": a_step, "steps": len(times)}


def _with_changes(recipe: Recipe, setting: Setting, seed: int) -> Recipe:
    """With the paper's evaluations, the seed and the user's changes; those of steps are for recipes that train."""
    evaluations = {"snapshots": EVALUATIONS} if recipe.snapshots else {}
    changes = {name: value for name, value in setting.changes.items() if name != "steps" or recipe.steps}
    return recipe.with_settings(evaluations | changes, seed=seed)


def _image_recipe(setting: Setting, task: str, tune: str) -> str:
    """The paper's, or the demo's where the model is the one that comes with the package."""
    if setting.model == EMBEDDED:
        return "demo" if tune == "full" else "demo-prompt"
    return f"{IMAGE_SETS[task.split(':')[0]].recipe}-{tune}"


class ImageTask(NamedTuple):
    """The classes of a domain, the images to adapt to and those to be judged on: the same but on DomainNet."""

    classes: list[str]
    adapted_to: Labelled
    judged_on: Labelled


def _images(setting: Setting, task: str) -> ImageTask:
    name, _, domain = task.partition(":")
    if name not in IMAGE_SETS or domain not in IMAGE_SETS[name].domains:
        tasks = ", ".join(f"{n}:{d}" for n, s in IMAGE_SETS.items() for d in s.domains)
        raise InputError(f"unknown image task {task!r}: choose from {tasks}")
    image_set = IMAGE_SETS[name]
    classes, adapted_to = image_set.read(Path(setting.data), domain, "train")
    judged_on = image_set.read(Path(setting.data), domain, "test")[1] if image_set.lists else adapted_to
    return ImageTask(classes, adapted_to, judged_on)


def _accuracy(classifier: Classifier, inputs: Unlabelled, labels: list[int], batch_size: int) -> float:
    predictions = classifier.infer(inputs, InferenceConfig(batch_size))
    truth = torch.tensor([labels[i] for i in predictions.indices])
    return (predictions.log_probabilities.argmax(1) == truth).double().mean().item()


def image_cell(cell: Cell, setting: Setting) -> Result:
    """Table 1, and image rows of others: the target's images without labels, judged on all of them.

    DomainNet has images of its own to be judged on. Elsewhere CoOp learns from 16 labelled images of each class (half
    of them where there are fewer), and is judged on the others.
    """
    tune = "full" if cell.method in ("pouf", "pouf-full", "zero-shot") else "prompt"
    method = "pouf" if cell.method.startswith("pouf-") else cell.method
    recipe = METHODS[method].recipe("image", _image_recipe(setting, cell.task, tune))
    return _image_run(cell, setting, _with_changes(recipe, setting, cell.seed))


def _image_run(cell: Cell, setting: Setting, recipe: Recipe) -> Result:
    classes, adapted_to, judged_on = _images(setting, cell.task)
    classifier = Classifier.from_pretrained(setting.model, classes)
    shots = None
    if uses_labels(cell.method):
        shots, rest = _labelled_shots(adapted_to, classes, cell.seed, halves=judged_on is adapted_to)
        if judged_on is adapted_to:
            judged_on = Labelled(Subset(judged_on.inputs, rest), [judged_on.labels[i] for i in rest])

    def judge(classifier: Classifier) -> dict[str, float]:
        return {cell.task: _accuracy(classifier, *judged_on, setting.batch_size)}

    data = adapted_to.inputs if shots is None else None
    scores, result = _judged(classifier, data, recipe, shots, judge, method=_prepared(cell.method))
    return Result(cell, scores, _facts(result))


def uses_labels(method: str) -> bool:
    return method in METHODS and METHODS[method].needs_shots


def _prepared(method: str) -> str:
    """What `adapt` is to prepare the classifier for. The recipe, made before, is the method; majority has no other."""
    return method if method == "majority" else "pouf"


def _labelled_shots(labelled: Labelled, classes: list[str], seed: int, halves: bool) -> tuple[Shots, list[int]]:
    """Shots of each class, at most half of its images where the others are needed, and the indices of all others."""
    draw = random.Random(seed)
    chosen: list[int] = []
    for k, name in enumerate(classes):
        own = [i for i, label in enumerate(labelled.labels) if label == k]
        needed = 2 if halves else 1
        if len(own) < needed:
            judged = ", and at least one to be judged on" if halves else ""
            raise InputError(
                f"class {name!r} has {len(own)} image{'s' * (len(own) != 1)} in {labelled.inputs.source}, but CoOp "
                f"needs at least one of each class to learn from{judged}: add images, or leave out the method"
            )
        chosen += draw.sample(own, min(SHOTS, len(own) // needed))
    targets = F.one_hot(torch.tensor([labelled.labels[i] for i in chosen]), len(classes)).float()
    rest = sorted(set(range(len(labelled.labels))) - set(chosen))
    return Shots(Subset(labelled.inputs, chosen), targets), rest


def language_cell(cell: Cell, setting: Setting) -> Result:
    """Table 2: 16 texts of each class, without labels or with them; judged on the test texts."""
    if cell.task not in TASKS:
        raise InputError(f"unknown language task {cell.task!r}: choose from {', '.join(TASKS)}")
    recipe = METHODS[cell.method].recipe("cloze", "masked-paper" if cell.method == "pouf" else None)
    task = TASKS[cell.task]
    if cell.method == "pouf":
        recipe = _weighed(recipe, task)
    if cell.method == "fine-tuning" and task.scale is not None:
        recipe = recipe.with_settings({"objective.label_loss": "mse"})
    recipe = _with_changes(recipe, setting, cell.seed)
    if setting.grid and cell.method in GRID_METHODS:
        return _best_of_grid(cell, setting, recipe)
    return _language_run(cell, setting, recipe)


def _best_of_grid(cell: Cell, setting: Setting, recipe: Recipe) -> Result:
    """Of all batch sizes and rates the run that is best on D_dev, as Gao et al. report theirs."""
    results = []
    for values in (dict(zip(GRID, each, strict=True)) for each in product(*GRID.values())):
        result = _language_run(cell, setting, recipe.with_settings(values))
        results.append(result._replace(facts=result.facts | values))
    return max(results, key=lambda result: result.facts["dev"])


def _weighed(recipe: Recipe, task: Task) -> Recipe:
    """With the weights of the unsupervised setting: MRPC and QQP have their own."""
    return recipe.with_settings({"objective.transport": task.transport, "objective.information": task.information})


def _language_run(cell: Cell, setting: Setting, recipe: Recipe) -> Result:
    task, method = TASKS[cell.task], METHODS.get(cell.method, METHODS["pouf"])
    train, test, split = _texts(cell, setting, with_split=recipe.steps > 0 or bool(method.demonstrations))
    # The balanced shots can't tell which class is the most frequent one.
    shots = (train if split is None else split.train) if method.needs_shots else None
    classifier = _language_classifier(cell, setting, shots)

    def measure(classifier: Classifier, data: Shots) -> float:
        probabilities = classifier.infer(data.inputs, InferenceConfig(setting.batch_size)).log_probabilities.exp()
        return TASK_METRICS[task.metrics[0]](probabilities, data.targets)

    on_dev: list[float] = []

    def measure_dev(classifier: Classifier) -> float:
        assert split is not None
        on_dev.append(measure(classifier, split.dev))
        return on_dev[-1]

    learns = cell.method == "majority" or (recipe.steps > 0 and recipe.objective.labels > 0)
    data = train.inputs if split is None or setting.unlabelled == "train" else split.train.inputs
    has_dev = split is not None and recipe.steps > 0
    scores, result = _judged(
        classifier, None if learns else data, recipe, shots if learns else None,
        lambda adapted: {cell.task: measure(adapted, test)}, measure_dev if has_dev else None, _prepared(cell.method),
    )  # fmt: skip
    if has_dev and setting.grid and not on_dev:  # no checkpoint was evaluated
        measure_dev(result.at("last"))
    return Result(cell, scores, _facts(result) | ({"dev": max(on_dev)} if on_dev else {}))


def _texts(cell: Cell, setting: Setting, with_split: bool) -> tuple[Shots, Shots, FewShot | None]:
    """The training set, the test texts, and the shots and D_dev of the seed where they are needed or drawn already."""
    task = TASKS[cell.task]
    drawn = has_drawn_splits(task, setting.data)
    if drawn and (cell.method == "majority" or setting.unlabelled == "train"):
        raise InputError(f"{setting.data!r} has the shots of {task.name} alone, the whole training set is needed")
    columns = Columns(setting.text_columns, setting.label_column)
    read = partial(read_task, task, setting.data, seed=cell.seed, columns=columns)
    train, test = read("train"), read("test")
    if setting.limit and len(test.inputs) > setting.limit:  # the same texts in all cells
        test = subset(test, random.Random(0).sample(range(len(test.inputs)), setting.limit))
    if drawn:
        return train, test, FewShot(train, read("dev"))
    excluded = {test.inputs.read(i) for i in range(len(test.inputs))}
    return train, test, few_shot(train, cell.seed, excluded=excluded) if with_split else None


def _language_classifier(cell: Cell, setting: Setting, shots: Shots | None) -> Classifier:
    """With the template and words of the task, and the head or the demonstrations of the method."""
    task, method = TASKS[cell.task], METHODS.get(cell.method, METHODS["pouf"])
    length = task.length(method.demonstrations)
    classifier = Classifier.from_pretrained(
        setting.model, task.labels, [task.template], words=list(task.words.values()), max_length=length
    )
    if method.new_head:
        classifier = classifier.with_new_head(cell.seed, length, regression=task.scale is not None)
    if method.demonstrations and shots is not None:
        after = method.demonstrations == "after"
        similar = SimilarityFilter(setting.demo_filter) if after and setting.demo_filter else None
        classifier.demonstrations = PublishedDemonstrations.from_shots(
            shots, place=method.demonstrations, samples=task.draws if after else 1, seed=cell.seed, similar=similar,
            own_limit=task.own_limit, shot_limit=task.shot_limit,
        )  # fmt: skip
    return classifier


def varied_cell(cell: Cell, setting: Setting) -> Result:
    """Table 3 and the sweep over lambda: one part of the objective changed.

    Prompt tuning for images, as the paper's 88.0 is. In the sweep the method is the value of lambda.
    """
    is_sweep = cell.table == "lambda"
    changes = {"objective.information": float(cell.method)} if is_sweep else ABLATIONS[cell.method]
    if cell.task in TASKS:
        recipe = _weighed(Recipe.load("masked-paper"), TASKS[cell.task])
    else:
        recipe = Recipe.load(_image_recipe(setting, cell.task, "prompt"))
    run = _language_run if cell.task in TASKS else _image_run
    return run(cell, setting, _with_changes(recipe, setting, cell.seed).with_settings(changes))


def cost_cell(cell: Cell, setting: Setting) -> Result:
    """Table 4: parameters and the time of a step, without the choice of a step."""
    recipe = Recipe.load(_image_recipe(setting, cell.task, cell.method.removeprefix("pouf-")))
    recipe = _with_changes(recipe.with_settings(steps=5, snapshots=0), setting, cell.seed)
    images = _images(setting, cell.task)
    classifier = Classifier.from_pretrained(setting.model, images.classes)
    facts = _facts(classifier.adapt(images.adapted_to.inputs, recipe=recipe))
    columns = {name: value for name, value in facts.items() if name != "steps"}
    return Result(cell, {column: Score(value, value, value) for column, value in columns.items()}, facts)


def unseen_cell(cell: Cell, setting: Setting) -> Result:
    """Half of the classes have images; judged on both halves among all classes, in the same domain and in another.

    The task is `set:domain`, or `set:domain>other`. Full tuning; the method decides which classes have prototypes.
    """
    source, _, other = cell.task.partition(">")
    classes, labelled, test = _images(setting, source)
    if other:
        test = _images(setting, f"{source.split(':')[0]}:{other}").judged_on
    half = set(random.Random(cell.seed).sample(range(len(classes)), (len(classes) + 1) // 2))
    data = Subset(labelled.inputs, [i for i, label in enumerate(labelled.labels) if label in half])
    names = [name for k, name in enumerate(classes) if k in half or cell.method == "seen+unseen"]
    indices = {
        f"{cell.task} {part}": [i for i, label in enumerate(test.labels) if (label in half) == (part == "seen")]
        for part in ("seen", "unseen")
    }

    def judge(classifier: Classifier) -> dict[str, float]:
        among_all = Classifier(classifier.backbone, classes)
        return {
            column: _accuracy(among_all, Subset(test.inputs, part), [test.labels[i] for i in part], setting.batch_size)
            for column, part in indices.items()
        }

    method = METHODS["zero-shot" if cell.method == "zero-shot" else "pouf"]
    recipe = _with_changes(method.recipe("image", _image_recipe(setting, source, "full")), setting, cell.seed)
    scores, result = _judged(Classifier.from_pretrained(setting.model, names), data, recipe, None, judge)
    return Result(cell, scores, _facts(result))


CELLS: dict[str, Callable[[Cell, Setting], Result]] = {
    "images": image_cell,
    "language": language_cell,
    "ablation": varied_cell,
    "cost": cost_cell,
    "unseen": unseen_cell,
    "lambda": varied_cell,
}


def run_cell(cell: Cell, setting: Setting) -> Result:
    return CELLS[cell.table](cell, setting)
