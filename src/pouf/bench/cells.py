"""One cell of a table: a task, a method and a seed, run and judged."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from pouf import EMBEDDED, METHODS, Adaptation, Callback, Classifier, InferenceConfig, InputError, Recipe, Shots
from pouf.bench.archives import Columns, has_drawn_splits, read_task
from pouf.bench.few_shot import FewShot, PublishedDemonstrations, SimilarityFilter, few_shot
from pouf.bench.images import IMAGE_SETS
from pouf.bench.language import GRID, GRID_METHODS, TASKS, Task
from pouf.bench.metrics import TASK_METRICS
from pouf.data.base import Subset, Unlabelled
from pouf.data.labelled import Labelled

SHOTS = 16


@dataclass(frozen=True)
class Cell:
    table: str
    task: str
    method: str
    seed: int


@dataclass(frozen=True)
class Setting:
    """What all cells of a table share."""

    data: str
    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # to the recipes, by dotted name
    batch_size: int = 256  # of evaluation
    limit: int = 0  # judge on at most this many test texts, the same for all cells; 0 takes all
    unlabelled: Literal["kshot", "train"] = (
        "kshot"  # texts to adapt to: the seed's 16 per class, as the paper's, or all
    )
    text_columns: tuple[str, ...] = ()  # of language tasks, where the files do not have the usual ones
    label_column: str = ""
    grid: Literal["", "paper"] = ""  # of batch sizes and rates, one chosen on D_dev where the paper's figure is so
    demo_filter: str = ""  # a sentence encoder: LM-BFF's demonstrations come from the shots most like the text


class Score(NamedTuple):
    """A metric at the last step, of what `adapt` would use, and at the best step by the labels of the test.

    `chosen` is what the verdict advises: the step chosen without labels, or zero-shot where an alarm speaks against it.

    Language tasks also have D_dev, as many labelled texts as the shots: `dev` is the metric at the step that is best
    there. None where no snapshots were taken to choose from.
    """

    last: float
    chosen: float | None
    oracle: float | None
    dev: float | None = None


class Result(NamedTuple):
    scores: dict[str, Score]  # by column
    facts: dict[str, float]


Judge = Callable[[Classifier], dict[str, float]]  # on labelled data, by column


def run_cell(cell: Cell, setting: Setting) -> Result:
    return CELLS[cell.table](cell, setting)


def _judged(
    classifier: Classifier,
    data: Unlabelled | None,
    recipe: Recipe,
    shots: Shots | None,
    judge: Judge,
    on_dev: Callable[[Classifier], float] | None = None,
) -> tuple[dict[str, Score], Adaptation]:
    """Adapt, and judge at each snapshot. The labels are read by `judge` and `on_dev` alone, and not by the choice."""
    at_step: dict[int, dict[str, float]] = {}
    dev: dict[int, float] = {}  # after training began: zero-shot is none of the paper's ten evaluations

    class Judging(Callback):
        def on_checkpoint(self, step: int, classifier: Classifier) -> None:
            at_step[step] = judge(classifier)
            if on_dev is not None and step > 0 and recipe.snapshots > 1:
                dev[step] = on_dev(classifier)

    result = classifier.adapt(data, recipe=recipe, shots=shots, callbacks=[Judging()])
    if recipe.steps in at_step and recipe.postprocess == "none":
        last = at_step[recipe.steps]  # judged when it was reached
    else:
        last = judge(result.at("last"))
    if recipe.steps and not recipe.snapshots:
        return {c: Score(last[c], None, None) for c in last}, result
    chosen = _advised(result, at_step, last, judge)
    best = at_step[max(dev, key=lambda step: dev[step])] if dev else last
    return {
        c: Score(
            last[c], chosen[c], max(step[c] for step in [*at_step.values(), last]),
            best[c] if on_dev is not None else None,
        )
        for c in last
    }, result  # fmt: skip


def _advised(
    result: Adaptation, at_step: Mapping[int, dict[str, float]], last: dict[str, float], judge: Judge
) -> dict[str, float]:
    """The figures of what `pouf adapt` would use: zero-shot too, where an alarm speaks against the run."""
    advised = result.verdict.advised
    if advised == "last":
        return last
    step = (result.verdict.chosen or 0) if advised == "chosen" else 0
    if step in at_step and result.recipe.postprocess == "none":
        return at_step[step]  # judged when it was reached
    return judge(result.classifier)


def _facts(result: Adaptation) -> dict[str, float]:
    times = [step.seconds for step in result.history]
    a_step = statistics.median([later - earlier for earlier, later in pairwise(times)]) if len(times) > 1 else 0.0
    return {"parameters": result.trainable, "total": result.total, "seconds per step": a_step, "steps": len(times)}


def _settled(recipe: Recipe, setting: Setting, seed: int) -> Recipe:
    """With the seed and what the user changed; what trains nothing is not made to train by that."""
    changes = {name: value for name, value in setting.changes.items() if name != "steps" or recipe.steps}
    return recipe.with_settings(changes, seed=seed)


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
        known = ", ".join(f"{n}:{d}" for n, s in IMAGE_SETS.items() for d in s.domains)
        raise InputError(f"unknown image task {task!r}: choose from {known}")
    given = IMAGE_SETS[name]
    classes, adapted_to = given.read(Path(setting.data), domain, "train")
    judged_on = given.read(Path(setting.data), domain, "test")[1] if given.lists else adapted_to
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
    return _image_run(cell, setting, _settled(recipe, setting, cell.seed))


def _image_run(cell: Cell, setting: Setting, recipe: Recipe) -> Result:
    classes, adapted_to, judged_on = _images(setting, cell.task)
    classifier = Classifier.from_pretrained(setting.model, classes)
    shots = None
    method = METHODS.get(cell.method, METHODS["pouf"])
    if method.needs_shots:
        shots, rest = _labelled_shots(adapted_to, classes, cell.seed, halves=judged_on is adapted_to)
        if judged_on is adapted_to:
            judged_on = Labelled(Subset(judged_on.inputs, rest), [judged_on.labels[i] for i in rest])

    classifier = method.prepare_classifier(classifier, shots, cell.seed)

    def judge(classifier: Classifier) -> dict[str, float]:
        return {cell.task: _accuracy(classifier, *judged_on, setting.batch_size)}

    scores, result = _judged(classifier, None if shots is not None else adapted_to.inputs, recipe, shots, judge)
    return Result(scores, _facts(result))


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
    recipe = _settled(recipe, setting, cell.seed)
    if setting.grid and cell.method in GRID_METHODS:
        return _best_of_grid(cell, setting, recipe)
    return _language_run(cell, setting, recipe)


def _best_of_grid(cell: Cell, setting: Setting, recipe: Recipe) -> Result:
    """Of all batch sizes and rates the run that is best on D_dev, as Gao et al. report theirs."""
    results = []
    for values in product(*GRID.values()):
        result = _language_run(cell, setting, recipe.with_settings(dict(zip(GRID, values, strict=True))))
        results.append(result._replace(facts=result.facts | dict(zip(GRID, values, strict=True))))
    return max(results, key=lambda result: result.facts["dev"])


def _weighed(recipe: Recipe, task: Task) -> Recipe:
    """With the weights of the unsupervised setting: MRPC and QQP have their own."""
    return recipe.with_settings({"objective.transport": task.transport, "objective.information": task.information})


def _language_run(cell: Cell, setting: Setting, recipe: Recipe) -> Result:
    task = TASKS[cell.task]
    method = METHODS.get(cell.method, METHODS["pouf"])
    drawn = has_drawn_splits(task, setting.data)
    if drawn and (cell.method == "majority" or setting.unlabelled == "train"):
        raise InputError(f"{setting.data!r} has the shots of {task.name} alone, the whole training set is needed")
    columns = Columns(setting.text_columns, setting.label_column)
    read = partial(read_task, task, setting.data, seed=cell.seed, columns=columns)
    train, test = read("train"), _some(read("test"), setting.limit)
    split = None
    if drawn:
        split = FewShot(train, read("dev"))
    elif recipe.steps or method.demonstrations:
        held_out = {test.inputs.read(i) for i in range(len(test.inputs))}
        split = few_shot(train, cell.seed, held_out=held_out)
    # The balanced shots can't tell which class is the most frequent one.
    shots = (split.train if split is not None else train) if method.needs_shots else None
    length = task.length(method.demonstrations)
    classifier = Classifier.from_pretrained(
        setting.model, task.labels, [task.template], words=list(task.words.values()), max_length=length
    )
    if method.new_head:
        classifier = classifier.with_new_head(cell.seed, length, regression=task.scale is not None)
    classifier = method.prepare_classifier(
        classifier, shots, cell.seed, task.draws, own_limit=task.own_limit, shot_limit=task.shot_limit
    )
    if classifier.demonstrations is not None:
        after = method.demonstrations == "after"
        similar = SimilarityFilter(setting.demo_filter) if after and setting.demo_filter else None
        classifier.demonstrations = PublishedDemonstrations(**vars(classifier.demonstrations), similar=similar)

    def measure(classifier: Classifier, given: Shots) -> float:
        probabilities = classifier.infer(given.inputs, InferenceConfig(setting.batch_size)).log_probabilities.exp()
        return TASK_METRICS[task.metrics[0]](probabilities, given.targets)

    on_dev: list[float] = []

    def measure_dev(classifier: Classifier) -> float:
        assert split is not None
        on_dev.append(measure(classifier, split.dev))
        return on_dev[-1]

    learns = shots if recipe.steps and recipe.objective.labels > 0 else None
    data = split.train.inputs if split is not None and setting.unlabelled == "kshot" else train.inputs
    has_dev = split is not None and recipe.steps > 0
    scores, result = _judged(
        classifier, None if learns is not None else data, recipe, learns,
        lambda adapted: {cell.task: measure(adapted, test)}, measure_dev if has_dev else None,
    )  # fmt: skip
    if has_dev and setting.grid and not on_dev:  # there were no snapshots to look at
        measure_dev(result.at("last"))
    return Result(scores, _facts(result) | ({"dev": max(on_dev)} if on_dev else {}))


def _some(data: Shots, limit: int) -> Shots:
    """A random part, the same whoever asks."""
    if not limit or len(data.inputs) <= limit:
        return data
    places = random.Random(0).sample(range(len(data.inputs)), limit)
    return Shots(Subset(data.inputs, places), data.targets[places])


ABLATIONS: dict[str, dict[str, Any]] = {
    "exact": {"objective.plan": "exact"},
    "sinkhorn": {"objective.plan": "sinkhorn"},
    "no-transport": {"objective.transport": 0.0},
    "no-information": {"objective.information": 0.0},
    "exponential": {"objective.cost": "exponential"},
    "default": {},
}


def ablation_cell(cell: Cell, setting: Setting) -> Result:
    """Table 3: one part of the objective changed; prompt tuning for images, as the paper's 88.0 is."""
    return _varied(cell, setting, ABLATIONS[cell.method])


def lambda_cell(cell: Cell, setting: Setting) -> Result:
    """The sweep over lambda: the method is its value."""
    return _varied(cell, setting, {"objective.information": float(cell.method)})


def _varied(cell: Cell, setting: Setting, changes: Mapping[str, Any]) -> Result:
    if cell.task in TASKS:
        recipe = _weighed(Recipe.load("masked-paper"), TASKS[cell.task])
    else:
        recipe = Recipe.load(_image_recipe(setting, cell.task, "prompt"))
    recipe = _settled(recipe, setting, cell.seed).with_settings(changes)
    if cell.task in TASKS:
        return _language_run(cell, setting, recipe)
    return _image_run(cell, setting, recipe)


def cost_cell(cell: Cell, setting: Setting) -> Result:
    """Table 4: parameters and the time of a step, without the choice of a step."""
    recipe = Recipe.load(_image_recipe(setting, cell.task, cell.method.removeprefix("pouf-")))
    recipe = _settled(recipe.with_settings(steps=5, snapshots=0), setting, cell.seed)
    images = _images(setting, cell.task)
    classifier = Classifier.from_pretrained(setting.model, images.classes)
    facts = _facts(classifier.adapt(images.adapted_to.inputs, recipe=recipe))
    columns = {name: value for name, value in facts.items() if name != "steps"}
    return Result({column: Score(value, value, value) for column, value in columns.items()}, facts)


def unseen_cell(cell: Cell, setting: Setting) -> Result:
    """Half of the classes have images; judged on both halves among all classes, in the same domain and in another.

    The task is `set:domain`, or `set:domain>other`. Full tuning; the method says which prototypes it may see.
    """
    source, _, other = cell.task.partition(">")
    target = f"{source.split(':')[0]}:{other}" if other else source
    classes, labelled, _ = _images(setting, source)
    judged_on = _images(setting, target).judged_on
    seen = set(random.Random(cell.seed).sample(range(len(classes)), (len(classes) + 1) // 2))
    known = [name for k, name in enumerate(classes) if k in seen or cell.method == "seen+unseen"]
    data = Subset(labelled.inputs, [i for i, label in enumerate(labelled.labels) if label in seen])
    classifier = Classifier.from_pretrained(setting.model, known)
    halves = {
        f"{cell.task} {half}": [i for i, label in enumerate(judged_on.labels) if (label in seen) == (half == "seen")]
        for half in ("seen", "unseen")
    }

    def judge(classifier: Classifier) -> dict[str, float]:
        everything = Classifier(classifier.backbone, classes)
        return {
            column: _accuracy(
                everything, Subset(judged_on.inputs, places), [judged_on.labels[i] for i in places], setting.batch_size
            )
            for column, places in halves.items()
        }

    method = METHODS["zero-shot" if cell.method == "zero-shot" else "pouf"]
    recipe = _settled(method.recipe("image", _image_recipe(setting, source, "full")), setting, cell.seed)
    scores, result = _judged(classifier, data, recipe, None, judge)
    return Result(scores, _facts(result))


CELLS: dict[str, Callable[[Cell, Setting], Result]] = {
    "images": image_cell,
    "language": language_cell,
    "ablation": ablation_cell,
    "cost": cost_cell,
    "unseen": unseen_cell,
    "lambda": lambda_cell,
}
