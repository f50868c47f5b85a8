"""`pouf predict`, `distil`, `export` and `serve`."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._options import (
    BatchSize,
    DataOption,
    DeviceOptions,
    IdColumn,
    InferenceOptions,
    ModelOption,
    OutputOption,
    Overwrite,
    OwnInputs,
    RunFolder,
    TextColumn,
    TrainingOption,
    UseOption,
    grouped,
    path,
    proportions,
)
from pouf.cli._progress import encoding, progress
from pouf.errors import InputError, optional, plural

if TYPE_CHECKING:
    from pouf.integrations.onnx import Exported
    from pouf.runs.distil import Distilled


FILE = Path("predictions.csv")


@grouped("run", "inputs", "text", "text_column", "id_column", "out", "overwrite", "abstain", "unknown", "probabilities",
         "as_json")  # fmt: skip
def predict(
    run: RunFolder,
    options: InferenceOptions,
    inputs: Annotated[
        str | None,
        typer.Argument(metavar="INPUT", help="Folder of images, file of texts or vectors; one image, one text, or -."),
    ] = None,
    text: Annotated[list[str] | None, DataOption(help="A text to classify; repeatable.")] = None,
    out: Annotated[
        Path | None, OutputOption(help="Write .csv, .jsonl or .parquet.", show_default=f"{FILE} for many inputs")
    ] = None,
    overwrite: Overwrite = False,
    use: UseOption = "advised",
    prior: Annotated[
        str | None, OutputOption(help="Shares of the classes in the input: uniform, or one per class as 0.7,0.3.")
    ] = None,
    abstain: Annotated[
        float | None, OutputOption(help="Mark unreliable predictions: of the rest, at most this share is wrong.")
    ] = None,
    unknown: Annotated[bool, OutputOption("--unknown", help="Call inputs far from all classes `unknown`.")] = False,
    probabilities: Annotated[bool, OutputOption("--probabilities", help="Add a column p_NAME per class.")] = False,
    safe_csv: Annotated[bool, OutputOption("--safe-csv", help="Put ' before what a spreadsheet would run.")] = False,
    batch_size: BatchSize = 64,
    text_column: TextColumn = None,
    id_column: IdColumn = None,
) -> None:
    """Classify images, texts or vectors with an adapted model.

    \b
    pouf predict pouf-run more-photos/ --out predictions.csv
    pouf predict pouf-run "what a great film"
    """
    from pouf.runs import predict as library
    from pouf.runs.folder import Run

    samples, few = _samples(inputs, text)
    file = out if few or options.as_json else out or FILE
    if file is not None:
        library.check_place(file, overwrite)
    folder = Run(run)
    settings = library.PredictOptions(
        use, abstain, unknown, probabilities, safe_csv, overwrite, text_column, id_column, options.resolve_device(),
        options.trust_model, proportions(prior),
    )  # fmt: skip
    with encoding(options, batch_size) as inference:
        result = library.predict(folder, samples, file, settings, inference)
    if result.is_main:
        verdict = folder.verdict if use == "advised" else None
        console.show_predictions(result, verdict, folder, file, abstain, options)


def _samples(inputs: str | None, texts: list[str] | None) -> tuple[Path | list[str], bool]:
    """A path or texts, and whether predictions are printed: for one image, or texts on the command line."""
    from pouf.data.contents import as_url
    from pouf.data.images import EXTENSIONS

    if (inputs is None) == (not texts):
        raise InputError("give either INPUT or --text; - reads texts from standard input, one per line")
    if texts:
        return texts, True
    assert inputs is not None
    if inputs == "-":
        lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
        if not lines:
            raise InputError("standard input is empty: give texts, one per line")
        return lines, True
    # A single word with a slash or a file ending is the name of a file, even of a missing one.
    if len(inputs) >= 1024 or not (Path(inputs).exists() or re.fullmatch(r"\s*|\S*/\S*|\S+\.[^\s.]+", inputs)):
        return [inputs], True
    if inputs.strip() and as_url(inputs) is None and not os.path.lexists(inputs.split("::")[0]):
        raise InputError(f"no such file or folder: {inputs!r}; give a text of one word with --text")
    return path(inputs), inputs.lower().endswith(EXTENSIONS) and Path(inputs).is_file()


@grouped("run", "inputs", "onnx", "merge", "int8", "out", "use")
def export(
    run: RunFolder,
    options: InferenceOptions,
    inputs: OwnInputs = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write classifier and encoders as ONNX files.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Write the whole model as transformers opens it.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Also write a classifier with an 8-bit encoder.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="RUN/onnx or RUN/merged")] = None,
    use: UseOption = "advised",
    text_column: TextColumn = None,
) -> None:
    """Write a classifier as ONNX, with its outputs compared to torch's, or as a model that transformers opens."""
    from pouf.integrations.onnx import export_onnx
    from pouf.runs.folder import Run, read_inputs

    if onnx == merge:
        raise InputError("no format chosen: give --onnx or --merge")
    folder = Run(run)
    (classifier,) = options.load(run, use)
    if merge:
        target = out or run / "merged"
        classifier.save_pretrained(target, merge=True)
        console.show_result({"folder": str(target)}, f"the whole model in {target}, which transformers opens", options)
        return
    try:
        examples = read_inputs(folder, classifier, inputs, text_column)
    except InputError:
        if inputs is not None:
            raise
        examples = None  # the data of the run are gone
    found = export_onnx(classifier, out or run / "onnx", examples, int8=int8)
    source = "your inputs" if inputs else "inputs of the run" if examples is not None else "made-up inputs"
    console.show_result(found._asdict() | {"folder": str(found.folder)}, _comparison(found, source), options)


@grouped()
def distil(
    run: RunFolder,
    options: InferenceOptions,
    model: Annotated[str, ModelOption(help="Name or folder of the student.")],
    inputs: OwnInputs = None,
    text_column: TextColumn = None,
    preset: Annotated[str | None, TrainingOption(help="fast, light, balanced or paper.")] = None,
    steps: Annotated[int | None, TrainingOption(help="Number of updates.", min=1)] = None,
    seed: Annotated[int, TrainingOption(help="Seed of everything random.")] = 0,
    out: Annotated[Path, OutputOption(help="Folder of the student's run.")] = Path("pouf-student"),
    overwrite: Overwrite = False,
) -> None:
    """Teach a smaller model what a run predicts: the student is a run of its own."""
    from pouf.options import Output
    from pouf.runs.distil import distil as run_distil
    from pouf.runs.folder import Run, read_inputs
    from pouf.runs.run_folder import check_new

    check_new(out, overwrite=overwrite)
    (teacher,) = options.load(run, "advised")
    data = read_inputs(Run(run), teacher, inputs, text_column)
    with progress(options.hidden) as reporter:
        found = run_distil(
            teacher, model, data, Output(out, overwrite=overwrite), cache=options.features_cache(), recipe=preset,
            settings={"steps": steps} if steps is not None else None, seed=seed, callbacks=[reporter],
            trust_model=options.trust_model, command=sys.argv,
        )  # fmt: skip
    console.show_verdict(found.result.verdict, options.hidden)
    console.show_result(found.to_json() | {"run": str(out)}, _distilled(found, out), options)


def _distilled(found: Distilled, out: Path) -> str:
    faster = found.teacher.seconds / found.student.seconds
    smaller = found.teacher.parameters / max(found.student.parameters, 1)
    return (
        f"On {plural(found.held_back, 'input')} without its answers, the student agrees with its teacher "
        f"on {found.agreement:.0%} (its zero-shot: {found.before:.0%})\n"
        f"{1000 * found.student.seconds:.1f} ms per input, {faster:.1f} times as fast; "
        f"{found.student.parameters:,} parameters, {smaller:.1f} times as small. The student is in {out}"
    )


def _comparison(found: Exported, source: str) -> str:
    text = (
        f"{', '.join(found.files.values())} and preprocessing.json in {found.folder}\n"
        f"On {source}, probabilities differ from torch's by {found.difference:.1g} at most"
    )
    if found.int8_agreement is not None:
        text += f"\nIn int8, {found.int8_agreement:.0%} of them get the same class: evaluate it on more"
    return text


@grouped("run", "host", "port", "device")
def serve(
    run: RunFolder,
    options: DeviceOptions,
    host: Annotated[str, typer.Option(help="Address; 0.0.0.0 is every network of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    batch_size: BatchSize = 64,
    max_upload: Annotated[float, typer.Option(help="Largest request in MB.", min=0.001)] = 20.0,
    max_pixels: Annotated[float, typer.Option(help="Millions of pixels decoded at once.", min=0.001)] = 100.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds until a request must have arrived.", min=0.1)] = 60.0,
    shutdown_timeout: Annotated[int, typer.Option(help="Seconds for open requests after a signal.", min=1)] = 10,
    rate: Annotated[
        float, typer.Option(help="Requests per second and client, in bursts five times as many; 0: any.", min=0)
    ] = 100.0,
    neighbours: Annotated[int, typer.Option(help="Training inputs to search for the nearest; 0: none.", min=0)] = 500,
) -> None:
    """Serve a run: a page for people, a JSON API for programs."""
    uvicorn = optional("uvicorn", "serve", "serving a run")
    for package in ("fastapi", "python_multipart", "prometheus_client"):
        optional(package, "serve", "serving a run")
    from pouf.integrations.serve.app import LOCAL_HOSTS, make_app
    from pouf.integrations.serve.guard import Limits
    from pouf.integrations.serve.predictor import RunPredictor

    with _listen(host, port) as listening:
        predictor = RunPredictor(
            run, device=options.resolve_device(), trust_model=options.trust_model, neighbours=neighbours,
            cache=options.features_cache(),
        )  # fmt: skip
        limits = Limits(
            upload=int(max_upload * 2**20), pixels=int(max_pixels * 1e6), body_seconds=body_timeout, rate=rate,
            batch=batch_size,
        )  # fmt: skip
        local = _is_local(host)
        app = make_app(predictor, limits, (*LOCAL_HOSTS, host) if local else ("*",))
        console.show_verdict(predictor.run.verdict, quiet=options.hidden)
        if not local:
            console.print_err("Anyone who can reach this machine can use the server: there is no password.", "yellow")
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        console.show_result({"address": address}, f"Serving at {address} (stop with Ctrl+C)", options)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=shutdown_timeout)
        server = uvicorn.Server(config)
        with suppress(KeyboardInterrupt, SystemExit):
            server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(
            f"can't listen on {host}:{port}: {error.strerror or error}. Give another --port or --host"
        ) from None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
