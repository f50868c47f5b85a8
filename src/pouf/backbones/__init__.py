"""One adapter for each kind of model, behind one small protocol."""

from pouf.backbones.base import Backbone
from pouf.backbones.load import EMBEDDED, load_backbone, load_fresh_head

__all__ = ["EMBEDDED", "Backbone", "load_backbone", "load_fresh_head"]
