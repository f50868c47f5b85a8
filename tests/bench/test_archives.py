"""Language tasks in the layouts that people have them in."""

import json
from pathlib import Path

import pytest
import torch

from pouf import InputError
from pouf.bench.archives import Columns, from_dataset, has_drawn_splits, read_task
from pouf.bench.tasks import TASKS

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
    with pytest.raises(InputError, match=r"there are sentence, label: name them"):
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
def test_missing_files_and_labels_are_named(tmp_path: Path, name: str, contents: str, message: str) -> None:
    put(tmp_path, name, contents)
    with pytest.raises(InputError, match=message):
        read_task(TASKS["MR"], tmp_path, "test")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    put(tmp_path, "RTE/dev.tsv", "index\tsentence1\tlabel\n0\tA.\tentailment\n")
    with pytest.raises(InputError, match="no column 'sentence2', only: index, sentence1, label"):
        read_task(TASKS["RTE"], tmp_path, "test")


def k_shot(folder: Path, name: str, seeds: tuple[int, ...] = (42,), each: int = 16) -> None:
    """A task as the authors' script writes it: shots, D_dev and the whole test for each seed; texts tell which."""
    for seed in seeds:
        for split, rows in (("train", each), ("dev", each), ("test", 3 * each)):
            texts = [(f"{split} {i} of {seed}", i % 2) for i in range(2 * rows)]
            if name == "SST-2":
                lines = ["sentence\tlabel", *(f'a "{text}\t{label}' for text, label in texts)]
            else:
                lines = [f'{label},"{text} , isn\'t it"' for text, label in texts]
            put(folder / name, f"16-{seed}/{split}.tsv", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ["SST-2", "mr"])
@pytest.mark.parametrize("parent", [".", "k-shot"])
def test_splits_of_the_authors_are_read_whole(tmp_path: Path, name: str, parent: str) -> None:
    k_shot(tmp_path / parent, name, (42, 13))
    task = TASKS["MR" if name == "mr" else name]
    assert has_drawn_splits(task, tmp_path)
    for seed in (42, 13):
        for split, n in (("train", 32), ("dev", 32), ("test", 96)):
            read = read_task(task, tmp_path, split, seed)
            assert len(read.inputs) == n and read.targets.sum(0).tolist() == [n / 2] * 2
            assert all(f"{split} {i} of {seed}" in text for i, text in enumerate(read.inputs.items))
    with pytest.raises(InputError, match=r"no '16-21' in .*only 16-13, 16-42"):
        read_task(task, tmp_path, "train", 21)
    (tmp_path / parent / name / "16-42").rename(tmp_path / parent / name / "8-42")
    with pytest.raises(InputError, match=r"no '16-42' in .*only 16-13, 8-42"):
        read_task(task, tmp_path, "train", 42)
    (tmp_path / parent / name / "16-13").rename(tmp_path / parent / name / "8-13")
    with pytest.raises(InputError, match=r"no '16-42' in .*only 8-13, 8-42"):
        read_task(task, tmp_path, "train", 42)


def test_both_test_sets_of_mnli_have_one_dev_among_the_splits_of_the_authors(tmp_path: Path) -> None:
    header = "index\tsentence1\tsentence2\tgold_label\n"
    for name in ("train", "dev_matched", "test_matched", "test_mismatched"):
        put(tmp_path, f"MNLI/16-42/{name}.tsv", f"{header}0\t{name}.\tB.\tneutral\n")
    for task, test in (("MNLI", "test_matched"), ("MNLI-mm", "test_mismatched")):
        for split, file in (("train", "train"), ("dev", "dev_matched"), ("test", test)):
            assert read_task(TASKS[task], tmp_path, split, 42).inputs.items == [(f"{file}.", "B.")]


def test_dev_is_judged_on_where_the_test_has_no_labels_and_both_are_an_error(tmp_path: Path) -> None:
    """A seed's folder that was copied over, and GLUE's own, which keeps the labels of its test to itself."""
    k_shot(tmp_path, "SST-2")
    (tmp_path / "SST-2" / "16-42").rename(tmp_path / "copied")
    (tmp_path / "copied").rename(tmp_path / "SST-2" / "x")
    for file in (tmp_path / "SST-2" / "x").iterdir():
        file.rename(tmp_path / "SST-2" / file.name)
    with pytest.raises(InputError, match=r"both with labels: keep the one to be judged on"):
        read_task(TASKS["SST-2"], tmp_path, "test")
    put(tmp_path, "SST-2/test.tsv", "index\tsentence\n0\tno label\n")
    assert all('a "dev' in text for text in read_task(TASKS["SST-2"], tmp_path, "test").inputs.items)
    for test, label in (("index\tsentence\n0\tno label\n", 1), ("gj04\t-1\t\thidden\n", 1)):
        put(tmp_path, "CoLA/dev.tsv", f"gj04\t{label}\t\tdev\n")
        put(tmp_path, "CoLA/test.tsv", test)
        assert read_task(TASKS["CoLA"], tmp_path, "test").inputs.items == ["dev"]


def test_files_of_which_one_must_be_meant_are_an_error(tmp_path: Path) -> None:
    put(tmp_path, "rte/train.tsv", ARCHIVES["RTE"][1] * 2)
    for split in ("dev", "test"):
        put(tmp_path, f"rte/{split}.tsv", ARCHIVES["RTE"][1])
        put(tmp_path, f"snli/{split}.tsv", f"sentence1\tsentence2\tgold_label\n{split}\tB.\tneutral\n")
    with pytest.raises(InputError, match=r"has dev.tsv and test.tsv, both with labels: keep the one to be judged on"):
        read_task(TASKS["RTE"], tmp_path, "test")
    assert read_task(TASKS["SNLI"], tmp_path, "test").inputs.items == [("dev", "B.")], "its archive has both"
    put(tmp_path, "mr/test.csv", "1,fun\n")
    put(tmp_path, "mr/test.tsv", "1\tfun\n")
    with pytest.raises(InputError, match=r"has test.csv and test.tsv: keep one of them"):
        read_task(TASKS["MR"], tmp_path, "test")


ROWS = [{"text": "who was he ?", "label": 1}, {"text": "a man walks", "label": 0}]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet", "datasets"])
def test_names_of_labels_count_beside_their_numbers(tmp_path: Path, ending: str) -> None:
    """On the hub subjective texts are number 1, in LM-BFF's files number 0."""
    rows = [row | {"label_text": name} for row, name in zip(ROWS, ("subjective", "objective"), strict=True)]
    if ending in ("parquet", "datasets"):
        table = pytest.importorskip("datasets").Dataset.from_list(rows)
        (tmp_path / "subj").mkdir()
        if ending == "datasets":
            assert from_dataset(TASKS["Subj"], table).targets.argmax(1).tolist() == [0, 1]
            with pytest.raises(InputError, match="column 'label' has numbers, and Subj is numbered in several ways"):
                from_dataset(TASKS["Subj"], table.remove_columns("label_text"))
            return
        table.to_parquet(str(tmp_path / "subj/test.parquet"))
    else:
        mark = "," if ending == "csv" else "\t"
        lines = map(json.dumps, rows) if ending == "jsonl" else [mark.join(map(str, r)) for r in (rows[0], *(
            row.values() for row in rows))]  # fmt: skip
        put(tmp_path, f"subj/test.{ending}", "\n".join(lines))
    assert read_task(TASKS["Subj"], tmp_path, "test").targets.argmax(1).tolist() == [0, 1]


@pytest.mark.parametrize("column", ["coarse_label", "label-coarse"])
def test_the_hubs_trec_is_read(tmp_path: Path, column: str) -> None:
    datasets = pytest.importorskip("datasets")
    names = ["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"]
    features = datasets.Features(
        {"text": datasets.Value("string"), column: datasets.ClassLabel(names=names),
         "fine_label": datasets.Value("int64")}
    )  # fmt: skip
    rows = {"text": ["What is it ?", "What is NATO ?"], column: [2, 0], "fine_label": [24, 0]}
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "trec"))
    assert read_task(TASKS["TREC"], tmp_path, "test").targets.argmax(1).tolist() == [0, 2]


def test_columns_of_other_names_can_be_given(tmp_path: Path) -> None:
    put(tmp_path, "trec/test.csv", "question,kind,label\nWho was he ?,HUM,7\n")
    with pytest.raises(InputError, match="label 'question' is none of"):
        read_task(TASKS["TREC"], tmp_path, "test")
    read = read_task(TASKS["TREC"], tmp_path, "test", columns=Columns(("question",), "kind"))
    assert (read.inputs.items, read.targets.argmax(1).tolist()) == (["Who was he ?"], [3])
    with pytest.raises(InputError, match=r"needs columns .* name them by text_column= and label_column="):
        read_task(TASKS["TREC"], tmp_path, "test", columns=Columns(("no",), "kind"))
