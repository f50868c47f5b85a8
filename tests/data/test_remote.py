"""Inputs elsewhere: fsspec's local and memory file systems, and a real server."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
from cli_runner import pouf

from pouf import EMBEDDED, Classifier, FeatureCache, Images, InferenceConfig, InputError, Texts, Vectors
from pouf.data.contents import as_url
from pouf.demo import DIGITS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, few_digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for i, file in enumerate(sorted(few_digits.rglob("*.png"))[:40:5]):
        target = folder / "photos" / ("a" if i % 2 else "b") / f"{i}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    (folder / "photos" / "a" / "broken.png").write_bytes(b"no picture")
    (folder / "photos" / "notes.txt").write_text("no picture either")
    (folder / "texts.csv").write_text("text,label\ngood film,1\nbad film,0\n")
    np.save(folder / "vectors.npy", np.eye(5, dtype=np.float32))
    return folder


@pytest.fixture(scope="module")
def places(folder: Path) -> Iterator[dict[str, str]]:
    """The same folder by three kinds of address."""
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/served", recursive=True)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "file": f"file://{folder}",
        "memory": "memory://served",
        "http": f"http://127.0.0.1:{server.server_address[1]}",
    }
    server.shutdown()
    memory.rm("/served", recursive=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, environment: Callable[..., None]) -> None:
    environment(POUF_CACHE=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["file", "memory", "http"])
def test_a_folder_of_images_elsewhere_is_a_folder_of_images(
    kind: str, places: dict[str, str], folder: Path, tiny: Classifier, tmp_path: Path
) -> None:
    if kind == "http":
        pytest.importorskip("aiohttp")
    here, there = Images.from_folder(folder / "photos"), Images.from_folder(f"{places[kind]}/photos")
    assert list(there.ids) == list(here.ids)
    cached = InferenceConfig(cache=FeatureCache(tmp_path / "features"))
    expected, found = tiny.infer(here), tiny.infer(there, cached)
    assert found.indices == expected.indices and list(there.skipped) == list(here.skipped)
    assert np.allclose(found.log_probabilities, expected.log_probabilities, atol=1e-5)
    again = tiny.infer(Images.from_folder(Path(f"{places[kind]}/photos")), cached)  # a Path has one slash less
    assert np.allclose(again.log_probabilities, expected.log_probabilities, atol=1e-5)


@pytest.mark.parametrize("kind", ["file", "memory", "http"])
def test_files_of_texts_and_vectors_elsewhere_are_copied_once(
    kind: str, places: dict[str, str], tmp_path: Path
) -> None:
    if kind == "http":
        pytest.importorskip("aiohttp")
    for _ in range(2):
        texts = Texts.from_file(f"{places[kind]}/texts.csv")
        assert [texts.read(i) for i in range(2)] == ["good film", "bad film"] and texts.source.startswith(kind)
        assert Vectors.from_file(f"{places[kind]}/vectors.npy").array.shape == (5, 5)
    assert len([file for file in (tmp_path / "cache" / "files").rglob("*") if file.is_file()]) == 2


def test_what_is_not_there_and_what_nobody_knows_are_clear_errors(places: dict[str, str]) -> None:
    with pytest.raises(InputError, match="no images in 'memory:///nowhere'"):
        Images.from_folder("memory://nowhere")
    with pytest.raises(InputError, match=r"can't read 'memory:///nowhere\.csv'"):
        Texts.from_file("memory://nowhere.csv")
    with pytest.raises(InputError, match="can't open 'teapot://photos'"):
        Images.from_folder("teapot://photos")
    assert as_url("photos/a.png") is None and as_url("C:/photos") is None
    assert as_url(Path("s3://bucket/photos")) == "s3://bucket/photos"


def test_the_command_line_takes_addresses(places: dict[str, str], tmp_path: Path) -> None:
    pouf("adapt", f"{places['file']}/photos", "--model", EMBEDDED, "--classes", ",".join(DIGITS), "--recipe", "demo",
         "--steps", "1", "--out", "run", cwd=tmp_path)  # fmt: skip
    pouf("predict", "run", f"{places['file']}/photos", "--out", "p.csv", cwd=tmp_path)
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 9
