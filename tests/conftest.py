"""Small real parts that the tests share: models built from their config classes, real files, no network."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import threading

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["POUF_CACHE"] = tempfile.mkdtemp(prefix="pouf-cache-")

from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import REVIEWS, groups
from hub_server import hub as serve_hub
from PIL import Image
from small_models import masked_lm, sentence_encoder

import pouf
from pouf import EMBEDDED, Classifier
from pouf.demo import DIGITS, write_digits

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as of what nohup runs
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
atexit.register(shutil.rmtree, os.environ["POUF_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits, one sub-folder a class."""
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def few_digits(digits_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every twelfth digit: 150 images."""
    folder = tmp_path_factory.mktemp("few")
    for i, path in enumerate(sorted(digits_folder.rglob("*.png"), key=lambda p: p.name)):
        if i % 12 == 0:
            target = folder / path.parent.name / path.name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """A hub of one's own, with its repositories in tmp_path / "hub"."""
    with serve_hub(tmp_path / "hub") as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


@pytest.fixture
def tiny() -> Classifier:
    """The embedded model with the ten digits as classes."""
    return Classifier.from_pretrained(EMBEDDED, DIGITS)


@pytest.fixture
def pictures() -> list[Image.Image]:
    """Twelve pictures of noise, always the same."""
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)) for _ in range(12)]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A real one, without a window."""
    selenium = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium with its driver: install Debian's packages chromium and chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    downloads = tmp_path_factory.mktemp("downloads")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--window-size=1100,900", f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    window = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    window.downloads = downloads
    yield window
    window.quit()


@pytest.fixture(scope="session")
def material(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the documentation takes for granted, under the names it uses: a hub name may be a local folder."""
    folder = tmp_path_factory.mktemp("material")
    for part in ("photos", "more-photos"):
        (folder / part).mkdir()
    for i, image in enumerate(sorted(few_digits.rglob("*.png"), key=lambda path: path.name)):
        if i % 3 == 0:
            shutil.copy(image, folder / "photos")
        elif i % 6 == 1:
            shutil.copy(image, folder / "more-photos")
            (folder / "labelled-photos" / image.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(image, folder / "labelled-photos" / image.parent.name)
    (folder / "digits.txt").write_text("".join(f"{name}\n" for name in DIGITS))
    for name, texts in (("reviews", REVIEWS * 4), ("questions", REVIEWS * 4), ("more-reviews", REVIEWS[::-1])):
        (folder / f"{name}.csv").write_text("text\n" + "".join(f"{text} {i}\n" for i, text in enumerate(texts)))
    sentence_encoder(folder / "sentence-transformers" / "all-MiniLM-L6-v2")
    shutil.copytree(Path(pouf.__file__).parent / "assets" / "tiny-clip", folder / "openai/clip-vit-base-patch16")
    masked_lm(folder / "roberta-base", "roberta")
    features, prototypes = groups(spread=0.4, apart=0.4)
    np.save(folder / "features.npy", features.numpy())
    np.save(folder / "more-features.npy", features.flip(0)[:30].numpy())
    np.savez(folder / "prototypes.npz", prototypes=prototypes.numpy(), names=np.array(list("abcdef")))
    return folder


@pytest.fixture
def in_folder() -> Iterator[Callable[[Path], None]]:
    """Makes a folder the current one, for the rest of a test."""
    before = Path.cwd()
    yield os.chdir
    os.chdir(before)


@pytest.fixture
def environment() -> Iterator[Callable[..., None]]:
    """Sets variables of the environment for the rest of a test; None removes one."""

    def change(**variables: object) -> None:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = str(value)

    before = dict(os.environ)
    yield change
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hides a package, for the rest of a test: as where its extra is not installed."""
    return lambda package: monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def place(material: Path, tmp_path: Path, in_folder: Callable[[Path], None]) -> Path:
    """A folder of one's own with all of it, which the code runs in."""
    folder = tmp_path / "here"
    shutil.copytree(material, folder)
    in_folder(folder)
    return folder
