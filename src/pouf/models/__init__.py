"""Backbones: one class per kind of model, with a common interface."""

from pouf.models.base import Backbone
from pouf.models.load import EMBEDDED, load_backbone, load_sequence_classifier

__all__ = ["EMBEDDED", "Backbone", "load_backbone", "load_sequence_classifier"]
