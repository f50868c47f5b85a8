"""Export to ONNX, which runs without torch: a file for the classifier and one for each encoder."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.inputs import Inputs
from pouf.errors import InputError, Unreadable, optional
from pouf.files import atomic_files, write_json
from pouf.models.base import Backbone, evaluating
from pouf.models.text_side import WINDOW_WEIGHT

CLASSIFIER, INT8, DESCRIPTION = "classifier.onnx", "classifier.int8.onnx", "preprocessing.json"
TOLERANCE = 1e-4  # of probabilities, between torch and onnxruntime
LONG_TEXT_WORDS = 2**10  # words of a text that is longer than any window
MAX_EXAMPLES = 16  # inputs that an exported model is tested on

Tensors = Mapping[str, Tensor]


class Exported(NamedTuple):
    """The files of an export, and how close they are to torch."""

    folder: Path
    files: dict[str, str]  # by role: classifier, int8, image_encoder, text_encoder, …
    difference: float  # largest difference of a probability from torch, over the examples
    int8_agreement: float | None  # share of the examples with the same class in int8


def export_onnx(
    classifier: Classifier, folder: str | Path, examples: Inputs | None = None, *, int8: bool = False
) -> Exported:
    """Write a classifier with fixed prototypes, and its encoders, and test them under onnxruntime.

        classifier.onnx         tensors of a batch of inputs -> probabilities (batch, k), features (batch, d)
        image_encoder.onnx      the same tensors -> features; text_encoder or vector_encoder for other modalities
        text_encoder.onnx       of a dual encoder: tokens of sentences -> features of the same space
        preprocessing.json      how inputs become these tensors; for texts also tokenizer.json and related files

    The number of inputs and the length of texts are dynamic. Corrections of predictions are part of the classifier.

    Args:
        examples: inputs to test it on, anything that `predict` takes; by default synthetic ones.
        int8: also write `classifier.int8.onnx` with 8-bit encoder weights and dynamically quantised activations;
            measure its accuracy before use.
    """
    onnxruntime = optional("onnxruntime", "onnx", "an export to ONNX")
    optional("onnxscript", "onnx", "an export to ONNX")
    extract_model = optional("onnx.utils", "onnx", "an export to ONNX").extract_model
    if classifier.demonstrations is not None:
        raise InputError(
            "a classifier with demonstrations can't be exported, since it is not a single network: export one without"
        )
    if classifier.device.type != "cpu":
        classifier = copy.deepcopy(classifier).cpu()
    backbone, folder = classifier.backbone, Path(folder)
    data = None if examples is None else classifier.data(examples)
    data = None if data is None or data.streamed else data
    samples = _samples(classifier, data)
    encoder = f"{backbone.modality}_encoder"
    files = {"classifier": CLASSIFIER, encoder: f"{encoder}.onnx"}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_files(folder) as partial, evaluating(classifier), torch.no_grad():
        inputs, file = backbone.prepare(samples), partial / CLASSIFIER
        _write(_Classifier(classifier, list(inputs)), inputs, file)
        session = onnxruntime.InferenceSession(str(file))
        difference, agreement = _difference(session, classifier, samples), None
        extract_model(file, partial / files[encoder], list(inputs), ["features"])
        if backbone.text_side is not None and backbone.modality == "image":
            files["text_encoder"] = "text_encoder.onnx"
            _write_text_side(classifier, partial / files["text_encoder"], onnxruntime)
        if int8:
            files["int8"] = INT8
            _quantise(file, partial / INT8)
            quantised = onnxruntime.InferenceSession(str(partial / INT8))
            plain, small = (run(each, inputs)[0].argmax(1) for each in (session, quantised))
            agreement = float((plain == small).mean())
        if (tokenizer := getattr(backbone, "tokenizer", None)) is not None:
            tokenizer.save_pretrained(partial)
        checked = {"inputs": len(samples), "real": data is not None, "largest_difference_from_torch": difference,
                   "int8_same_class": agreement}  # fmt: skip
        write_json(partial / DESCRIPTION, describe_export(classifier, session) | {"files": files, "checked": checked})
    return Exported(folder, files, difference, agreement)


def run(session: Any, tensors: Tensors) -> list[np.ndarray]:
    """All outputs of a session of onnxruntime for named tensors."""
    outputs: list[np.ndarray] = session.run(None, {name: tensor.numpy() for name, tensor in tensors.items()})
    return outputs


class _Classifier(nn.Module):
    """Tensors of a batch, in the order of their names -> probabilities (n, k) and features (n, d)."""

    prototypes: Tensor

    def __init__(self, classifier: Classifier, names: Sequence[str]) -> None:
        super().__init__()
        self.backbone, self.postprocessor, self.names = classifier.backbone, classifier.postprocessor, names
        self.register_buffer("prototypes", classifier.prototypes().detach().clone())

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone.encode_inputs(dict(zip(self.names, tensors, strict=True))).float()
        logits = self.backbone.scores(features, self.prototypes).logits
        if self.postprocessor is not None:
            logits = self.postprocessor(features, logits)
        return logits.float().softmax(1), features


class _TextSide(nn.Module):
    """Tokens of sentences, in the order of their names -> features (m, d)."""

    def __init__(self, backbone: Backbone, names: Sequence[str]) -> None:
        super().__init__()
        assert backbone.text_side is not None
        self.backbone, self.encode, self.names = backbone, backbone.text_side.encode_tokens, names

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.encode(dict(zip(self.names, tensors, strict=True))).float()


def _write(graph: _Classifier | _TextSide, tensors: Tensors, file: Path) -> None:
    # Traced with several inputs: a dimension of 1 would become static.
    some = {name: tensor[[0, len(tensor) // 2, -1]] for name, tensor in tensors.items()}
    text = "input_ids" in tensors
    axes = ("batch", "windows", "length") if WINDOW_WEIGHT in tensors else ("batch", "length")
    shapes = tuple(dict(enumerate(axes[: t.ndim])) if text else {0: "batch"} for t in some.values())
    outputs = ["probabilities", "features"] if isinstance(graph, _Classifier) else ["features"]
    with _quiet():
        try:
            program = torch.onnx.export(
                graph, tuple(some.values()), dynamo=True, verbose=False, dynamic_shapes=(shapes,),
                input_names=list(some), output_names=outputs,
            )  # fmt: skip
            assert program is not None
            program.save(file)
        except OSError as error:  # a full disk, say
            raise InputError(f"can't write {str(file)!r}: {error.strerror or error}") from None
        except Exception as error:  # of any part of the model
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"torch can't export this model to ONNX: {why}") from error


def _write_text_side(classifier: Classifier, file: Path, onnxruntime: Any) -> None:
    """The encoder of the class prompts of a dual encoder."""
    side = classifier.backbone.text_side
    assert side is not None
    sentences = [prompt for own in classifier.prompts() for prompt in own][:MAX_EXAMPLES]
    tokens = side.pad(side.all_token_ids(sentences))
    graph = _TextSide(classifier.backbone, list(tokens))
    _write(graph, tokens, file)
    session = onnxruntime.InferenceSession(str(file))
    for n in (len(sentences), 1):
        some = {name: tensor[:n] for name, tensor in tokens.items()}
        found, expected = torch.from_numpy(run(session, some)[0]), graph(*some.values())
        _refuse_above_tolerance(
            float((F.normalize(found, dim=1) - F.normalize(expected, dim=1)).abs().max()), "text side"
        )


def _difference(session: Any, classifier: Classifier, samples: Sequence[Any]) -> float:
    """The largest difference from the classifier's own probabilities, for single inputs and for a batch."""
    expected = classifier.predict_proba(samples).numpy()
    largest = 0.0
    for size in (1, len(samples)):
        batches = [samples[i : i + size] for i in range(0, len(samples), size)]
        found = np.concatenate([run(session, classifier.backbone.prepare(batch))[0] for batch in batches])
        largest = max(largest, float(np.abs(found - expected).max()))
    _refuse_above_tolerance(largest, "classifier")
    return largest


def _refuse_above_tolerance(difference: float, name: str) -> None:
    if not difference <= TOLERANCE:
        raise InputError(
            f"the exported {name} differs from torch by {difference:.2g}, more than {TOLERANCE:g}: this model can't be "
            "exported with these versions of torch and onnxruntime"
        )


def _quantise(file: Path, target: Path) -> None:
    """Quantise weights of matrix products to 8 bits, except those after the features, which need more precision."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(file)
    del model.graph.value_info[:]  # the quantiser turns Gemm into MatMul and infers shapes again
    nodes, after = model.graph.node, {"features"}
    for node in nodes:  # in the order of computation
        if after & set(node.input):
            after |= set(node.output)
    head = [node.name for node in nodes if after & set(node.input)]
    with _quiet():
        quantize_dynamic(
            model, target, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_exclude=head,
        )  # fmt: skip


def describe_export(classifier: Classifier, session: Any) -> dict[str, Any]:
    """A description of the exported classifier for its users."""
    facts: dict[str, Any] = {
        "kind": classifier.kind,
        "classes": list(classifier.classes),
        "model": classifier.model,
        "inputs": [{"name": i.name, "type": i.type, "shape": i.shape} for i in session.get_inputs()],
        "outputs": [{"name": o.name, "type": o.type, "shape": o.shape} for o in session.get_outputs()],
    }
    return facts | classifier.backbone.describe_inputs()


def _samples(classifier: Classifier, examples: Unlabelled | None) -> list[Any]:
    """At least two inputs: readable ones of the examples, or synthetic ones."""
    backbone = classifier.backbone
    found = _synthetic(classifier)[:MAX_EXAMPLES] if examples is None else []
    if examples is not None:
        for index in range(0, len(examples), max(1, len(examples) // MAX_EXAMPLES)):
            with suppress(Unreadable):
                found.append(examples.read(index, backbone.image_size))
        found = found[:MAX_EXAMPLES]
        if not found:
            raise InputError(f"no example from {examples.source} can be read: give others, or none")
    if backbone.windows:  # several windows, or the number would become static
        words = " ".join(map(str, found)).split() or ["text"]
        found = [" ".join(islice(cycle(words), LONG_TEXT_WORDS)), *found]
    return found if len(found) > 1 else found * 2


def _synthetic(classifier: Classifier) -> list[Any]:
    noise, backbone = np.random.default_rng(0), classifier.backbone
    if backbone.modality == "image":
        pixels = noise.integers(0, 256, (MAX_EXAMPLES, 96, 96, 3), dtype=np.uint8)
        return [Image.fromarray(each) for each in pixels]
    if backbone.modality == "vector":
        return list(classifier.prototypes().detach().numpy())
    texts = [text for group in classifier.texts() for text in group]
    return [(text, text) for text in texts] if len(classifier.columns) > 1 else texts


@contextmanager
def _quiet() -> Iterator[None]:
    """While open, the exporters log errors only."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


__all__ = ["CLASSIFIER", "DESCRIPTION", "INT8", "Exported", "export_onnx", "run"]
