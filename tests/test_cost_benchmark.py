"""The benchmark of what a run costs divides it by functions of the package, which can move."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def cost():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("cost")
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("cost", None)


def test_every_function_that_is_timed_is_there(cost) -> None:
    for path in (path for paths in cost.PARTS.values() for path in paths):
        module, names = path.split(":")
        owner = importlib.import_module(f"pouf.{module}")
        for name in names.split("."):
            owner = getattr(owner, name)
        assert callable(owner), path


def test_the_time_of_a_part_is_without_that_of_the_parts_it_calls(cost) -> None:
    now = 0.0
    cost.time = SimpleNamespace(process_time=lambda: now)
    clock = cost.Clock()

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    encode = clock.wrap("encoding", lambda: spend(3))
    read = clock.wrap("reading", lambda: spend(1))

    def look() -> None:
        spend(10)
        encode()
        read()

    clock.wrap("looking", look)()
    encode()
    clock.mark()
    assert dict(clock.seconds) == {"looking": 13, "reading": 1, "encoding": 3, "all else": 0}
    assert sum(clock.seconds.values()) == now
