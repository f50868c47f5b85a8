"""A run folder that is written again: what is not pouf's stays, and so does the run until another has come of it."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from cli_runner import one_line_error, pouf
from helpers import groups

from pouf import Callback, Classifier, InputError
from pouf.runs.folder import Run
from pouf.runs.names import CHECKPOINTS

QUICK = {"steps": 4, "snapshots": 2, "batch_size": 60}


def adapted(out: Path, data=None, **options):
    features, prototypes = groups(spread=0.4, apart=0.4)
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    return clf.adapt(features if data is None else data, output_dir=out, settings=QUICK, **options)


def test_files_that_pouf_did_not_write_stay(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "mine").mkdir()
    (tmp_path / "run" / "mine" / "a.txt").write_text("mine")
    (tmp_path / "run" / "review.csv").write_text("id,label\n")
    before = json.loads((tmp_path / "run" / "run.json").read_text())["created"]
    (tmp_path / "run" / "run.json").write_text(json.dumps({"status": "finished", "created": "long ago"}))
    adapted(tmp_path / "run", overwrite=True, seed=1)
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"notes.txt", "mine", "review.csv", "pouf.json"} <= there and "checkpoints" not in there
    assert json.loads((tmp_path / "run" / "run.json").read_text())["created"] not in ("long ago", before[:4])


def test_a_run_is_there_until_another_has_come_of_it(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    said = Classifier.from_pretrained(tmp_path / "run").predict(groups()[0])
    with pytest.raises(InputError, match="none of the 8 inputs"):
        adapted(tmp_path / "run", np.full((8, 16), np.nan, np.float32), overwrite=True)
    assert Classifier.from_pretrained(tmp_path / "run").predict(groups()[0]) == said
    assert Run(tmp_path / "run").manifest["status"] == "finished" and not (tmp_path / "run" / CHECKPOINTS).exists()
    adapted(tmp_path / "run", overwrite=True)


def test_inputs_in_the_folder_are_not_overwritten(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    np.save(tmp_path / "run" / "features.npy", groups()[0].numpy())
    with pytest.raises(InputError, match="lie in the run folder"):
        adapted(tmp_path / "run", tmp_path / "run" / "features.npy", overwrite=True)
    assert (tmp_path / "run" / "features.npy").is_file() and (tmp_path / "run" / "pouf.json").is_file()


def test_an_error_after_the_run_is_told_and_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[BaseException] = []

    class Watch(Callback):
        def on_error(self, error: BaseException) -> None:
            told.append(error)

    def full(*given: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("pouf.classifier.write_rows", full)
        with pytest.raises(OSError, match="no space left"):
            adapted(tmp_path / "run", callbacks=[Watch()])
    assert [str(error) for error in told] == ["no space left"]
    assert Classifier.from_pretrained(tmp_path / "run").predict(groups()[0])
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
        clf.search(data, {"seed": [1, 2, 3]}, output_dir=tmp_path / "search", settings=QUICK, report=False, **options)

    with pytest.raises(KeyboardInterrupt):
        searched(features, callbacks=[Ends(6)])
    with pytest.raises(InputError, match="since this has changed: the data"):
        searched(features.flip(0)[:100], resume=True)
    searched(features, resume=True)
    saving = {"compute.save_every": 0.0, **QUICK}
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    with pytest.raises(KeyboardInterrupt):
        clf.adapt(features, output_dir=tmp_path / "run", settings=saving, prior=[0.5] + [0.1] * 5, callbacks=[Ends(3)])
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    with pytest.raises(InputError, match="since this has changed: the proportions"):
        clf.adapt(features, output_dir=tmp_path / "run", settings=saving, prior=[0.1] * 5 + [0.5], resume=True)


def test_a_run_that_lost_its_verdict_or_its_steps_says_so(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    np.save(tmp_path / "features.npy", groups()[0].numpy())
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1\n')
    said = pouf("report", "run", "features.npy", cwd=tmp_path, code=2)
    assert "metrics.jsonl' is damaged in line 1" in one_line_error(said)
    (tmp_path / "run" / "verdict.json").unlink()
    said = pouf("predict", "run", "features.npy", cwd=tmp_path, code=2)
    assert "'verdict.json' is missing" in one_line_error(said)


@pytest.mark.skipif(os.name == "nt", reason="needs file modes")
def test_weights_can_be_read_by_whoever_can_read_the_rest(tmp_path: Path) -> None:
    adapted(tmp_path / "run", report=False)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert len(modes) == 1
