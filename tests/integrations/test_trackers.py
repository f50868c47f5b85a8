"""What trackers are told of a run, in their real files."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from cli_runner import in_a_process, pouf
from helpers import groups

from pouf import Adaptation, Callback, Classifier, EarlyStopping, InputError, Step, Tracking, Vectors

SETTINGS = {"steps": 12, "batch_size": 32, "snapshots": 4}


def classifier() -> tuple[Vectors, Classifier]:
    features, prototypes = groups()
    return Vectors(features), Classifier.from_vectors(prototypes, list("abcdef"))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by name, as TensorBoard itself reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_every_step_and_the_verdict(tmp_path: Path) -> None:
    data, clf = classifier()
    result = clf.adapt(data, settings=SETTINGS, callbacks=[Tracking("tensorboard", name="mine", folder=tmp_path)])
    logged = scalars(tmp_path / "mine")
    assert logged["loss"] == [(step.step, pytest.approx(step.loss, rel=1e-5)) for step in result.history]
    assert logged["terms/transport"][3][1] == pytest.approx(result.history[3].terms["transport"], rel=1e-5)
    ((at, agreement),) = logged["verdict/agreement"]
    assert at == 12 and agreement == pytest.approx(result.verdict.diagnostics.agreement)
    (settings,) = (tmp_path / "mine").rglob("hparams.yml")
    assert "optimisation.lr: " in settings.read_text() and "steps: 12" in settings.read_text()


def test_each_trial_of_a_search_is_a_run_of_its_own(tmp_path: Path) -> None:
    data, clf = classifier()
    tracking = Tracking(["tensorboard"], folder=tmp_path)
    clf.search(data, {"optimisation.lr": [1e-3, 3e-3]}, settings=SETTINGS, callbacks=[tracking])
    first, second = scalars(tmp_path), scalars(tmp_path / "2")
    assert [step for step, _ in first["loss"]] == [step for step, _ in second["loss"]] == list(range(1, 13))
    assert first["lr"] != second["lr"] and tracking.open == {}


def test_the_verdict_of_a_search_stands_beside_the_settings_that_were_chosen(tmp_path: Path) -> None:
    data, clf = classifier()
    tracking = Tracking("tensorboard", name="search", folder=tmp_path)
    found = clf.search(data, {"optimisation.lr": [3e-3, 1e-7]}, settings=SETTINGS, callbacks=[tracking])
    assert found.result.recipe.optimisation.lr == 3e-3, "the first of the two"
    assert "verdict/agreement" not in scalars(tmp_path / "search-2")
    ((_, agreement),) = scalars(tmp_path / "search-3")["verdict/agreement"]
    assert agreement == pytest.approx(found.result.verdict.diagnostics.agreement)
    (settings,) = (tmp_path / "search-3").rglob("hparams.yml")
    assert "optimisation.lr: 0.003" in settings.read_text()


def test_what_trains_nothing_is_tracked_too(tmp_path: Path) -> None:
    data, clf = classifier()
    clf.adapt(data, method="em", callbacks=[Tracking("tensorboard", folder=tmp_path)])
    assert "verdict/trusted" in scalars(tmp_path)


def command(tmp_path: Path, tracker: str, *more: object) -> tuple[object, ...]:
    features, prototypes = groups()
    np.save(tmp_path / "features.npy", features.numpy())
    np.savez(tmp_path / "prototypes.npz", prototypes=prototypes.numpy(), names=np.array(list("abcdef")))
    inputs = ("adapt", "features.npy", "--prototypes", "prototypes.npz", "--steps", 3, "--no-report", "--out", "run")
    return (*inputs, "--tracker", tracker, *more)


def wandb_told(folder: Path) -> None:
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = log.read_bytes()  # records of protobuf, their names in plain letters
    assert b"optimisation.lr" in content and b"verdict/agreement" in content
    assert content.count(b"terms/transport") >= 3, "every step"


def mlflow_told(folder: Path) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("pouf").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3]
    assert float(run.data.params["optimisation.lr"]) > 0 and "verdict/agreement" in run.data.metrics


def trackio_told(folder: Path) -> None:
    """In a process of its own, as its folder is read once."""
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s\n"
        "print(json.dumps([s.get_logs('pouf', 'run'), s.get_run_config('pouf', 'run')]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    rows, settings = json.loads(output.splitlines()[-1])
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    assert settings["optimisation.lr"] > 0 and any("verdict/agreement" in row for row in rows)


TOLD = {"wandb": wandb_told, "mlflow": mlflow_told, "trackio": trackio_told}


@pytest.mark.parametrize("tracker", TOLD)
def test_another_tracker_where_it_is_installed_holds_the_run_without_a_network(
    tracker: str, tmp_path: Path, environment: Callable[..., None]
) -> None:
    """With the variables that `docs/callbacks.md` names, and none but the summary on standard output."""
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    environment(WANDB_MODE="offline", TRACKIO_DIR=tmp_path / "trackio")
    environment(MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'mlflow.db'}")
    result = in_a_process(*command(tmp_path, tracker, "--json"), cwd=tmp_path)
    assert json.loads(result.stdout)["run"] == "run", "nothing else on standard output"
    TOLD[tracker](tmp_path)


def test_a_tracker_that_wants_a_login_is_one_line(tmp_path: Path, environment: Callable[..., None]) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    environment(WANDB_MODE=None, WANDB_API_KEY=None, HOME=tmp_path)  # nobody's key
    result = in_a_process(*command(tmp_path, "wandb", "--quiet"), cwd=tmp_path, code=2)
    assert result.stderr.startswith("error: the tracker 'wandb' could not be started: ")
    assert len(result.stderr.splitlines()) == 1


class Server(GeneralTracker):
    """A tracker whose server goes away."""

    name, requires_logging_directory, main_process_only = "tensorboard", False, False

    def __init__(self, *_: object, **__: object) -> None:
        self.asked: list[int] = []

    def start(self) -> None: ...

    @property
    def tracker(self) -> None: ...

    def store_init_configuration(self, values: object) -> None: ...

    def log(self, values: object, step: int | None = None, **_: object) -> None:
        self.asked.append(step or 0)
        if step == 2:
            raise ConnectionError("reset by peer")

    def finish(self) -> None:
        raise AssertionError("it was left out")


class Absent(Server):
    """A tracker whose server is not there."""

    def start(self) -> None:
        raise ConnectionError("no route to host\nand much more")


def test_a_tracker_that_fails_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def adapted(server: type[Server]) -> Adaptation:
        # There is no other way to a server that fails: trackers are named, and accelerate has the list of them.
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", server)
        data, clf = classifier()
        return clf.adapt(data, settings=SETTINGS, callbacks=[Tracking("tensorboard")])

    assert len(adapted(Server).history) == 12
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "tensorboard" in line and line.endswith("reset by peer")
    with pytest.raises(InputError, match=r"'tensorboard' could not be started: no route to host$"):
        adapted(Absent)


def test_the_command_line_logs_into_the_run(tmp_path: Path) -> None:
    result = pouf(*command(tmp_path, "tensorbord"), cwd=tmp_path, code=2)
    assert "Did you mean 'tensorboard'?" in result.stderr and not (tmp_path / "run").exists()
    pouf(*command(tmp_path, "tensorboard"), cwd=tmp_path)
    assert len(scalars(tmp_path / "run" / "tensorboard" / "run")["loss"]) == 3


def test_a_tracker_that_is_not_installed_is_told_with_its_extra(not_installed: Callable[[str], None]) -> None:
    not_installed("wandb")
    with pytest.raises(InputError, match=r"the tracker 'wandb' needs wandb: pip install \"pouf\[wandb\]\""):
        Tracking(["tensorboard", "wandb"])
    with pytest.raises(InputError, match="options for wandb, which is not among the trackers"):
        Tracking("tensorboard", options={"wandb": {}})


class Order(Callback):
    """What it was told, in its order."""

    def __init__(self, stop_at: int = 0) -> None:
        self.told: list[object] = []
        self.stop_at = stop_at

    def on_start(self, recipe: object, trainable: int, total: int) -> None:
        self.told.append("start")

    def on_step(self, step: Step) -> None:
        self.told.append(step.step)

    def on_checkpoint(self, step: int, classifier: Classifier) -> bool:
        self.told.append(("checkpoint", step))
        return bool(self.stop_at) and step >= self.stop_at

    def on_end(self, result: object) -> None:
        self.told.append("end")

    def on_error(self, error: BaseException) -> None:
        self.told.append(type(error).__name__)


def test_callbacks_are_told_in_the_order_that_is_documented(tmp_path: Path) -> None:
    data, clf = classifier()
    order = Order()
    clf.adapt(data, settings=SETTINGS | {"steps": 4, "snapshots": 2}, callbacks=[order])
    assert order.told == ["start", ("checkpoint", 0), 1, 2, ("checkpoint", 2), 3, 4, ("checkpoint", 4), "end"]


def test_a_checkpoint_can_end_the_training() -> None:
    data, clf = classifier()
    order = Order(stop_at=6)
    result = clf.adapt(data, settings=SETTINGS, callbacks=[order])
    assert len(result.history) == 6 and result.verdict.last == 6 and order.told[-2:] == [("checkpoint", 6), "end"]


def test_a_run_that_breaks_off_tells_its_callbacks_and_closes_its_trackers(tmp_path: Path) -> None:
    class Broken(Order):
        def on_step(self, step: Step) -> None:
            if step.step == 3:
                raise KeyError("mine")

    data, clf = classifier()
    order, tracking = Order(), Tracking("tensorboard", folder=tmp_path)
    with pytest.raises(KeyError, match="mine"):
        clf.adapt(data, settings=SETTINGS, callbacks=[order, tracking, Broken()])
    assert order.told[-2:] == [3, "KeyError"] and tracking.open == {}
    assert len(scalars(tmp_path)["loss"]) == 3


def test_early_stopping_waits_for_a_loss_that_no_longer_falls() -> None:
    def stops_at(losses: list[float], patience: int, min_delta: float = 0.0) -> int | None:
        stopping = EarlyStopping(patience, min_delta)
        for i, loss in enumerate(losses, 1):
            if stopping.on_step(Step(i, loss, {}, 1.0, 1.0, 1.0, 0.0)):
                return i
        return None

    falling, flat = [10.0 - i for i in range(8)], [2.0] * 8
    assert stops_at(falling, 2) is None
    assert stops_at(falling + flat, 2) == 12, "the first four that are equal"
    assert stops_at(falling, 2, min_delta=3.0) == 4
    with pytest.raises(InputError, match="at least one step"):
        EarlyStopping(0)
    data, clf = classifier()
    result = clf.adapt(data, settings=SETTINGS | {"steps": 200}, callbacks=[EarlyStopping(5, min_delta=1.0)])
    assert len(result.history) == 10 and result.verdict.last == 10
