"""What several processes save: step time, memory and bytes sent per rank, against an earlier version in the same run.

    git worktree add ../pouf-before 08d75de                                     # the last version with its own loop
    python benchmarks/scaling.py --against ../pouf-before/src --out benchmarks/results/scaling.json
    python benchmarks/scaling.py --only memory predict                          # some of it

About ten minutes on two idle cores. CLIP ViT-B/32 (151 million weights, 0.6 GB) with random weights and pictures of
noise, gloo on CPU, one thread per process. Every figure is of a process group of its own, and of the rank with the
largest. Bytes are those that crossed the loopback device in the second and later steps, both ways
counted once, divided by the steps and the ranks; another program that talks to itself on the same machine is counted
along. Times are the fastest of the steps after the first, on the clock and of the processor: where others use the
machine as well, the former says little. Memory is the most that a process had at once, its libraries (0.4 GB) included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
STEPS = 3
INPUTS = 256  # that are predicted


def launch(source: Path, processes: int, task: str, options: dict[str, Any]) -> list[dict[str, float]]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [str(HERE / "scaling.py"), "--task", task, "--options", json.dumps(options), "--folder", folder]
        path = os.pathsep.join([str(source), str(HERE)])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        # Freed tensors go back to the system at once: otherwise the C library keeps gigabytes of them for later.
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**17)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(ended.stderr[-4000:])
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def loopback() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


def take_steps(
    folder: Path, k: int, batch: int, templates: int = 1, steps: int = STEPS, text_layers: int = 12, **settings: Any
) -> dict[str, float]:
    """Full steps of training."""
    from speed import names, pictures, vit

    from pouf import Callback, Classifier, Images, Recipe, Step

    marks: list[tuple[float, float, int]] = []

    class Marks(Callback):
        def on_step(self, step: Step) -> None:
            marks.append((time.perf_counter(), time.process_time(), loopback()))

    sentences = ["a photo of a {}.", *(f"a thing{i} photo of a {{}}." for i in range(1, templates))]
    backbone = vit(32)
    del backbone.model.text_model.encoder.layers[text_layers:]
    many = [f"thing{i % 100} thing{100 + i // 100}" for i in range(k)]
    classifier = Classifier(backbone, names(k) if k < 400 else many, sentences)
    plain = {"steps": steps, "batch_size": batch, "augment": "none", "snapshots": 0, "tuner.name": "full"}
    data = Images(pictures(batch))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe = Recipe().with_settings(**{"optimisation.lr": 1e-7, **plain, **settings})
    classifier.adapt(data, recipe=recipe, callbacks=[Marks()])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = {"gigabytes": peak / 2**20, "gigabytes_loaded": before / 2**20}
    taken = list(pairwise(marks))
    if taken:
        sent = (marks[-1][2] - marks[0][2]) / len(taken) / int(os.environ["WORLD_SIZE"]) / 2**20
        facts |= {"seconds": min(b[0] - a[0] for a, b in taken), "cpu_seconds": min(b[1] - a[1] for a, b in taken)}
        facts["megabytes_sent"] = sent
    return facts


def predict(folder: Path, n: int) -> dict[str, float]:
    """As `pouf predict` does, but for loading the model."""
    import torch
    from speed import names, pictures, vit

    from pouf import Classifier, Images, InferenceConfig
    from pouf.parallel.process_group import together
    from pouf.runs.predict import predict_share

    classifier, data = Classifier(vit(32), names(31)), Images(pictures(n))
    with together(torch.device("cpu")) as group:
        classifier.infer(Images(data.items[:16]))
        group.gather_objects(0)
        start, cpu = time.perf_counter(), time.process_time()
        predict_share(folder / "predictions.parquet", classifier, data, InferenceConfig(16))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu}


TASKS = {"steps": take_steps, "predict": predict}


def steps(against: Path | None) -> list[dict[str, Any]]:
    """Step time, memory and bytes per rank: the earlier loop, DDP and FSDP2, by the number of processes."""
    rows = []
    for k in (31, 345):
        for processes in (1, 2):
            engines: dict[str, tuple[Path, dict[str, Any]]] = {"DDP": (SOURCE, {})}
            if processes > 1:
                engines["FSDP2"] = (SOURCE, {"compute.shard": True})
            if against is not None:
                engines = {"before": (against, {})} | engines
            for name, (source, settings) in engines.items():
                # Many classes take long: one step after the first must do there.
                options = {"k": k, "batch": 8, "steps": STEPS if k < 100 else 2} | settings
                found = launch(source, processes, "steps", options)
                rows.append({"classes": k, "processes": processes, "engine": name, **largest(found)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def memory(against: Path | None) -> list[dict[str, Any]]:
    """Weights, gradients, AdamW's two moments, the last good weights and checkpoints: copied in each, or sharded."""
    rows = []
    for processes, engine in ((1, "one"), (2, "DDP"), (2, "FSDP2"), (3, "FSDP2")):
        options = {"k": 8, "batch": 6, "steps": 2, "snapshots": 1, "optimisation.name": "adamw"}
        if engine == "FSDP2":
            options["compute.shard"] = True
        rows.append({"processes": processes, "engine": engine, **largest(launch(SOURCE, processes, "steps", options))})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def largest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(max(rank[name] for rank in ranks), 3) for name in ranks[0]}


def prompts(against: Path | None) -> list[dict[str, Any]]:
    """Memory of one step with 1,000 classes in up to 10 templates, whole and in chunks, as the inputs are.

    The text tower has 2 of its 12 layers here: 10,000 prompts would take a quarter of an hour otherwise.
    """
    rows = []
    for templates, chunk in ((1, 0), (1, 32), (10, 32)):
        options = {"k": 1000, "batch": 8, "templates": templates, "steps": 1, "text_layers": 2, "compute.chunk": chunk}
        rows.append({"prompts": 1000 * templates, "chunk": chunk, **largest(launch(SOURCE, 1, "steps", options))})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def predictions(against: Path | None) -> list[dict[str, Any]]:
    """Predictions per second by one and by two processes, each with one thread."""
    rows = []
    for processes in (1, 2):
        found = largest(launch(SOURCE, processes, "predict", {"n": INPUTS}))
        rows.append({"processes": processes, **found, "inputs_per_second": round(INPUTS / found["seconds"], 2)})
        rows[-1]["times_as_fast"] = round(rows[0]["seconds"] / found["seconds"], 2)
        print(json.dumps(rows[-1]), flush=True)
    return rows


PARTS = {"steps": steps, "memory": memory, "prompts": prompts, "predict": predictions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--against", type=Path, help="the src folder of an earlier version")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", choices=list(TASKS), help=argparse.SUPPRESS)  # what a rank of a process group does
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        found = TASKS[arguments.task](arguments.folder, **arguments.options)
        (arguments.folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
        return
    results = {name: PARTS[name](arguments.against) for name in arguments.only}
    if arguments.out:
        earlier = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        arguments.out.write_text(json.dumps(earlier | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
