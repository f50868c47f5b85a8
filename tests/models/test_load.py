"""What is loaded is whole, finite and what was saved: anything else is an error, never another prediction."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import groups
from safetensors.torch import load_file, save_file
from small_models import clip, masked_lm, sentence_encoder
from transformers import AutoTokenizer

from pouf import EMBEDDED, Classifier, InputError, Recipe
from pouf.demo import DIGITS
from pouf.files import file_digest
from pouf.postprocess import Postprocessor
from pouf.runs.folder import Run
from pouf.saving import DETAILS
from pouf.tuners import tune

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    clip(folder / "clip")
    sentence_encoder(folder / "sentence")
    masked_lm(folder / "masked", "roberta")
    return folder


def open_model(folder: Path) -> Classifier:
    if folder.name == "masked":
        words = {"templates": ["{text} It was [MASK]."], "words": ["terrible", "great"]}
        return Classifier.from_pretrained(folder, ["bad", "good"], **words)
    return Classifier.from_pretrained(folder, ["cat", "dog"])


def change_weights(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def a_matrix(tensors: dict[str, torch.Tensor]) -> str:
    """Of an encoder: not of a head, and not of a pooler, which may be missing."""
    return next(name for name in sorted(tensors) if "encoder.layer" in name and tensors[name].ndim == 2)


def lose_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[a_matrix(tensors)]


def reshape_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors[a_matrix(tensors)] = torch.zeros(3, 3)


def spoil_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors[a_matrix(tensors)][0, 0] = float("nan")


BROKEN = {
    "missing": (lambda m: change_weights(m / WEIGHTS, lose_one), "incomplete: 1 of its weights"),
    "other shape": (lambda m: change_weights(m / WEIGHTS, reshape_one), "incomplete: 1 of its weights"),
    "not finite": (lambda m: change_weights(m / WEIGHTS, spoil_one), "not finite"),
    "cut": (lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes()[:5000]), "can't load model"),
    "empty": (lambda m: (m / WEIGHTS).write_bytes(b""), "can't load model"),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), "can't load model"),
    "no tokenizer": (
        lambda m: [(m / name).unlink(missing_ok=True) for name in ("tokenizer.json", "vocab.txt")],
        "has no tokenizer|instantiate the backend tokenizer",
    ),
    "no config": (lambda m: (m / "config.json").unlink(), "can't load model"),
    "config of another kind": (lambda m: (m / "config.json").write_text("[1, 2]"), "can't load model"),
    "config cut": (
        lambda m: (m / "config.json").write_text((m / "config.json").read_text()[:99]), "can't load model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", BROKEN)
@pytest.mark.parametrize("kind", ["clip", "sentence", "masked"])
def test_a_damaged_model_is_refused(models: Path, tmp_path: Path, kind: str, damage: str) -> None:
    model = shutil.copytree(models / kind, tmp_path / kind)
    breaks, words = BROKEN[damage]
    breaks(model)
    with pytest.raises(InputError, match=words):
        open_model(model)


LAYERS = {
    "clip": ("text_config", "num_hidden_layers"), "sentence": ("num_hidden_layers",), "masked": ("num_hidden_layers",)
}  # fmt: skip


def change_json(file: Path, *names: str, value: object) -> None:
    table = part = json.loads(file.read_text())
    for name in names[:-1]:
        part = part[name]
    part[names[-1]] = value
    file.write_text(json.dumps(table))


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_the_config_leaves_out_are_an_error(models: Path, tmp_path: Path, kind: str) -> None:
    model = shutil.copytree(models / kind, tmp_path / kind)
    change_json(model / "config.json", *LAYERS[kind], value=1)
    with pytest.raises(
        InputError, match=r"has 16 encoder weights that don't fit its config.json, such as .*layers?\.1\."
    ):
        open_model(model)


# What real checkpoints hold beside the encoder: heads that they were trained under, poolers, constants.
BESIDE = {
    "clip": ["text_model.embeddings.position_ids", "vision_model.embeddings.position_ids", "logit_bias"],
    "sentence": ["embeddings.position_ids", "cls.predictions.bias", "cls.seq_relationship.weight", "vocab.weight"],
    "masked": ["roberta.pooler.dense.weight", "roberta.embeddings.position_ids", "classifier.out_proj.weight"],
}


@pytest.mark.parametrize("kind", BESIDE)
def test_heads_poolers_and_constants_beside_an_encoder_do_no_harm(models: Path, tmp_path: Path, kind: str) -> None:
    model = shutil.copytree(models / kind, tmp_path / kind)
    expected = open_model(model).backbone.fingerprint()
    change_weights(model / WEIGHTS, lambda tensors: tensors.update({name: torch.ones(2) for name in BESIDE[kind]}))
    assert open_model(model).backbone.fingerprint() == expected


def test_a_masked_lm_is_opened_as_an_encoder_without_its_head(tmp_path: Path) -> None:
    for kind in ("bert", "roberta", "mpnet", "deberta", "electra", "albert", "distilbert", "modernbert"):
        Classifier.from_pretrained(masked_lm(tmp_path / kind, kind), ["cat", "dog"])


def test_a_config_of_a_far_larger_model_is_refused_at_once(models: Path, tmp_path: Path) -> None:
    model = shutil.copytree(models / "clip", tmp_path / "clip")
    change_json(model / "config.json", "model_type", value="llama")
    with pytest.raises(InputError, match=r"describes a 'llama' with 6,\d{3},\d{3},\d{3} weights"):
        open_model(model)


PROCESSORS = {
    "two means": {"image_mean": [0.5, 0.5]}, "four deviations": {"image_std": [0.5] * 4},
    "no deviation": {"image_std": [0] * 3},
    "size 0": {"size": {"height": 0, "width": 0}, "crop_size": {"height": 0, "width": 0}},
    "size 7": {"size": {"height": 7, "width": 7}, "crop_size": {"height": 7, "width": 7}},
    "size 100000": {"size": {"shortest_edge": 100_000}, "crop_size": {"height": 100_000, "width": 100_000}},
    "resampling": {"resample": 99}, "a name of it": {"resample": "bicubic"},
}  # fmt: skip


@pytest.mark.parametrize("change", PROCESSORS)
def test_a_processor_that_does_not_fit_the_encoder_is_refused(models: Path, tmp_path: Path, change: str) -> None:
    model = shutil.copytree(models / "clip", tmp_path / "clip")
    for name, value in PROCESSORS[change].items():
        change_json(model / "preprocessor_config.json", name, value=value)
    with pytest.raises(InputError, match=r"can't (load model|read an image as its preprocessor_config)"):
        open_model(model)


def test_an_unused_pooler_may_lack_and_then_is_always_the_same(models: Path, tmp_path: Path) -> None:
    model = shutil.copytree(models / "sentence", tmp_path / "sentence")
    change_weights(model / WEIGHTS, lambda t: [t.pop(name) for name in list(t) if name.startswith("pooler.")])
    prints = {open_model(model).backbone.fingerprint() for _ in range(2)}
    assert len(prints) == 1


def test_a_fresh_head_may_lack_and_a_trained_one_may_not(models: Path, tmp_path: Path) -> None:
    classifier = open_model(models / "sentence").with_new_head(seed=3)
    tune(classifier, Recipe().tuner)
    classifier.save_pretrained(tmp_path)
    p = classifier.predict_proba(["the film is good"])
    assert torch.equal(Classifier.from_pretrained(tmp_path).predict_proba(["the film is good"]), p)
    change_weights(tmp_path / WEIGHTS, lambda tensors: tensors.pop("classifier.weight"))
    forget_fingerprints(tmp_path, WEIGHTS)
    with pytest.raises(InputError, match="incomplete: 1 of its weights"):
        Classifier.from_pretrained(tmp_path)


def forget_fingerprints(run: Path, changed: str) -> None:
    """As somebody would who changed a part on purpose."""
    card = json.loads((run / "pouf.json").read_text())
    (run / "pouf.json").write_text(json.dumps(card | {"files": {changed: file_digest(run / changed)}}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved classifiers of each way to be saved."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("full", "layernorm"):
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        tune(classifier, Recipe().with_settings({"tuner.name": name}).tuner)
        classifier.save_pretrained(folder / name)
    vectors = Classifier.from_vectors(groups()[1], [f"class {i}" for i in range(6)])
    tune(vectors, Recipe().with_settings({"tuner.name": "map"}).tuner)
    vectors.save_pretrained(folder / "vectors")
    return folder


PARTS = [
    ("full", WEIGHTS), ("full", "tokenizer.json"), ("full", "config.json"), ("full", "preprocessor_config.json"),
    ("layernorm", "weights.safetensors"), ("vectors", WEIGHTS),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "part"), PARTS)
@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_a_part_that_is_gone_cut_or_changed_is_an_error(
    saved: Path, tmp_path: Path, kind: str, part: str, damage: str
) -> None:
    run = shutil.copytree(saved / kind, tmp_path / "run")
    content = bytearray((run / part).read_bytes())
    if damage == "gone":
        (run / part).unlink()
    elif damage == "cut":
        (run / part).write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        (run / part).write_bytes(content)
    with pytest.raises(InputError, match="is missing in" if damage == "gone" else "not as it was saved"):
        Classifier.from_pretrained(run)


@pytest.mark.parametrize("damage", ["missing", "other shape", "not finite"])
@pytest.mark.parametrize("kind", ["full", "layernorm", "vectors"])
def test_weights_are_checked_also_where_no_fingerprint_tells(
    saved: Path, tmp_path: Path, kind: str, damage: str
) -> None:
    run = shutil.copytree(saved / kind, tmp_path / "run")
    file = run / ("weights.safetensors" if kind == "layernorm" else WEIGHTS)
    change = {"missing": lose_any, "other shape": reshape_any, "not finite": spoil_any}[damage]
    change_weights(file, change)
    forget_fingerprints(run, file.name)
    with pytest.raises(InputError):
        Classifier.from_pretrained(run)


def lose_any(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[max(tensors)]


def reshape_any(tensors: dict[str, torch.Tensor]) -> None:
    tensors[max(tensors)] = torch.ones(3, 7)


def spoil_any(tensors: dict[str, torch.Tensor]) -> None:
    tensors[max(tensors)].view(-1)[0] = float("inf")


def test_zero_shot_loads_though_a_tuned_part_is_damaged(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved / "layernorm", tmp_path / "run")
    (run / "weights.safetensors").unlink()
    Classifier.from_pretrained(run, use="zero-shot")


@pytest.mark.parametrize("tuner", [None, "layernorm", "full"])
def test_a_base_model_that_changed_since_is_told(models: Path, tmp_path: Path, tuner: str | None) -> None:
    base = shutil.copytree(models / "clip", tmp_path / "clip")
    classifier = Classifier.from_pretrained(base, ["cat", "dog"], temperature=0.02)
    if tuner is not None:
        tune(classifier, Recipe().with_settings({"tuner.name": tuner}).tuner)
        with torch.no_grad():
            for parameter in classifier.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1)
    classifier.save_pretrained(tmp_path / "run")
    use = "zero-shot" if tuner == "full" else "advised"
    Classifier.from_pretrained(tmp_path / "run", use=use)
    change_weights(base / WEIGHTS, lambda tensors: tensors[a_matrix(tensors)].add_(1e-3))
    with pytest.raises(InputError, match="other weights than when"):
        Classifier.from_pretrained(tmp_path / "run", use=use)


EDITS = {
    "format": "99", "classes": 7, "templates": None, "stands_for": ["else"], "tuner": {"name": "everything"},
    "prior": ["a"], "temperature": "hot", "files": ["weights.safetensors"], "vectors": "perhaps", "words": 3,
    "demonstrations": {"shots": 1}, "model": 3, "unknown": 1,
}  # fmt: skip


@pytest.mark.parametrize("field", EDITS)
def test_an_edited_card_is_damaged_and_the_error_names_what(saved: Path, tmp_path: Path, field: str) -> None:
    shutil.copytree(saved / "layernorm", tmp_path / "run")
    card = json.loads((tmp_path / "run" / "pouf.json").read_text())
    (tmp_path / "run" / "pouf.json").write_text(json.dumps(card | {field: EDITS[field]}))
    with pytest.raises(InputError, match=rf"pouf.json' is damaged \({field}"):
        Classifier.from_pretrained(tmp_path / "run")


@pytest.mark.parametrize("names", [["cat", "dog"], ["cat", "dog", "sea", "air"]])
@pytest.mark.parametrize("described", [False, True])
def test_a_card_with_other_classes_than_its_files_is_refused(tmp_path: Path, names: list[str], described: bool) -> None:
    features, prototypes = groups(present=3, k=3, n=24, d=8)
    classifier = Classifier.from_vectors(prototypes, ["cat", "dog", "fish"])
    classifier = classifier.adapt(features, settings={"steps": 2, "postprocess": "prior-correction"}).at("last")
    classifier.save_pretrained(tmp_path / "run")
    change_json(tmp_path / "run" / "pouf.json", "classes", value=names)
    if described:
        change_json(tmp_path / "run" / "pouf.json", "descriptions", value=[["one"]] * 3)
    with pytest.raises(InputError, match=rf"3 descriptions for {len(names)}|names {len(names)} classes.* saved for 3"):
        Classifier.from_pretrained(tmp_path / "run")


def test_a_correction_of_other_classes_than_the_cards_is_refused(models: Path, tmp_path: Path) -> None:
    classifier = open_model(models / "sentence")
    classifier.postprocessor = Postprocessor(torch.zeros(2))
    classifier.save_pretrained(tmp_path / "run")
    change_json(tmp_path / "run" / "pouf.json", "classes", value=["cat", "dog", "sea"])
    with pytest.raises(InputError, match=r"names 3 classes, and postprocessor.safetensors was saved for 2"):
        Classifier.from_pretrained(tmp_path / "run")


STEP = {"step": 1, "loss": 0.5, "effective_classes": 2.0, "seconds": 1.0}
DATA = {"source": "x.npy", "n": 2}
ROWS = {
    "metrics.jsonl": [[1], 3, "a", None, {}, STEP | {"step": "a"}, STEP | {"loss": None}, STEP | {"seconds": "1"}],
    "skipped.jsonl": [[1], 3, {}, {"id": "a"}, {"id": 1, "reason": "r"}],
    "run.json": [
        3, {"data": 3}, {"data": [1]}, {"data": DATA | {"columns": 3}}, {"data": DATA | {"id_columns": ["a"]}},
        {"drift": 3}, {"drift": {}}, {"drift": {"agreement": "a"}}, {"absent": 3}, {"trainable": "a"}, {"total": [1]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in ROWS.items() for row in rows], ids=str)
def test_a_file_of_a_run_that_was_edited_by_hand_is_damaged(saved: Path, tmp_path: Path, name: str, row: Any) -> None:
    run = shutil.copytree(saved / "vectors", tmp_path / "run")
    whole = {
        "metrics.jsonl": STEP,
        "skipped.jsonl": {"of": "data", "id": "a", "reason": "r"},
        "run.json": {"data": DATA},
    }
    (run / DETAILS).mkdir()
    for file, content in whole.items():
        (run / DETAILS / file).write_text(json.dumps(content) + "\n")
    assert Run(run).steps() == [STEP] and len(Run(run).skipped()) == 1 and Run(run).manifest == {"data": DATA}
    (run / DETAILS / name).write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=rf"{name}' is damaged"):
        print(Run(run).steps(), Run(run).skipped())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"format": null}', b"\x00" * 40, b"[" * 99999]
)
def test_a_card_that_is_no_card_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pouf.json").write_bytes(content)
    with pytest.raises(InputError, match=r"pouf\.json"):
        Classifier.from_pretrained(tmp_path)


def test_a_state_that_is_gone_is_not_replaced_by_another(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved / "layernorm", tmp_path / "run")
    card = json.loads((run / "pouf.json").read_text())
    (run / "pouf.json").write_text(json.dumps(card | {"stands_for": ["last"]}))
    with pytest.raises(InputError, match="holds no chosen step any more"):
        Classifier.from_pretrained(run, use="chosen")


def test_pickled_weights_are_loaded_only_where_the_model_is_trusted(models: Path, tmp_path: Path) -> None:
    model = shutil.copytree(models / "clip", tmp_path / "clip")
    torch.save(load_file(model / WEIGHTS), model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"Pickled weights \(\.bin\) can run any code"):
        open_model(model)
    assert Classifier.from_pretrained(model, ["cat", "dog"], trust_model=True).classes == ("cat", "dog")


def test_code_of_a_model_is_not_run_and_nobody_is_asked(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]
) -> None:
    """Of a type that transformers knows, its own class is used; of another, the model is refused."""
    model, mark = shutil.copytree(models / "clip", tmp_path / "clip"), tmp_path / "ran"
    code = (
        f"open({str(mark)!r}, 'w')\nfrom transformers import CLIPConfig as C\nclass Own(C):\n    model_type = 'own'\n"
    )
    (model / "own.py").write_text(code)
    config = json.loads((model / "config.json").read_text())
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # a person who agrees to whatever is asked
    environment(HF_HOME=tmp_path / "home")
    for kind in ("clip", "own"):
        changed = config | {"auto_map": {"AutoConfig": "own.Own"}, "model_type": kind}
        (model / "config.json").write_text(json.dumps(changed))
        if kind == "clip":
            open_model(model)
        else:
            with pytest.raises(InputError, match="comes with Python code, which is not run"):
                open_model(model)
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../victim", "/tmp/victim", "a/../../victim"])
def test_modules_outside_of_their_folder_are_refused(models: Path, tmp_path: Path, path: str) -> None:
    """Saving copies what modules.json lists: it must not write beside the run."""
    model = shutil.copytree(models / "sentence", tmp_path / "sentence")
    modules = json.loads((model / "modules.json").read_text())
    modules[1]["path"] = path
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match="outside of its folder"):
        open_model(model)


def test_the_tokenizer_of_a_folder_without_one_would_be_empty(models: Path, tmp_path: Path) -> None:
    """Why it is checked: transformers makes one that knows no word, without a warning."""
    model = shutil.copytree(models / "clip", tmp_path / "clip")
    (model / "tokenizer.json").unlink()
    assert len(AutoTokenizer.from_pretrained(model)) == 2


def test_a_local_model_needs_no_network(models: Path, tmp_path: Path) -> None:
    """In a process of its own, where the hub is not switched off: nothing is asked of it."""
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise SystemExit('a connection was tried')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from pouf import Classifier\n"
        "classifier = Classifier.from_pretrained(sys.argv[1], ['cat', 'dog'])\n"
        "classifier.save_pretrained(sys.argv[2])\n"
        "print(Classifier.from_pretrained(sys.argv[2]).predict('a cat'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", code, str(models / "sentence"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.strip() in ("cat", "dog"), done.stderr


def test_offline_means_no_connection_and_a_clear_error() -> None:
    tried, watching = [], [True]
    sys.addaudithook(lambda event, given: tried.append(event) if watching and event.startswith("socket.") else None)
    with pytest.raises(InputError, match="can't load model 'somebody/some-model'"):
        Classifier.from_pretrained("somebody/some-model", ["cat", "dog"])
    watching.clear()
    assert not tried
