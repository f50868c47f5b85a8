"""What a run brings besides its classifier: predictions and a report, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pouf.cli._console import out

if TYPE_CHECKING:
    import torch

    from pouf.data.base import Unlabelled
    from pouf.inference import InferenceConfig


def use_run(run: Path, data: Unlabelled, inference: InferenceConfig, device: torch.device | str) -> dict[str, str]:
    """What the run advises to use says of the data it was adapted to, as a file and as a report; their names."""
    from pouf.reporting.html import write_report
    from pouf.runs.folder import PREDICTIONS, load_run
    from pouf.runs.predictions import prediction_rows, writer_for

    file = run / PREDICTIONS
    used = load_run(run).to(device)
    writer_for(file)(file, prediction_rows(used.classes, data, used.score_features(used.encode(data, inference))))
    return {"predictions": str(file), "report": str(write_report(run, data, inference=inference, device=device))}


def tell_files(facts: Mapping[str, Any]) -> None:
    out.print(f"The run is in {facts['run']}", markup=False, soft_wrap=True)
    for name in ("predictions", "report"):
        if name in facts:
            out.print(f"  {name}: {facts[name]}", markup=False, soft_wrap=True)
