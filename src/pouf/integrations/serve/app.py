"""The web page and the JSON API of a run, as an ASGI application."""

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
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from torch import Tensor

from pouf import __version__
from pouf.data.tables import TABLE_READERS
from pouf.data.texts import Texts
from pouf.errors import InputError
from pouf.integrations.serve.guard import BUSY, RETRY, Budget, Guard, Limits, Metrics, error_response
from pouf.integrations.serve.predictor import Answer, Batcher, Busy, RequestReader, RunPredictor
from pouf.recipe import Kind
from pouf.reporting.pages import LIGHT, render, script_data


class PredictRequest(BaseModel):
    """Inputs to classify: the field of the model's modality."""

    model_config = ConfigDict(extra="forbid")

    texts: list[str | list[str]] | None = Field(None, description="texts, or pairs of texts if the model reads pairs")
    images: list[str] | None = Field(None, description="image files in base64")
    vectors: list[list[float]] | None = Field(None, description="vectors of the model that computed the prototypes")


class MostLikely(BaseModel):
    predicted: str = Field(serialization_alias="class", description="the most likely class")
    probability: float


class ModelPrediction(MostLikely):
    probabilities: dict[str, float] = Field(description="of the most likely classes, in descending order")


class NearestInput(BaseModel):
    """A training input that is similar to this one."""

    name: str
    image: str = Field(description="a small picture as a data URL, or empty")
    text: str
    predicted: str
    cosine: float


class Prediction(MostLikely):
    """By the advised classifier; with `details`, also both classifiers and the nearest training inputs."""

    by: Literal["zero-shot", "adapted"]
    zero_shot: ModelPrediction | None = None
    adapted: ModelPrediction | None = None
    near: list[NearestInput] | None = None

    def short(self) -> Prediction:
        return Prediction(predicted=self.predicted, probability=self.probability, by=self.by)


class PredictResponse(BaseModel):
    predictions: list[Prediction]


class TableRow(MostLikely):
    row: str
    text: str
    zero_shot: str
    adapted: str


class TableResponse(BaseModel):
    rows: list[TableRow]
    skipped: list[str] = Field(description="unreadable rows, with the reason")


class Info(BaseModel):
    model: str | None = Field(description="name of the model; for a local folder the end of its path")
    kind: Kind
    classes: list[str]
    templates: list[str]
    verdict: str
    level: Literal["alarm", "caution", "unverified", "confirmed"]
    advised: Literal["zero-shot", "adapted"]
    columns: list[str]
    limits: dict[str, float]
    pouf: str


class ErrorResponse(BaseModel):
    error: str


LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
ImageFiles = Annotated[list[UploadFile], File(description="images")]
TableFile = Annotated[UploadFile, File(description=f"a table of texts: {', '.join(TABLE_READERS)}")]
ColumnName = Annotated[str, Form(description="column of the texts, or two for pairs: a,b")]
TopClasses = Annotated[int, Query(ge=1, description="with details: number of classes with their probabilities")]
Details = Annotated[bool, Query(description="zero-shot and adapted side by side, and the nearest training inputs")]
Side = Literal["zero-shot", "adapted"]
JSON_PATHS = ("/api/predict",)
logger = logging.getLogger(__name__)


class Service:
    """Answers requests with a run: reads samples, batches them, and formats predictions."""

    def __init__(self, predictor: RunPredictor, limits: Limits) -> None:
        self.predictor, self.limits, self.metrics = predictor, limits, Metrics()
        self.reader, self.info = RequestReader(predictor, limits), _info(predictor, limits)
        self.batcher = Batcher(predictor.answers, limits.batch, limits.waiting, self.metrics.batches.observe)
        self.bodies, self.pixels = Budget(max(limits.bodies, limits.upload)), Budget(limits.pixels)
        self.metrics.waiting.set_function(self.batcher.waiting.qsize)

    @property
    def is_ready(self) -> bool:
        return not self.batcher.is_full and self.bodies.free >= self.limits.upload

    async def predict(self, samples: Sequence[Any], details: bool, top: int) -> PredictResponse:
        """Classify samples; images are given as the bytes of files."""
        answers = await (self._classify_images if self.reader.modality == "image" else self.batcher)(samples)
        predictions = [_prediction(self.predictor, answer, self.info.advised, top) for answer in answers]
        return PredictResponse(predictions=predictions if details else [each.short() for each in predictions])

    async def _classify_images(self, contents: Sequence[bytes]) -> list[Answer]:
        """Decode when there is room for their pixels, and free it with the answers."""
        size = await run_in_threadpool(self.reader.pixels, contents)
        if size > self.limits.pixels:
            raise HTTPException(
                413, f"the images have {size:,} pixels, more than {self.limits.pixels:,}: send fewer at once"
            )
        async with self.pixels.reserve(size):
            return await self.batcher(await run_in_threadpool(self.reader.decode, contents))

    async def classify_table(self, name: str, content: bytes, column: str) -> TableResponse:
        """Classify every readable text of a table."""
        texts = await run_in_threadpool(self.reader.texts, name, content, column)
        readable = [i for i in range(len(texts)) if i not in texts.skipped]
        rows: list[TableRow] = []
        for start in range(0, len(readable), self.limits.batch):  # one batch at a time: others want answers too
            indices = readable[start : start + self.limits.batch]
            answers = await self.batcher([texts.read(i) for i in indices])
            rows += [
                _row(self.predictor, texts, i, a, self.info.advised) for i, a in zip(indices, answers, strict=True)
            ]
        skipped = [f"row {texts.ids[i]}: {why}" for i, why in sorted(texts.skipped.items())]
        return TableResponse(rows=rows, skipped=skipped)


def make_app(predictor: RunPredictor, limits: Limits | None = None, hosts: Sequence[str] = LOCAL_HOSTS) -> FastAPI:
    """The web page and the API, with their limits and metrics.

    Args:
        hosts: accepted host names. Others are refused, since another site could resolve its name to this address.
    """
    limits = limits or Limits()
    service = Service(predictor, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        service.batcher.stop()

    app = FastAPI(
        title="pouf", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="A zero-shot classifier that was adapted without labels, next to its zero-shot predictions.",
    )  # fmt: skip
    app.add_middleware(
        Guard, limits=limits, metrics=service.metrics, bodies=service.bodies, json_paths=JSON_PATHS,
        paths=lambda: {r.path for r in app.routes},  # type: ignore[attr-defined]
    )  # fmt: skip
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    _handle_errors(app)
    _add_pages(app, service)
    _add_monitoring(app, service)
    _add_api(app, service)
    return app


def _add_pages(app: FastAPI, service: Service) -> None:
    run, info = service.predictor.run, service.info
    page = render("serve.html", info=info, verdict=run.verdict, title=run.name,
                  light=LIGHT, info_json=script_data(info.model_dump()))  # fmt: skip

    @app.get("/", include_in_schema=False)
    def index() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(render("api.html", spec=app.openapi(), light=LIGHT))


def _add_monitoring(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    def health() -> dict[str, str]:
        """Whether the server answers, under any load; if not, restart it."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": ErrorResponse}})
    async def ready() -> dict[str, str]:
        """Whether there is room for another request; if not, send none for a while."""
        if not service.is_ready:
            raise Busy
        return {"status": "ready"}

    @app.get("/metrics")
    def metrics_text() -> Response:
        """Requests, their times, and sizes of batches, for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")


def _add_api(app: FastAPI, service: Service) -> None:
    errors: dict[int | str, dict[str, Any]] = {code: {"model": ErrorResponse} for code in (408, 413, 422, 429, 503)}
    reader = service.reader

    @app.get("/api/info")
    def info() -> Info:
        """Model, classes, verdict and limits."""
        return service.info

    @app.post("/api/predict", responses=errors, response_model_exclude_none=True)
    async def predict_json(request: PredictRequest, details: Details = False, top: TopClasses = 10) -> PredictResponse:
        """Classify texts, images in base64 or vectors: the modality of the model."""
        samples = await run_in_threadpool(reader.samples, request.model_dump(exclude_none=True))
        return await service.predict(samples, details, top)

    @app.post("/api/files", responses=errors, response_model_exclude_none=True)
    async def predict_files(files: ImageFiles, details: Details = False, top: TopClasses = 10) -> PredictResponse:
        """Classify image files."""
        reader.check_files(files)
        return await service.predict([await file.read() for file in files], details, top)

    @app.post("/api/table", responses=errors)
    async def predict_table(file: TableFile, column: ColumnName = "") -> TableResponse:
        """Classify every text of a table."""
        return await service.classify_table(file.filename or "", await file.read(), column)


def _handle_errors(app: FastAPI) -> None:
    """Every error is one object with one message."""

    async def explain(request: Request, error: Exception) -> Response:
        if isinstance(error, InputError):
            return error_response(422, str(error))
        if isinstance(error, Busy):
            return error_response(503, BUSY, RETRY)
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))
            problem = f"{where}: {first['msg']}" if where else first["msg"]
            return error_response(422, f"{problem}. What {request.url.path} takes is described at /docs")
        if isinstance(error, HTTPException):
            return error_response(error.status_code, str(error.detail), error.headers)
        logger.exception("an unexpected error", exc_info=error)
        return error_response(500, f"unexpected {type(error).__name__}: this is a bug in pouf")

    for kind in (InputError, Busy, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, explain)


def _info(predictor: RunPredictor, limits: Limits) -> Info:
    classifier, verdict = predictor.classifier, predictor.run.verdict
    name = None if classifier.model is None else "/".join(Path(classifier.model).parts[-2:])
    return Info(
        model=name, kind=classifier.kind, classes=list(classifier.classes),
        templates=[] if classifier.kind == "vector" else list(classifier.templates), verdict=str(verdict),
        level=verdict.level, advised="zero-shot" if verdict.advised == "zero-shot" else "adapted",
        columns=list(classifier.columns), limits=vars(limits), pouf=__version__,
    )  # fmt: skip


def _side(predictor: RunPredictor, probabilities: Tensor, top: int) -> ModelPrediction:
    best = probabilities.topk(min(top, len(probabilities)))
    names = [predictor.classifier.classes[k] for k in best.indices.tolist()]
    shares = dict(zip(names, (round(p, 6) for p in best.values.tolist()), strict=True))
    return ModelPrediction(predicted=names[0], probability=shares[names[0]], probabilities=shares)


def _prediction(predictor: RunPredictor, answer: Answer, advised: Side, top: int) -> Prediction:
    before, after = _side(predictor, answer.zero_shot, top), _side(predictor, answer.adapted, top)
    used = before if advised == "zero-shot" else after
    near = [NearestInput(cosine=round(cosine, 4), **each._asdict()) for cosine, each in answer.near]
    return Prediction(
        predicted=used.predicted, probability=used.probability, by=advised, zero_shot=before, adapted=after, near=near
    )


def _row(predictor: RunPredictor, texts: Texts, i: int, answer: Answer, advised: Side) -> TableRow:
    before, after = (_side(predictor, side, 1) for side in (answer.zero_shot, answer.adapted))
    used, text = before if advised == "zero-shot" else after, texts.read(i)
    return TableRow(
        row=str(texts.ids[i]), text=text if isinstance(text, str) else " | ".join(text), predicted=used.predicted,
        probability=used.probability, zero_shot=before.predicted, adapted=after.predicted,
    )  # fmt: skip
