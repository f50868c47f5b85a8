"""Language tasks in the layouts that people have them in."""

import json
from pathlib import Path

import pytest
import torch

from pouf import InputError
from pouf.bench.archives import from_dataset, read_task
from pouf.bench.language import TASKS

# A few lines of each task's files, as its archive has them: file, contents, samples, positions of the classes.
ARCHIVES = {
    "SST-2": ("SST-2/dev.tsv", 'sentence\tlabel\na "dull film\t0\nfun\t1\n', ['a "dull film', "fun"], [0, 1]),
    "CoLA": ("CoLA/dev.tsv", "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tThem rode.\n",
             ["The sailors rode.", "Them rode."], [1, 0]),
    "MNLI": ("MNLI/dev_matched.tsv", "no\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA.\tB.\tneutral\tentailment\n",
             [("A.", "B.")], [1]),
    "MNLI-mm": ("MNLI/dev_mismatched.tsv", "index\tsentence1\tsentence2\tgold_label\n0\tA.\tB.\tcontradiction\n",
                [("A.", "B.")], [0]),
    "SNLI": ("SNLI/dev.tsv", "index\tsentence1\tsentence2\tgold_label\n0\tA.\tB.\t-\n1\tC.\tD.\tneutral\n",
             [("C.", "D.")], [2]),
    "QNLI": ("QNLI/dev.tsv", "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tnot_entailment\n",
             [("Who?", "He.")], [0]),
    "RTE": ("RTE/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment\n", [("A.", "B.")], [1]),
    "MRPC": ("MRPC/dev.tsv", 'Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe said "so .\tSo he said .\n',
             [('He said "so .', "So he said .")], [1]),
    "QQP": ("QQP/dev.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tB?\t0\n3\tcut line\n",
            [("A?", "B?")], [0]),
    "MR": ("mr/test.csv", '1,"good , solid fun"\n0,dull\n', ["good , solid fun", "dull"], [1, 0]),
    "CR": ("cr/test.csv", "1,works\n", ["works"], [1]),
    "MPQA": ("mpqa/test.csv", "0,in distress\n", ["in distress"], [0]),
    "Subj": ("subj/test.csv", "0,fun\n1,a man walks\n", ["fun", "a man walks"], [0, 1]),
    "SST-5": ("sst-5/test.csv", "4,superb\n2,a film\n", ["superb", "a film"], [4, 2]),
    "TREC": ("trec/test.csv", "3,Who was he ?\n5,How many ?\n", ["Who was he ?", "How many ?"], [3, 5]),
}  # fmt: skip


def put(folder: Path, name: str, contents: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(contents, encoding="utf-8")


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_of_glue_and_lm_bff_are_read(tmp_path: Path, name: str) -> None:
    file, contents, samples, labels = ARCHIVES[name]
    put(tmp_path, file, contents)
    found = read_task(TASKS[name], tmp_path, "test")
    assert list(found.inputs.items) == samples
    assert found.targets.argmax(1).tolist() == labels
    assert torch.equal(found.targets.sum(1), torch.ones(len(labels)))


def test_a_score_becomes_a_soft_target_between_two_words(tmp_path: Path) -> None:
    put(tmp_path, "STS-B/dev.tsv", "index\tsentence1\tsentence2\tscore\n0\tA.\tB.\t3.500\n1\tC.\tD.\t0.0\n")
    found = read_task(TASKS["STS-B"], tmp_path, "test")
    assert torch.allclose(found.targets, torch.tensor([[0.3, 0.7], [1.0, 0.0]]))


def test_every_task_but_the_regression_has_an_archive_here() -> None:
    assert ARCHIVES.keys() | {"STS-B"} == TASKS.keys() and len(TASKS) == 16


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv"])
def test_tables_with_our_own_header_are_read(tmp_path: Path, ending: str) -> None:
    rows = [
        {"text_a": "A.", "text_b": "B.", "label": "not_entailment"},
        {"text_a": "C.", "text_b": "D.", "label": "entailment"},
    ]
    mark = "," if ending == "csv" else "\t"
    table = "\n".join(mark.join(r) for r in (rows[0].keys(), *(row.values() for row in rows)))
    put(tmp_path, f"rte/train.{ending}", "\n".join(map(json.dumps, rows)) if ending == "jsonl" else table)
    found = read_task(TASKS["RTE"], tmp_path, "train")
    assert list(found.inputs.items) == [("A.", "B."), ("C.", "D.")] and found.targets.argmax(1).tolist() == [0, 1]


def test_folders_of_the_datasets_package_are_read(tmp_path: Path) -> None:
    """The hub numbers RTE's labels the other way round than our order: names decide."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        sentence1=datasets.Value("string"),
        sentence2=datasets.Value("string"),
        label=datasets.ClassLabel(names=["entailment", "not_entailment"]),
    )
    rows = {"sentence1": ["A.", "C.", "E."], "sentence2": ["B.", "D.", "F."], "label": [0, 1, -1]}
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=table, validation=table.select([1])).save_to_disk(str(tmp_path / "rte"))
    table.save_to_disk(str(tmp_path / "mrpc"))
    train, test = (read_task(TASKS["RTE"], tmp_path, split) for split in ("train", "test"))
    assert list(train.inputs.items) == [("A.", "B."), ("C.", "D.")] and train.targets.argmax(1).tolist() == [1, 0]
    assert list(test.inputs.items) == [("C.", "D.")]
    with pytest.raises(InputError, match="one dataset without splits"):
        read_task(TASKS["MRPC"], tmp_path, "test")


def test_both_test_sets_of_mnli_are_found(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_dict({"premise": [name], "hypothesis": ["B."], "label": ["neutral"]})
        for name in ("train", "validation_matched", "validation_mismatched")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "mnli"))
    for task, expected in (("MNLI", "validation_matched"), ("MNLI-mm", "validation_mismatched")):
        assert read_task(TASKS[task], tmp_path, "test").inputs.items == [(expected, "B.")]


def labelled_dataset(names: list[str], label: int, column: str = "label"):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"sentence": datasets.Value("string"), column: datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"sentence": ["Them rode."], column: [label]}, features=features)


def test_the_hubs_names_of_classes_count_and_not_their_numbers() -> None:
    table = labelled_dataset(["unacceptable", "acceptable"], 0)
    assert from_dataset(TASKS["CoLA"], table).targets.tolist() == [[1.0, 0.0]]
    trec = labelled_dataset(["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"], 2, "coarse_label")
    assert from_dataset(TASKS["TREC"], trec, label="coarse_label").targets.argmax(1).tolist() == [0]
    with pytest.raises(InputError, match="label 'yes' is none of"):
        from_dataset(TASKS["CoLA"], labelled_dataset(["yes", "no"], 0))
    with pytest.raises(InputError, match=r"has sentence, label: name them"):
        from_dataset(TASKS["RTE"], table)


@pytest.mark.parametrize("score", ["", "much", "7.5"])
def test_a_score_out_of_range_is_refused(tmp_path: Path, score: str) -> None:
    put(tmp_path, "STS-B/dev.tsv", f"index\tsentence1\tsentence2\tscore\n0\tA.\tB.\t{score}\n")
    with pytest.raises(InputError, match=f"score '{score}' is no number from 0 to 5"):
        read_task(TASKS["STS-B"], tmp_path, "test")


def test_scores_stand_in_a_column_of_that_name(tmp_path: Path) -> None:
    put(tmp_path, "stsb/test.jsonl", '{"text_a": "A.", "text_b": "B.", "score": 1.0}\n')
    found = read_task(TASKS["STS-B"], tmp_path, "test")
    assert found.inputs.items == [("A.", "B.")] and torch.allclose(found.targets, torch.tensor([[0.8, 0.2]]))


def test_hidden_scores_of_the_hub_are_left_out() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"sentence1": ["A.", "C."], "sentence2": ["B.", "D."], "label": [-1.0, 5.0]})
    assert from_dataset(TASKS["STS-B"], table).targets.tolist() == [[0.0, 1.0]]


def test_empty_texts_are_left_out(tmp_path: Path) -> None:
    put(tmp_path, "mr/test.csv", "1,fun\n0,\n0, \n")
    assert read_task(TASKS["MR"], tmp_path, "test").inputs.items == ["fun"]


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("elsewhere/test.csv", "", "no folder of task MR"),
        ("mr/other.csv", "", "no test file"),
        ("mr/test.csv", "7,dull\n", "label '7' is none of negative, positive, 0, 1"),
        ("mr/test.csv", "", "has no example"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, name: str, contents: str, message: str) -> None:
    put(tmp_path, name, contents)
    with pytest.raises(InputError, match=message):
        read_task(TASKS["MR"], tmp_path, "test")


def test_a_header_that_lacks_a_column_is_said(tmp_path: Path) -> None:
    put(tmp_path, "RTE/dev.tsv", "index\tsentence1\tlabel\n0\tA.\tentailment\n")
    with pytest.raises(InputError, match="no column 'sentence2', only: index, sentence1, label"):
        read_task(TASKS["RTE"], tmp_path, "test")
