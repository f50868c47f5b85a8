"""Two hosts, which are network namespaces of this machine, take the steps of one process; one of them is lost.

pytest -m slow tests/parallel/test_two_hosts.py          # on Linux, as root, with iproute2
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_cases import long_run
from helpers import weights
from PIL import Image

from pouf import Classifier

SCRIPT = str(Path(__file__).parent / "distributed_cases.py")
TIMEOUT = 30  # seconds
HOSTS = ("a", "b")

pytestmark = pytest.mark.slow


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """A network namespace with one interface."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address, self.link = f"pouf-{name}-{os.getpid()}", f"10.111.0.{number}", f"pouf{name}"

    def start(self, folder: Path, out: Path, **environment: str) -> subprocess.Popen[str]:
        """Its agent, with one process; the first host keeps the store of the rendezvous."""
        is_host = str(self.address == "10.111.0.1")
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                   "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.111.0.1:29500",
                   "--rdzv-conf", f"is_host={is_host}", "--local-addr", self.address, SCRIPT, str(folder),
                   str(out)]  # fmt: skip
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.link, "LONG_RUN": "yes",
               "POUF_PROCESS_TIMEOUT": str(TIMEOUT)}  # fmt: skip
        return subprocess.Popen(command, env=os.environ | own | environment, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)  # fmt: skip

    def connect(self, state: str) -> None:
        ip("-n", self.name, "link", "set", self.link, state)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts on one cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    both = [Host(name, number) for number, name in enumerate(HOSTS, 1)]
    try:
        for host in both:
            ip("netns", "add", host.name)
        ip("link", "add", both[0].link, "netns", both[0].name, "type", "veth", "peer", "name", both[1].link, "netns",
           both[1].name)  # fmt: skip
        for host in both:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
            ip("-n", host.name, "link", "set", "lo", "up")
            host.connect("up")
    except subprocess.CalledProcessError as error:
        remove(both)
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
    yield both
    remove(both)


def remove(hosts: list[Host]) -> None:
    for host in hosts:
        subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


def wait_for_step(file: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 180
    while not file.is_file() or int(file.read_text() or 0) < step:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < end, "the run does not get that far"
        time.sleep(0.1)


def kill(process: subprocess.Popen[str]) -> None:
    """With all that it started."""
    if process.poll() is None:
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        for pid in (*map(int, children.stdout.split()), process.pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("lost", [1, 0])
def test_when_a_host_is_lost_the_other_ends_and_says_why_and_both_resume(
    hosts: list[Host], tmp_path: Path, lost: int
) -> None:
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    noise = np.random.default_rng(0)
    for i in range(17):
        Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(images / f"{i}.png")
    running = [host.start(tmp_path, out, SLOW_STEPS="yes") for host in hosts]
    try:
        wait_for_step(out / "step", 3, running[0])
        hosts[lost].connect("down")  # no packet says that it is gone
        kill(running[lost])
        start = time.monotonic()
        stderr = running[1 - lost].communicate(timeout=TIMEOUT + 60)[1]
        assert running[1 - lost].returncode != 0
        assert f"another process has not answered for {TIMEOUT} seconds" in stderr
        assert time.monotonic() - start < TIMEOUT + 60
        hosts[lost].connect("up")
        running = [host.start(tmp_path, out) for host in hosts]
        for process in running:
            stderr = process.communicate(timeout=300)[1]
            assert process.returncode == 0, stderr[-3000:]
    finally:
        for process in running:
            kill(process)
    assert "resumed" in json.loads((out / "run" / "details/run.json").read_text())
    long_run(tmp_path, tmp_path / "alone")
    together, alone = (
        weights(Classifier.from_pretrained(each / "run", use="last")) for each in (out, tmp_path / "alone")
    )
    assert together.keys() == alone.keys()
    assert all(torch.allclose(together[name], alone[name], atol=1e-5) for name in alone)
