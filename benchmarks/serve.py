"""Throughput and times of `pouf serve` under concurrent requests, against one request after the other.

The embedded model, adapted to handwritten digits, behind the real command on loopback. Each request is one image. In
every round three take turns: one request after the other; many clients at once; the same against a server that computes
every request alone (`--batch-size 1`).

    python benchmarks/serve.py

With `--memory`: peak memory of the server, as Linux counts it, while clients send images of 9400 x 9400 pixels.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from pouf import Classifier, Output
from pouf.demo import DIGITS, write_digits

HEADERS = {"Content-Type": "multipart/form-data; boundary=x"}
HEAD = b'--x\r\nContent-Disposition: form-data; name="files"; filename="x.png"\r\n\r\n'


class Server:
    """`pouf serve` as a process."""

    def __init__(self, run: Path, *options: str) -> None:
        command = [sys.executable, "-m", "pouf", "serve", str(run), "--port", "0", "--rate", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.port = int(next(found[1] for line in lines if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line))))

    def ask(self, images: list[bytes]) -> list[float]:
        """Seconds until each answer, over one connection; an answer that is lost or wrong is an error."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        seconds = []
        for image in images:
            start = time.perf_counter()
            connection.request("POST", "/api/files", HEAD + image + b"\r\n--x--\r\n", HEADERS)
            response = connection.getresponse()
            answer = json.loads(response.read())
            if response.status != 200 or len(answer["predictions"]) != 1:
                raise SystemExit(f"status {response.status}: {answer}")
            seconds.append(time.perf_counter() - start)
        connection.close()
        return seconds

    def peak(self) -> float:
        """The most memory that it has had, in GB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 2**20

    def crowd(self, images: list[bytes], clients: int) -> list[float]:
        """The same by many clients at once, each with its share."""
        with ThreadPoolExecutor(clients) as pool:
            return [
                second for part in pool.map(self.ask, (images[i::clients] for i in range(clients))) for second in part
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000, help="of each way and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = write_digits(Path(folder) / "digits")
        clf = Classifier.from_pretrained("pouf/tiny-clip", DIGITS)
        short = {"steps": 4, "batch_size": 32, "snapshots": 1} if given.memory else None
        clf.adapt(images, recipe="demo", settings=short, output=Output(Path(folder) / "run", report=False))
        if given.memory:
            measure_memory(Path(folder) / "run")
            return
        contents = [path.read_bytes() for path in sorted(images.rglob("*.png"))]
        requests = [contents[i % len(contents)] for i in range(given.requests)]
        batched, alone = Server(Path(folder) / "run"), Server(Path(folder) / "run", "--batch-size", "1")
        ways = {
            "one after the other": lambda: batched.ask(requests),
            f"{given.clients} clients": lambda: batched.crowd(requests, given.clients),
            f"{given.clients} clients, batches of 1": lambda: alone.crowd(requests, given.clients),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        times: dict[str, list[float]] = {way: [] for way in ways}
        try:
            for server in (batched, alone):
                server.ask(requests[:50])  # warm
            for _ in range(given.rounds):
                for way, call in ways.items():
                    start = time.perf_counter()
                    seconds = call()
                    rates[way].append(len(seconds) / (time.perf_counter() - start))
                    times[way] += seconds
        finally:
            for server in (batched, alone):
                server.process.terminate()
    first = rates["one after the other"]
    print("| requests | per second | times one after the other | p50, ms | p99, ms | lost |\n|---|---|---|---|---|---|")
    rows = {}
    for way in ways:
        ratio = statistics.median(rate / base for rate, base in zip(rates[way], first, strict=True))
        p50, p99 = (1e3 * statistics.quantiles(times[way], n=100)[i] for i in (49, 98))
        rows[way] = {"per_second": statistics.median(rates[way]), "ratio": ratio, "p50": p50, "p99": p99}
        print(f"| {way} | {rows[way]['per_second']:.0f} | {ratio:.2f} | {p50:.1f} | {p99:.1f} | 0 |")
    if given.out is not None:
        given.out.write_text(json.dumps({"settings": vars(given) | {"out": None}, "rows": rows}, indent=1) + "\n")


def measure_memory(run: Path) -> None:
    """Each number of clients asks a server of its own, one large image per client."""
    print("| clients | image | MB of it | peak memory, GB | slowest answer, s |\n|---|---|---|---|---|")
    for mode, clients in (("RGB", 0), ("RGB", 1), ("RGB", 24), ("RGBA", 24), ("I;16", 1)):
        stream = io.BytesIO()
        Image.new(mode, (9400, 9400)).save(stream, "PNG")
        server = Server(run)
        try:
            seconds = server.crowd([stream.getvalue()] * clients, clients) if clients else [0.0]
            size = stream.tell() / 2**20
            print(f"| {clients} | {mode} | {size:.2f} | {server.peak():.2f} | {max(seconds):.0f} |", flush=True)
        finally:
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    main()
