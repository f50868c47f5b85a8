"""Requests and responses of the API."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pouf.recipe import Kind


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
