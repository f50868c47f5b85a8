"""What it takes until pouf works: `pouf --help`, `import pouf`, and a prediction, as ratios to `import torch`.

    python benchmarks/startup.py

Each is a process of its own, measured by CPU seconds, all of them in turns; the smallest of some rounds counts. Of
`pouf predict RUN one.jpg` and of `Classifier.from_pretrained(RUN).predict("one.jpg")` the time is divided: what is
imported, the model loaded, the picture encoded, and the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 5
COMMANDS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import pouf": ["-c", "import pouf"],
    "from pouf import Classifier": ["-c", "from pouf import Classifier"],
    "pouf --help": ["-m", "pouf", "--help"],
    "pouf predict --help": ["-m", "pouf", "predict", "--help"],
}
# The parts of a prediction, in a process that reports its own CPU seconds at each.
PREDICT = """
import json, sys, time
clock = time.process_time
marks = {"python": clock()}
import torch
marks["import torch"] = clock()
import transformers
from transformers import CLIPModel, CLIPTokenizerFast, CLIPImageProcessor
marks["import transformers"] = clock()
loaded = encoded = 0.0

def timed(owner, name, add):
    original = getattr(owner, name)
    def wrapper(*arguments, **options):
        start = clock()
        try:
            return original(*arguments, **options)
        finally:
            add(clock() - start)
    setattr(owner, name, wrapper)

from pouf.cli import main
from pouf import saving
from pouf.models import load
marks["import pouf"] = clock()
from pouf.models.vision import DualEncoder

parts = {"load the model": 0.0, "encode": 0.0}
timed(saving, "load_backbone", lambda s: parts.__setitem__("load the model", parts["load the model"] + s))
for name in ("encode_inputs", "encode_prompts", "prepare"):
    timed(DualEncoder, name, lambda s: parts.__setitem__("encode", parts["encode"] + s))
sys.argv = ["pouf", "predict", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print(json.dumps({"marks": marks, "parts": parts, "all": clock()}), file=sys.stderr)
"""


def cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ratios(rounds: int) -> dict[str, float]:
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            best[name] = min(best[name], cpu_seconds(arguments))
    for name, seconds in best.items():
        print(f"{name:<30}{seconds:7.2f} s{seconds / best['import torch']:7.2f} of import torch")
    return best


def prediction(rounds: int, best: dict[str, float]) -> None:
    from PIL import Image

    from pouf import EMBEDDED, Classifier
    from pouf.demo import DIGITS

    with tempfile.TemporaryDirectory() as folder:
        Classifier.from_pretrained(EMBEDDED, DIGITS).save_pretrained(Path(folder, "run"))
        Image.new("RGB", (640, 480), "white").save(Path(folder, "one.jpg"))
        found = []
        for _ in range(rounds):
            done = subprocess.run(
                [sys.executable, "-c", PREDICT, f"{folder}/run", f"{folder}/one.jpg"],
                capture_output=True, text=True, check=True, cwd=folder, env={**os.environ, "COLUMNS": "100"},
            )  # fmt: skip
            found.append(json.loads(done.stderr.strip().splitlines()[-1]))
        facts = min(found, key=lambda each: float(each["all"]))
    marks, parts = facts["marks"], facts["parts"]
    rest = facts["all"] - marks["import pouf"] - sum(parts.values())
    print("\npouf predict run one.jpg, CPU seconds:")
    before = 0.0
    for name, seconds in marks.items():
        print(f"  {name:<28}{seconds - before:7.2f} s")
        before = seconds
    for name, seconds in (*parts.items(), ("all else", rest)):
        print(f"  {name:<28}{seconds:7.2f} s")
    print(f"  all else is {rest / (parts['load the model'] + parts['encode']):.2f} of loading and encoding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    prediction(chosen.rounds, ratios(chosen.rounds))


if __name__ == "__main__":
    main()
