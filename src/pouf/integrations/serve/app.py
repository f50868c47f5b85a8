"""The page and the JSON API of a run, as an ASGI application."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, File, Form, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from torch import Tensor

from pouf import __version__
from pouf.data.tables import READERS
from pouf.data.texts import Texts
from pouf.errors import InputError
from pouf.integrations.serve.engine import Answer, Batcher, Busy, Engine
from pouf.integrations.serve.guard import BUSY, RETRY, Budget, Guard, Limits, Metrics, fault
from pouf.integrations.serve.reader import Reader
from pouf.integrations.serve.schemas import Fault, Info, Near, Prediction, Predictions, Question, Row, Side, Table
from pouf.reporting.pages import render, script_data
from pouf.reporting.svg import LIGHT

LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
ImageFiles = Annotated[list[UploadFile], File(description="images")]
TableFile = Annotated[UploadFile, File(description=f"a table of texts: {', '.join(READERS)}")]
ColumnName = Annotated[str, Form(description="column of the texts, or two for pairs: a,b")]
TopClasses = Annotated[int, Query(ge=1, description="with details: number of classes with their probabilities")]
Details = Annotated[bool, Query(description="zero-shot and adapted side by side, and the nearest training inputs")]
JSON_PATHS = ("/api/predict",)
logger = logging.getLogger(__name__)


def make_app(engine: Engine, limits: Limits | None = None, hosts: Sequence[str] = LOCAL) -> FastAPI:
    """The page, the API, their limits and metrics.

    Args:
        hosts: accepted host names; another name could be another site that points its address here.
    """
    limits, metrics = limits or Limits(), Metrics()
    batcher = Batcher(engine.answers, limits.batch, limits.waiting, metrics.batches.observe)
    bodies, pixels = Budget(max(limits.bodies, limits.upload)), Budget(limits.pixels)
    metrics.waiting.set_function(batcher.waiting.qsize)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        batcher.stop()

    faults: dict[int | str, dict[str, Any]] = {code: {"model": Fault} for code in (408, 413, 422, 429, 503)}
    app = FastAPI(
        title="pouf", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="A zero-shot classifier that was adapted without labels, beside what it was before.",
    )  # fmt: skip
    app.add_middleware(
        Guard, limits=limits, metrics=metrics, bodies=bodies, json_paths=JSON_PATHS,
        paths=lambda: {r.path for r in app.routes},  # type: ignore[attr-defined]
    )  # fmt: skip
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    _handle_errors(app)
    about, reader = _info(engine, limits), Reader(engine, limits)
    page = render("serve.html", info=about, verdict=engine.run.verdict, title=engine.run.name,
                  light=LIGHT, info_json=script_data(about.model_dump()))  # fmt: skip

    @app.get("/", include_in_schema=False)
    def index() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(render("api.html", spec=app.openapi(), light=LIGHT))

    @app.get("/health")
    def health() -> dict[str, str]:
        """Whether it answers at all, however much is waiting; if not, restart it."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": Fault}})
    async def ready() -> dict[str, str]:
        """Whether there is room for another request; if not, send none for a while."""
        if batcher.is_full or bodies.free < limits.upload:
            raise Busy
        return {"status": "ready"}

    @app.get("/metrics")
    def metrics_text() -> Response:
        """Requests, their times, and sizes of batches, for Prometheus."""
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    @app.get("/api/info")
    def info() -> Info:
        """Model, classes, verdict and limits."""
        return about

    async def classify_images(contents: Sequence[bytes]) -> list[Answer]:
        """Decode when there is room for their pixels, and free it with the answers."""
        size = await run_in_threadpool(reader.pixels, contents)
        if size > limits.pixels:
            raise HTTPException(
                413, f"the images have {size:,} pixels, more than {limits.pixels:,}: send fewer at once"
            )
        async with pixels.reserve(size):
            return await batcher(await run_in_threadpool(reader.decode, contents))

    async def predict(samples: Sequence[Any], details: bool, top: int) -> Predictions:
        answers = await (classify_images if reader.modality == "image" else batcher)(samples)
        predictions = [_prediction(engine, answer, about.advised, top) for answer in answers]
        return Predictions(predictions=predictions if details else [each.short() for each in predictions])

    @app.post("/api/predict", responses=faults, response_model_exclude_none=True)
    async def predict_json(question: Question, details: Details = False, top: TopClasses = 10) -> Predictions:
        """Classify texts, images in base64 or vectors: whichever the model reads."""
        return await predict(await run_in_threadpool(reader.of_question, question), details, top)

    @app.post("/api/files", responses=faults, response_model_exclude_none=True)
    async def predict_files(files: ImageFiles, details: Details = False, top: TopClasses = 10) -> Predictions:
        """Classify image files."""
        reader.check_files(files)
        return await predict([await file.read() for file in files], details, top)

    @app.post("/api/table", responses=faults)
    async def predict_table(file: TableFile, column: ColumnName = "") -> Table:
        """Classify every text of a table."""
        texts = await run_in_threadpool(reader.of_table, file.filename or "", await file.read(), column)
        there = [i for i in range(len(texts)) if i not in texts.skipped]
        rows: list[Row] = []
        for start in range(0, len(there), limits.batch):  # one batch at a time: others want answers too
            some = there[start : start + limits.batch]
            answers = await batcher([texts.read(i) for i in some])
            rows += [_row(engine, texts, i, a, about.advised) for i, a in zip(some, answers, strict=True)]
        return Table(rows=rows, skipped=[f"row {texts.ids[i]}: {why}" for i, why in sorted(texts.skipped.items())])

    return app


def _handle_errors(app: FastAPI) -> None:
    """Every error is one object with one message."""

    async def explain(request: Request, error: Exception) -> Response:
        if isinstance(error, InputError):
            return fault(422, str(error))
        if isinstance(error, Busy):
            return fault(503, BUSY, RETRY)
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))
            problem = f"{where}: {first['msg']}" if where else first["msg"]
            return fault(422, f"{problem}. What {request.url.path} takes is described at /docs")
        if isinstance(error, HTTPException):
            return fault(error.status_code, str(error.detail), error.headers)
        logger.exception("an unexpected error", exc_info=error)
        return fault(500, f"unexpected {type(error).__name__}: this is a bug in pouf")

    for kind in (InputError, Busy, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, explain)


def _info(engine: Engine, limits: Limits) -> Info:
    classifier, verdict = engine.classifier, engine.run.verdict
    name = None if classifier.model is None else "/".join(Path(classifier.model).parts[-2:])
    return Info(
        model=name, kind=classifier.kind, classes=list(classifier.classes),
        templates=[] if classifier.kind == "vector" else list(classifier.templates), verdict=str(verdict),
        level=verdict.level, advised="zero-shot" if verdict.advised == "zero-shot" else "adapted",
        columns=list(classifier.columns), limits=vars(limits), pouf=__version__,
    )  # fmt: skip


def _side(engine: Engine, probabilities: Tensor, top: int) -> Side:
    best = probabilities.topk(min(top, len(probabilities)))
    names = [engine.classifier.classes[k] for k in best.indices.tolist()]
    shares = dict(zip(names, (round(p, 6) for p in best.values.tolist()), strict=True))
    return Side(predicted=names[0], probability=shares[names[0]], probabilities=shares)


def _prediction(engine: Engine, answer: Answer, advised: Literal["zero-shot", "adapted"], top: int) -> Prediction:
    before, after = _side(engine, answer.zero_shot, top), _side(engine, answer.adapted, top)
    used = before if advised == "zero-shot" else after
    near = [Near(cosine=round(cosine, 4), **each._asdict()) for cosine, each in answer.near]
    return Prediction(
        predicted=used.predicted, probability=used.probability, by=advised, zero_shot=before, adapted=after, near=near
    )


def _row(engine: Engine, texts: Texts, i: int, answer: Answer, advised: Literal["zero-shot", "adapted"]) -> Row:
    used, text = _prediction(engine, answer, advised, 1), texts.read(i)
    before, after = (_side(engine, side, 1).predicted for side in (answer.zero_shot, answer.adapted))
    return Row(
        row=str(texts.ids[i]), text=text if isinstance(text, str) else " | ".join(text), predicted=used.predicted,
        probability=used.probability, zero_shot=before, adapted=after,
    )  # fmt: skip
