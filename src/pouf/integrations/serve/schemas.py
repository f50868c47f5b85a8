"""Requests and answers of the API."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pouf.recipe import Kind


class Question(BaseModel):
    """Inputs to classify: one of the three, as the model reads it."""

    model_config = ConfigDict(extra="forbid")

    texts: list[str | list[str]] | None = Field(
        None, description="texts, or pairs of texts where the model reads pairs"
    )
    images: list[str] | None = Field(None, description="image files in base64")
    vectors: list[list[float]] | None = Field(None, description="vectors of the model that made the prototypes")


class Named(BaseModel):
    predicted: str = Field(serialization_alias="class", description="the most likely class")
    probability: float


class Side(Named):
    probabilities: dict[str, float] = Field(description="of the most likely classes, the first one first")


class Near(BaseModel):
    """A training input near to this one."""

    name: str
    image: str = Field(description="a small picture as a data address, or nothing")
    text: str
    predicted: str
    cosine: float


class Prediction(Named):
    """By what the run advises; with `details`, both sides and the nearest training inputs."""

    by: Literal["zero-shot", "adapted"]
    zero_shot: Side | None = None
    adapted: Side | None = None
    near: list[Near] | None = None

    def short(self) -> Prediction:
        return Prediction(predicted=self.predicted, probability=self.probability, by=self.by)


class Predictions(BaseModel):
    predictions: list[Prediction]


class Row(Named):
    row: str
    text: str
    zero_shot: str
    adapted: str


class Table(BaseModel):
    rows: list[Row]
    skipped: list[str] = Field(description="rows that could not be read, and why")


class Info(BaseModel):
    model: str | None = Field(description="its name; of a local folder the end of its path")
    kind: Kind
    classes: list[str]
    templates: list[str]
    verdict: str
    level: Literal["alarm", "caution", "unverified", "confirmed"]
    advised: Literal["zero-shot", "adapted"]
    columns: list[str]
    limits: dict[str, float]
    pouf: str


class Fault(BaseModel):
    error: str
