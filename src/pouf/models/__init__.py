"""One adapter for each kind of model, behind one small protocol."""

from pouf.models.base import Backbone
from pouf.models.load import EMBEDDED, load_backbone, load_sequence_classifier

__all__ = ["EMBEDDED", "Backbone", "load_backbone", "load_sequence_classifier"]
