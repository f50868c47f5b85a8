"""A run folder that is written again: what is not pouf's stays, and so does the run until another has come of it."""

import os
import shutil
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from cli_runner import one_line_error, pouf
from helpers import groups, output_of

from pouf import Callback, Classifier, InputError, Output
from pouf.files import LOCK
from pouf.runs.folder import CHECKPOINTS, PREDICTIONS, UNFINISHED, Run, read_manifest

REPORTED = ("predictions.csv", "report.html")
QUICK = {"steps": 4, "snapshots": 2, "batch_size": 60}
SAVING = {"settings": QUICK | {"compute.save_every": 0.0}}


def adapted(out: Path, data=None, **options):
    features, prototypes = groups(spread=0.4, apart=0.4)
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    output = output_of(out, options)
    return clf.adapt(features if data is None else data, output=output, **{"settings": QUICK} | options)


def test_files_that_pouf_did_not_write_stay(tmp_path: Path) -> None:
    adapted(tmp_path / "run", report=False)
    (tmp_path / "run" / "mine").mkdir()
    theirs = {"notes.txt": b"mine", "mine/a.txt": b"mine too", "review.csv": b"id,label\n"}
    for name, text in theirs.items():
        (tmp_path / "run" / name).write_bytes(text)
    (tmp_path / "run" / "details/search.json").write_text("{}")  # of an earlier run that was a search
    old = contents(tmp_path / "run")
    adapted(tmp_path / "run", overwrite=True, seed=1)
    adapted(tmp_path / "fresh", seed=1)
    new, fresh = contents(tmp_path / "run"), contents(tmp_path / "fresh")
    assert new.keys() == fresh.keys() | theirs.keys(), "of the old run nothing is left"
    assert {name: new[name] for name in theirs} == theirs
    weights = ("model/model.safetensors", "model/postprocessor.safetensors")
    for name in (*weights, "details/recipe.toml", "details/verdict.json", "predictions.csv"):
        assert new[name] == fresh[name] != old.get(name), "all is of the new run"


def contents(run: Path) -> dict[str, bytes]:
    there = [file for file in run.rglob("*") if file.is_file() and file.name != LOCK]
    return {str(file.relative_to(run)): file.read_bytes() for file in there}


def test_a_run_is_there_until_another_has_come_of_it(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    said = Classifier.from_pretrained(tmp_path / "run").predict(groups()[0])
    with pytest.raises(InputError, match="none of the 8 inputs"):
        adapted(tmp_path / "run", np.full((8, 16), np.nan, np.float32), overwrite=True)
    assert Classifier.from_pretrained(tmp_path / "run").predict(groups()[0]) == said
    assert Run(tmp_path / "run").manifest["status"] == "finished" and not (tmp_path / "run" / UNFINISHED).exists()
    adapted(tmp_path / "run", overwrite=True)


def test_inputs_in_the_folder_are_not_overwritten(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    np.save(tmp_path / "run" / "features.npy", groups()[0].numpy())
    with pytest.raises(InputError, match="lie in the run folder"):
        adapted(tmp_path / "run", tmp_path / "run" / "features.npy", overwrite=True)
    assert (tmp_path / "run" / "features.npy").is_file() and (tmp_path / "run" / "model" / "pouf.json").is_file()


def test_an_error_after_the_run_is_told_and_leaves_the_folder_free(tmp_path: Path) -> None:
    told: list[BaseException] = []
    in_the_way = tmp_path / "run" / UNFINISHED / PREDICTIONS

    class Watch(Callback):
        def on_step(self, step: object) -> None:
            in_the_way.mkdir(parents=True, exist_ok=True)

        def on_error(self, error: BaseException) -> None:
            told.append(error)

    with pytest.raises(OSError, match="predictions"):
        adapted(tmp_path / "run", callbacks=[Watch()])
    assert len(told) == 1 and isinstance(told[0], OSError)
    assert Classifier.from_pretrained(tmp_path / "run").predict(groups()[0])
    for copy in (in_the_way, tmp_path / "run" / PREDICTIONS):  # what can be used of the run stands in its folder, too
        shutil.rmtree(copy)
    adapted(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "predictions.csv").is_file()


def test_a_search_or_run_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    features, prototypes = groups(spread=0.4, apart=0.4)

    class Ends(Callback):
        def __init__(self, step: int) -> None:
            self.left = step

        def on_step(self, step: object) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    def searched(data: object, **options: object) -> None:
        clf = Classifier.from_vectors(prototypes, list("abcdef"))
        output = output_of(tmp_path / "search", options)
        clf.search(data, {"seed": [1, 2, 3]}, output=output, settings=QUICK, **options)

    with pytest.raises(KeyboardInterrupt):
        searched(features, callbacks=[Ends(6)])
    with pytest.raises(InputError, match="since this has changed: the data"):
        searched(features.flip(0)[:100], resume=True)
    searched(features, resume=True)
    saving = {"compute.save_every": 0.0, **QUICK}
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    with pytest.raises(KeyboardInterrupt):
        clf.adapt(features, output=tmp_path / "run", settings=saving, prior=[0.5] + [0.1] * 5, callbacks=[Ends(3)])
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    with pytest.raises(InputError, match="since this has changed: the proportions"):
        clf.adapt(features, output=Output(tmp_path / "run", resume=True), settings=saving, prior=[0.1] * 5 + [0.5])


def test_a_run_that_lost_its_verdict_or_its_steps_says_so(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    np.save(tmp_path / "features.npy", groups()[0].numpy())
    (tmp_path / "run" / "details/metrics.jsonl").write_text('{"step": 1\n')
    said = pouf("report", "run", "features.npy", cwd=tmp_path, code=2)
    assert "metrics.jsonl' is damaged in line 1" in one_line_error(said)
    (tmp_path / "run" / "details/verdict.json").unlink()
    said = pouf("predict", "run", "features.npy", cwd=tmp_path, code=2)
    assert "verdict.json' is missing" in one_line_error(said)


@pytest.mark.skipif(os.name == "nt", reason="needs file modes")
def test_weights_can_be_read_by_whoever_can_read_the_rest(tmp_path: Path) -> None:
    adapted(tmp_path / "run", report=False)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert len(modes) == 1


class Breaks(Callback):
    """Ends the run with an error before its first step, or after one of them."""

    def __init__(self, after: int, error: BaseException) -> None:
        self.after, self.error = after, error

    def on_start(self, *_: object) -> None:
        if not self.after:
            raise self.error

    def on_step(self, step) -> None:
        if step.step == self.after:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left"), ZeroDivisionError()])
def test_whatever_ends_a_run_before_its_first_step_brings_back_the_one_it_was_to_replace(
    tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(KeyboardInterrupt):  # the old run can be gone on with, and still can afterwards
        adapted(tmp_path / "run", callbacks=[Breaks(3, KeyboardInterrupt())], **SAVING)
    before = contents(tmp_path / "run")
    assert "unfinished/checkpoints/state.safetensors" in before
    with pytest.raises(type(error)):
        adapted(tmp_path / "run", overwrite=True, seed=1, callbacks=[Breaks(0, error)])
    assert contents(tmp_path / "run") == before
    adapted(tmp_path / "run", resume=True, **SAVING)


def test_the_last_finished_run_waits_until_another_is_finished(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    said = Classifier.from_pretrained(tmp_path / "run").predict_proba(groups()[0])
    for _ in range(2):  # an unfinished run does not take its place
        with pytest.raises(KeyboardInterrupt):
            adapted(tmp_path / "run", overwrite=True, seed=1, callbacks=[Breaks(2, KeyboardInterrupt())])
        assert Run(tmp_path / "run").manifest["status"] == "finished"
        assert Classifier.from_pretrained(tmp_path / "run").predict_proba(groups()[0]).equal(said)
        assert Run(tmp_path / "run" / UNFINISHED).manifest["status"] == "interrupted"
        assert not Classifier.from_pretrained(tmp_path / "run" / UNFINISHED).predict_proba(groups()[0]).equal(said)
    adapted(tmp_path / "run", resume=True, seed=1)
    assert not (tmp_path / "run" / UNFINISHED).exists() and Run(tmp_path / "run").manifest["resumed"]
    assert not Classifier.from_pretrained(tmp_path / "run").predict_proba(groups()[0]).equal(said)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_killed_while_it_overwrites_leaves_the_old_run_and_can_be_resumed(tmp_path: Path) -> None:
    class Killed(Callback):
        def on_step(self, step) -> None:
            if step.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    adapted(tmp_path / "run")
    before = {name: text for name, text in contents(tmp_path / "run").items() if not name.startswith(".")}
    if not (pid := os.fork()):
        adapted(tmp_path / "run", overwrite=True, seed=1, callbacks=[Killed()], **SAVING)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    after = contents(tmp_path / "run")
    assert {name: after[name] for name in before} == before, "predictions and report too"
    Classifier.from_pretrained(tmp_path / "run", use="last")
    adapted(tmp_path / "run", resume=True, seed=1, **SAVING)
    adapted(tmp_path / "fresh", seed=1, **SAVING)
    new, fresh = contents(tmp_path / "run"), contents(tmp_path / "fresh")
    for name in ("model/model.safetensors", "details/verdict.json", "predictions.csv"):
        assert new[name] == fresh[name] != before[name]
    assert not (tmp_path / "run" / UNFINISHED).exists()


def test_a_change_of_settings_touches_neither_run(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        adapted(tmp_path / "run", overwrite=True, callbacks=[Breaks(2, KeyboardInterrupt())], **SAVING)
    before = contents(tmp_path / "run")
    with pytest.raises(InputError, match="since this has changed: seed"):
        adapted(tmp_path / "run", resume=True, seed=5, **SAVING)
    assert contents(tmp_path / "run") == before


def test_a_result_that_goes_takes_no_weights_of_the_run_that_came_after_it(tmp_path: Path) -> None:
    first = adapted(tmp_path / "run")
    second = adapted(tmp_path / "run", overwrite=True, seed=1)
    del first
    for use in ("last", "zero-shot", "chosen"):
        second.at(use)
    del second
    assert {child.name for child in (tmp_path / "run").iterdir()} == {"model", "details", *REPORTED}


def test_a_search_that_breaks_off_in_its_first_trial_can_be_gone_on_with(tmp_path: Path) -> None:
    features, prototypes = groups(spread=0.4, apart=0.4)

    def searched(resume: bool = False, **options: object) -> None:
        clf = Classifier.from_vectors(prototypes, list("abcdef"))
        output = Output(tmp_path / "run", resume=resume, report=False)
        clf.search(features, {"seed": [1, 2]}, output=output, **SAVING, **options)

    with pytest.raises(InputError, match="gone"):
        searched(callbacks=[Breaks(3, InputError("the inputs are gone"))])
    assert (tmp_path / "run" / UNFINISHED / CHECKPOINTS / "0" / "state.safetensors").is_file()
    assert read_manifest(tmp_path / "run" / UNFINISHED)["status"] == "failed"
    searched(resume=True)
    assert not (tmp_path / "run" / UNFINISHED).exists()


def test_a_disk_that_is_full_from_the_start_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    adapted(tmp_path / "run", report=False)
    before, (soft, hard) = contents(tmp_path / "run"), resource.getrlimit(resource.RLIMIT_FSIZE)
    for place, options in (("run", {"overwrite": True}), ("new", {})):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))  # a full disk to whoever writes more than that
        try:
            with pytest.raises(InputError, match="can't write into the run folder"):
                adapted(tmp_path / place, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path / "run") == before and not (tmp_path / "new").exists()
    adapted(tmp_path / "run", overwrite=True, report=False)  # it is free
