"""Adaptations that one process and several must agree on. Run under torchrun, it writes the weights of each.

torchrun --nproc-per-node 2 tests/parallel/distributed_cases.py FOLDER OUT --engines ddp fsdp --cases chunks
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import REVIEWS as TEXTS
from helpers import Steps, adapt, groups, train, weights
from PIL import Image
from safetensors.torch import save_file

from pouf import (
    EMBEDDED,
    Callback,
    Classifier,
    Diverged,
    Images,
    InputError,
    Output,
    Recipe,
    Step,
    Stream,
    Texts,
    Vectors,
)
from pouf.data.base import Unlabelled
from pouf.data.labels import Labelled, Shots
from pouf.demo import DIGITS
from pouf.inference.encode import InferenceConfig
from pouf.models.demonstrations import Demonstrations
from pouf.parallel.fsdp import full_tensor, local, shard_classifier
from pouf.parallel.process_group import ProcessGroup, end_processes, init_processes, together
from pouf.runs.predict import predict_share
from pouf.training import adaptation, trainer
from pouf.training.model import Engine, StepModel
from pouf.validation.checkpoints import Checkpoints
from pouf.validation.evaluation import compare

EVERYWHERE: dict[str, object] = {}  # settings of all cases


def recipe(tune: str, **settings: object) -> Recipe:
    return Recipe(steps=3, batch_size=7, augment="none", temperature=0.1, snapshots=1).with_settings(
        **{"tuner.name": tune, "optimisation.lr": 1e-2, "optimisation.clip": 1.0, **EVERYWHERE, **settings}
    )


def images(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    train(classifier, Images.from_folder(folder / "images"), recipe(tune, **settings))
    return classifier


class EndedByOne(Callback):
    """The last process alone wants the training to end."""

    def on_step(self, step: Step) -> bool:
        last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        return last and step.step == 2


def ended_by_one(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data = Images.from_folder(folder / "images")
    result = train(classifier, data, recipe(tune, **settings), callbacks=[EndedByOne()])
    assert len(result.history) == 2
    return classifier


def streamed(folder: Path, tune: str) -> Classifier:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    pictures = [Image.open(path) for path in sorted((folder / "images").glob("1*.png"))]
    train(classifier, Stream(lambda: pictures, "image", buffer=7), recipe(tune))
    return classifier


def texts(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(folder / "encoder", ["good", "bad"], ["it is {}"])
    train(classifier, Texts(TEXTS), recipe(tune, **settings))
    return classifier


def cloze(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(folder / "lm", ["bad", "good"], ["{text} it was [MASK]."])
    shots = Shots(Texts(TEXTS[:5]), F.one_hot(torch.tensor([1, 0, 0, 1, 1]), 2).float())
    weighed = recipe(tune, **{"objective.labels": 1.0, **settings})
    train(classifier, Texts(TEXTS), weighed, shots=shots)
    return classifier


def demonstrated(folder: Path, tune: str) -> Classifier:
    """Each text is shown among shots: how many different inputs that makes differs from process to process."""
    classifier = Classifier.from_pretrained(folder / "lm", ["bad", "good"], ["{text} it was [MASK]."])
    shots = Shots(Texts(TEXTS[:5]), F.one_hot(torch.tensor([1, 0, 0, 1, 1]), 2).float())
    classifier.demonstrations = Demonstrations.from_shots(shots, samples=3)
    train(classifier, Texts(TEXTS), recipe(tune, postprocess="prior-correction"))
    return classifier


def some_unreadable(folder: Path, tune: str, **settings: object) -> Classifier:
    """Most files are no pictures: now and then a process has nothing of its own."""
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    train(classifier, Images.from_folder(folder / "mostly broken"), recipe(tune, **{"batch_size": 3, **settings}))
    return classifier


def many_prompts(folder: Path, tune: str, **settings: object) -> Classifier:
    """Descriptions and templates: the prompts of one class fall to two processes."""
    described = {name: [name, f"a {name}", f"number {name}"][: 1 + i % 3] for i, name in enumerate(DIGITS)}
    classifier = Classifier.from_pretrained(EMBEDDED, described, ["a photo of a {}.", "{}"])
    train(classifier, Images.from_folder(folder / "images"), recipe(tune, **settings))
    return classifier


def vectors(folder: Path, tune: str, **settings: object) -> Classifier:
    features, prototypes = groups(n=61)
    classifier = Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.05)
    train(classifier, Vectors(features), recipe(tune, **settings))
    return classifier


# A batch of 7 is uneven for two; so is a last share of the data.
CASES: dict[str, Callable[[Path], Classifier]] = {
    f"{kind.__name__} {tune}": lambda folder, kind=kind, tune=tune: kind(folder, tune)  # type: ignore[misc]
    for kind in (images, texts, cloze)
    for tune in ("full", "prompt", "layernorm")
} | {
    "crops": lambda folder: images(folder, "full", augment="crop-flip"),
    "crops, frozen": lambda folder: images(folder, "prompt", augment="crop-flip"),
    "views": lambda folder: images(folder, "prompt", augment="crop-flip", views=2),
    "chunks": lambda folder: images(folder, "full", **{"compute.chunk": 2}),
    "chunks, workers": lambda folder: images(folder, "full", **{"compute.chunk": 2, "compute.workers": 1}),
    "estimated prior": lambda folder: images(folder, "full", **{"objective.prior": "estimated"}),
    "vectors": lambda folder: vectors(folder, "prototypes"),
    "vectors, map": lambda folder: vectors(folder, "map"),
    "vectors, refined": lambda folder: vectors(folder, "prototypes", postprocess="refinement"),
    "images, refined": lambda folder: images(folder, "prompt", postprocess="refinement"),
    "texts, prior-corrected": lambda folder: texts(folder, "full", postprocess="prior-correction"),
    "stream": lambda folder: streamed(folder, "full"),
    "few readable": lambda folder: some_unreadable(folder, "full"),
    "few readable, chunks": lambda folder: some_unreadable(folder, "full", **{"compute.chunk": 1}),
    "descriptions": lambda folder: many_prompts(folder, "full"),
    "descriptions, chunks": lambda folder: many_prompts(folder, "full", **{"compute.chunk": 4}),
    "descriptions, prompt": lambda folder: many_prompts(
        folder, "prompt", **{"tuner.class_specific": True, "compute.chunk": 4}
    ),
    "prototypes": lambda folder: images(folder, "prototypes"),
    "texts prototypes": lambda folder: texts(folder, "prototypes", postprocess="refinement"),
    "cloze prototypes": lambda folder: cloze(folder, "prototypes"),
    "lora": lambda folder: images(folder, "lora"),
    "texts lora": lambda folder: texts(folder, "lora", **{"objective.prior": "estimated", "compute.chunk": 2}),
    "cloze lora": lambda folder: cloze(folder, "lora"),
    "layernorm, all at once": lambda folder: some_unreadable(
        folder, "layernorm", postprocess="refinement", **{"objective.prior": "estimated", "compute.chunk": 1}
    ),
    "texts upper": lambda folder: texts(folder, "upper", postprocess="prior-correction"),
    "cloze upper": lambda folder: cloze(folder, "upper", **{"compute.chunk": 2}),
    "demonstrations": lambda folder: demonstrated(folder, "full"),
    "cloze, chunks": lambda folder: cloze(folder, "full", **{"compute.chunk": 2}),
    # A layer that no step uses must not decay.
    "decay": lambda folder: texts(
        folder, "full", **{"optimisation.name": "adamw", "optimisation.weight_decay": 0.1, "optimisation.lr": 1e-3}
    ),
    "anchored, ended by one": lambda folder: ended_by_one(folder, "full", weight_pull=0.3),
    "checkpointing": lambda folder: images(folder, "full", **{"compute.checkpointing": True}),
    # A loss that leaves out one of the model's outputs, and with it a weight.
    "temperature unused": lambda folder: images(
        folder, "full", **{"objective.plan": "exact", "objective.information": 0.0}
    ),
    "batch of one": lambda folder: images(folder, "full", batch_size=1),
    "batch of one, prompt": lambda folder: cloze(folder, "prompt", batch_size=1),
}


def state(classifier: Classifier) -> dict[str, torch.Tensor]:
    """Weights, and what predictions are corrected with."""
    fitted = classifier.postprocessor.state_dict() if classifier.postprocessor is not None else {}
    whole = {name: full_tensor(each).contiguous() for name, each in weights(classifier).items()}
    return whole | {f"postprocessor.{name}": tensor.contiguous() for name, tensor in fitted.items()}


def other_start(folder: Path) -> Classifier:
    """Processes that were given other weights start from those of the first."""
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    if os.environ.get("RANK", "0") != "0":
        for parameter in classifier.parameters():
            torch.nn.init.normal_(parameter, 1.0, 1.0)
    train(classifier, Images.from_folder(folder / "images"), recipe("full"))
    return classifier


def other_choice(folder: Path) -> Classifier:
    """Where the processes would choose and judge differently, as by a tie, all stand where the first says."""
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    plain = (Checkpoints.choose, adaptation.assess)
    if os.environ.get("RANK", "0") != "0":
        Checkpoints.choose = lambda self: plain[0](self)._replace(step=0)  # type: ignore[method-assign]
        adaptation.assess = lambda *given: replace(plain[1](*given), advised="zero-shot")  # type: ignore[assignment]
    try:
        result = adapt(classifier, Images.from_folder(folder / "images"), recipe("full", snapshots=2))
    finally:
        Checkpoints.choose, adaptation.assess = plain  # type: ignore[method-assign]
    return result.classifier


def resumed(
    classifier: Callable[[], Classifier], data: Unlabelled, checkpoints: Path, **settings: object
) -> Classifier:
    """Broken off after two steps, and gone on with."""
    given = recipe("full", steps=4, snapshots=2, **{"compute.save_every": 0.0, **settings})

    class Breaks(Callback):
        def on_step(self, step: Step) -> None:
            if step.step == 3:
                raise ZeroDivisionError

    own = checkpoints.with_name(f"{checkpoints.name} {os.environ.get('WORLD_SIZE')} {len(EVERYWHERE)}")
    with suppress(ZeroDivisionError):
        train(classifier(), data, given, checkpoint_dir=own, callbacks=[Breaks()])
    told, again = Steps(), classifier()
    result = train(again, data, given, checkpoint_dir=own, resume=True, callbacks=[told])
    assert len(told.steps) < len(result.history) == 4
    return again


CASES |= {
    "other start": other_start,
    "other choice": other_choice,
    "resumed": lambda folder: resumed(
        lambda: Classifier.from_pretrained(EMBEDDED, DIGITS), Images.from_folder(folder / "images"), folder / "resumed"
    ),
    "resumed, adamw": lambda folder: resumed(
        lambda: Classifier.from_pretrained(folder / "encoder", ["good", "bad"], ["it is {}"]), Texts(TEXTS),
        folder / "resumed with adamw", **{"optimisation.name": "adamw", "optimisation.lr": 1e-3},
    ),
}  # fmt: skip


class EndsOne(Callback):
    """One process alone gets a signal after the second step."""

    def on_step(self, step: Step) -> None:
        if step.step == 2 and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGTERM)


def whole_run(folder: Path, run: Path, interrupted: bool) -> Classifier:
    """All that `adapt` does with a folder, ended by a signal and gone on with where that is asked for."""
    given = recipe("full", snapshots=2)

    def classifier() -> Classifier:
        return Classifier.from_pretrained(EMBEDDED, DIGITS)

    if interrupted:
        try:
            classifier().adapt(folder / "images", recipe=given, output=run, callbacks=[EndsOne()])
        except SystemExit as error:
            assert error.code == 143
    return classifier().adapt(folder / "images", recipe=given, output=Output(run, resume=interrupted)).classifier


class Marks(Callback):
    """The first process writes how far the run is; each step takes a second where `SLOW_STEPS` is set."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step(self, step: Step) -> None:
        if os.environ.get("RANK", "0") == "0":
            self.file.write_text(str(step.step))
        time.sleep(float("SLOW_STEPS" in os.environ))


def long_run(folder: Path, out: Path) -> None:
    """A run that is started, or resumed, with a state on disk after each step."""
    out.mkdir(exist_ok=True)
    settings = recipe("full", steps=8, snapshots=2, **{"compute.save_every": 0.0})
    Classifier.from_pretrained(EMBEDDED, DIGITS).adapt(
        folder / "images", recipe=settings, output=Output(out / "run", resume=True), callbacks=[Marks(out / "step")]
    )


def diverged(folder: Path, run: Path) -> None:
    """The rate is far too high: the run keeps the last good step."""
    with suppress(Diverged):
        Classifier.from_pretrained(EMBEDDED, DIGITS).adapt(
            folder / "images", recipe=recipe("full", **{"optimisation.lr": 1e30, "optimisation.clip": 0.0}),
            output=run,
        )  # fmt: skip


def used(folder: Path, run: Path, out: Path, shard: bool) -> dict[str, Any]:
    """Predictions of a saved run in parts, and its evaluation on made-up labels."""
    classifier = Classifier.from_pretrained(run, use="last")
    if shard:
        shard_classifier(classifier)
    data = Images.from_folder(folder / "images")
    zero_shot = Classifier.from_pretrained(EMBEDDED, DIGITS)
    with together(classifier.device):
        predict_share(out, classifier, data, InferenceConfig(3))
        labelled = Labelled(data, [i % len(DIGITS) for i in range(len(data))])
        return compare(zero_shot, classifier, classifier, labelled, InferenceConfig(3)).to_json()


def held(classifier: Classifier) -> float:
    """Bytes of all tensors in this process, as a multiple of the whole weights."""
    gc.collect()
    alive = [local(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
    return sum(storages.values()) / sum(4 * p.numel() for p in classifier.parameters())


def disagreeing(folder: Path, world: ProcessGroup) -> str:
    """Lists of files that are equally long, and not the same."""
    files = sorted((folder / "images").glob("*.png"))
    own = files[1:] if world.rank else files[:-1]
    try:
        train(Classifier.from_pretrained(EMBEDDED, DIGITS), Images(own, [file.name for file in own]), recipe("full"))
    except InputError as error:
        return str(error)
    return "nothing was said"


def disagreeing_contents(out: Path, world: ProcessGroup) -> str:
    """Files of the same names and sizes, and of other contents."""
    own = out / f"contents of {world.rank}"
    own.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (8, 8), (world.rank, number, 0)).save(own / f"{number}.bmp")
    try:
        train(Classifier.from_pretrained(EMBEDDED, DIGITS), Images.from_folder(own), recipe("full"))
    except InputError as error:
        return str(error)
    return "nothing was said"


def _failing_at_the_second_call(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    calls: list[int] = []

    def failing(*given: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("this process fails on purpose")
        return original(*given)

    return failing


def lost(world: ProcessGroup) -> None:
    """The second process is killed, or stops, while the others wait for it."""
    if world.rank == 1:
        os.kill(os.getpid(), getattr(signal, os.environ["ENDED_BY"]))
    world.gather_objects(0)


def _engine(engine: Engine) -> str:
    return type(engine.classifier.backbone if engine.sharded else engine.model).__name__


class Watched(Engine):
    """Notes which engine it is, and how much of the weights is here."""

    seen: ClassVar[dict[str, object]] = {}

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Now, not at the end: what is sharded must be so while it is trained.
        own = sum(local(p).numel() for p in self.parameters.values())
        self.seen |= {"model": _engine(self), "share": own / self.tuner.trainable}
        self.seen["precision"] = self.recipe.compute.precision


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engines", nargs="*", default=["ddp"])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--runs", action="store_true", help="whole runs with their folders as well")
    given = parser.parse_args()
    trainer.Engine = Watched  # type: ignore[misc]
    if "LONG_RUN" in os.environ:
        long_run(given.folder, given.out)
        return
    world = init_processes(torch.device("cpu"))
    assert world.size == int(os.environ["WORLD_SIZE"]) > 1
    if "ENDED_BY" in os.environ:
        lost(world)
    if os.environ.get("FAILS_ON_RANK") == str(world.rank):
        StepModel.forward = _failing_at_the_second_call(StepModel.forward)  # type: ignore[method-assign]
    facts: dict[str, object] = {
        "disagreeing": [disagreeing(given.folder, world), disagreeing_contents(given.out, world)],
    }
    for engine in given.engines:
        EVERYWHERE.update({"compute.shard": True} if engine == "fsdp" else {})
        for name in given.cases:
            mine = state(CASES[name](given.folder))
            # Every process must end with the same weights, to the last bit.
            sums = world.gather_objects([float(p.double().sum()) for p in mine.values()])
            assert all(other == sums[0] for other in sums), name
            if world.is_main:
                (given.out / engine).mkdir(exist_ok=True, parents=True)
                save_file(mine, given.out / engine / f"{name}.safetensors")
            del mine
        if given.runs:
            run = given.out / engine / "run"
            adapted = whole_run(given.folder, run, interrupted=True)
            Watched.seen["held"] = world.gather_objects(held(adapted))
            del adapted
            diverged(given.folder, given.out / engine / "diverged")
            table = given.out / engine / "predictions.parquet"
            Watched.seen |= used(given.folder, run, table, engine == "fsdp")
        facts[engine] = Watched.seen | {}
    if world.is_main:
        (given.out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
    # All is written. On a busy machine, threads of sharded models have aborted the end of the interpreter.
    end_processes()
    os._exit(0)
