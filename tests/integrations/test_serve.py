"""A run behind its page and its API: real sockets, a real browser."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runner import pouf
from helpers import REVIEWS, groups
from PIL import Image
from small_models import sentence_encoder

from pouf import Classifier, Output
from pouf.demo import DIGITS
from pouf.runs.folder import Run

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
from pouf.integrations.serve.app import make_app  # noqa: E402
from pouf.integrations.serve.guard import Limits  # noqa: E402
from pouf.integrations.serve.predictor import Batcher, RunPredictor  # noqa: E402


class Served:
    """A run behind a port of this machine."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.engine, self.folder = RunPredictor(folder, neighbours=40), folder
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        app = make_app(self.engine, limits)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        if isinstance(body, (dict, list)):
            body, headers = json.dumps(body), {"Content-Type": "application/json"} | headers
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        kind = response.getheader("content-type", "")
        return response.status, json.loads(content) if "json" in kind else content.decode()

    def upload(self, path: str, name: str, content: bytes, field: str = "files", column: str = "") -> tuple[int, Any]:
        head = f'--x\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'.encode()
        form = f'\r\n--x\r\nContent-Disposition: form-data; name="column"\r\n\r\n{column}'.encode() if column else b""
        return self.ask("POST", path, head + content + form + b"\r\n--x--\r\n",
                        **{"Content-Type": "multipart/form-data; boundary=x"})  # fmt: skip

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def image_run(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    clf = Classifier.from_pretrained("pouf/tiny-clip", DIGITS)
    clf.adapt(
        few_digits,
        recipe="demo",
        settings={"steps": 4, "batch_size": 32, "snapshots": 1},
        output=Output(folder, report=False),
    )
    return folder


@pytest.fixture(scope="module")
def images(image_run: Path) -> Iterator[Served]:
    served = Served(image_run, Limits(upload=2**20, rate=0))
    yield served
    served.stop()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "reviews.csv").write_text("text\n" + "".join(f"{text} {i}\n" for i, text in enumerate(REVIEWS * 5)))
    clf = Classifier.from_pretrained(sentence_encoder(folder / "model"), ["bad", "good"])
    clf.adapt(folder / "reviews.csv", settings={"steps": 2}, output=Output(folder / "run", report=False))
    served = Served(folder / "run", Limits(inputs=4, rate=20))
    yield served
    served.stop()


def test_both_sides_are_those_of_the_run_and_neighbours_are_its_inputs(images: Served, few_digits: Path) -> None:
    picture = sorted(few_digits.rglob("*.png"))[5]
    status, answer = images.upload("/api/files?details=true&top=3", "a.png", picture.read_bytes())
    (prediction,) = answer["predictions"]
    assert status == 200 and len(prediction["adapted"]["probabilities"]) == 3
    run = Run(images.folder)
    for side, use in (("zero_shot", "zero-shot"), ("adapted", run.adapted)):
        wanted = Classifier.from_pretrained(images.folder, use=use).predict_proba([picture])[0]
        assert prediction[side]["class"] == DIGITS[int(wanted.argmax())]
        assert prediction[side]["probability"] == pytest.approx(float(wanted.max()), abs=1e-4)
    used = prediction["zero_shot" if run.verdict.advised == "zero-shot" else "adapted"]
    assert (prediction["class"], prediction["probability"]) == (used["class"], used["probability"])
    assert [near["cosine"] for near in prediction["near"]] == sorted(
        (n["cosine"] for n in prediction["near"]), reverse=True
    )
    assert all(near["image"].startswith("data:image/png") for near in prediction["near"])
    encoded = base64.b64encode(picture.read_bytes()).decode()
    assert images.ask("POST", "/api/predict?details=true&top=3", {"images": [encoded]}) == (200, answer)
    short = [{name: prediction[name] for name in ("class", "probability", "by")}]
    assert images.ask("POST", "/api/predict", {"images": [encoded]}) == (200, {"predictions": short})
    body = json.dumps({"images": [encoded]})
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):  # as of curl -d
        assert images.ask("POST", "/api/predict", body, **headers) == (200, {"predictions": short})


def test_two_hundred_concurrent_requests_are_all_answered_each_with_its_own(images: Served, few_digits: Path) -> None:
    pictures = sorted(few_digits.rglob("*.png"))
    contents = [pictures[i % len(pictures)].read_bytes() for i in range(200)]
    wanted = Classifier.from_pretrained(images.folder, use=Run(images.folder).adapted).predict_proba(pictures)
    batches_before = float(re.findall(r"pouf_batch_size_count (\S+)", images.ask("GET", "/metrics")[1])[0])
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda content: images.upload("/api/files?details=true", "x.png", content), contents))
    assert [status for status, _ in answers] == [200] * 200
    for i, (_, answer) in enumerate(answers):
        own = wanted[i % len(pictures)]
        assert answer["predictions"][0]["adapted"]["probability"] == pytest.approx(float(own.max()), abs=1e-4)
        assert answer["predictions"][0]["adapted"]["class"] == DIGITS[int(own.argmax())]
    _, metrics = images.ask("GET", "/metrics")
    assert 'pouf_requests_total{path="/api/files",status="200"}' in metrics
    batches = float(re.findall(r"pouf_batch_size_count (\S+)", metrics)[0]) - batches_before
    assert batches < 150, "requests that wait together are computed together"


def test_bad_requests_get_a_status_and_a_line(images: Served, texts: Served) -> None:
    def refuses(answer: tuple[int, Any], status: int, words: str) -> None:
        assert answer[0] == status and re.search(words, answer[1]["error"]), answer

    refuses(images.upload("/api/files", "a.png", b"no image"), 422, "image 0: not an image")
    refuses(images.upload("/api/files", "a.png", b"0" * 2**21), 413, "at most 1 MB")
    refuses(images.ask("POST", "/api/predict", {"texts": ["a"]}), 422, "this model reads images: give images")
    refuses(images.ask("POST", "/api/predict", {"images": ["%%%"]}), 422, "image 0 is not base64")
    refuses(images.ask("POST", "/api/predict", {"pictures": []}), 422, "pictures: Extra inputs")
    refuses(
        images.upload("/api/files", "a.png", b"0", "image"), 422, "files: .*What /api/files takes is described at /docs"
    )
    refuses(images.ask("POST", "/api/predict", "{", **{"Content-Type": "application/json"}), 422, "JSON")
    refuses(images.upload("/api/table", "a.csv", b"text\na\n", "file"), 422, "a table is for texts")
    refuses(images.ask("GET", "/nothing"), 404, "Not Found")
    refuses(images.ask("GET", "/api/predict"), 405, "Method Not Allowed")
    assert images.ask("GET", "/health", Host="evil.example")[0] == 400, "a name that points here from elsewhere"
    refuses(texts.ask("POST", "/api/predict", {"texts": ["a", ""]}), 422, "text 1 can't be read")
    refuses(texts.ask("POST", "/api/predict", {"texts": []}), 422, "no inputs: give at least one")
    refuses(texts.ask("POST", "/api/predict", {"texts": ["a"] * 5}), 422, "5 inputs, but at most 4")
    refuses(texts.upload("/api/table", "mine.csv", b"words\na\n", "file"), 422, "'mine.csv' has no column 'text'")
    refuses(texts.upload("/api/table", "mine.pdf", b"words", "file"), 422, "can't read")
    assert images.ask("GET", "/health") == (200, {"status": "ok"})


def test_a_chunked_body_is_counted_too(images: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", images.port, timeout=30)
    parts = [b'{"images": ["', *[b"0" * 2**17] * 9, b'"]}']
    connection.request("POST", "/api/predict", iter(parts), {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413


def png(side: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def narrow(image_run: Path) -> Iterator[Served]:
    served = Served(image_run, Limits(upload=2**18, bodies=2**19, body_seconds=1.0, pixels=5_000_000, rate=0))
    yield served
    served.stop()


def test_pixels_of_a_request_are_counted_from_headers_before_anything_is_decoded(narrow: Served) -> None:
    cut = png(2300)[:100]  # it would be 422 if it were decoded
    status, answer = narrow.upload("/api/files", "a.png", cut)
    assert status == 413 and re.search("the images have 5,29.,... pixels, more than 5,000,000", answer["error"])
    many = [base64.b64encode(png(1200)).decode()] * 4
    assert narrow.ask("POST", "/api/predict", {"images": many})[0] == 413
    assert narrow.ask("POST", "/api/predict", {"images": many[:2]})[0] == 200
    line = io.BytesIO()  # few pixels as a file, many when its shorter side is as long as the model's
    Image.new("L", (60_000, 1)).save(line, "PNG")
    assert narrow.upload("/api/files", "a.png", line.getvalue())[0] == 413
    photo = io.BytesIO()  # a JPEG is decoded at the size that is needed
    Image.new("RGB", (3000, 3000)).save(photo, "JPEG")
    assert narrow.upload("/api/files", "a.jpg", photo.getvalue())[0] == 200


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_images_of_many_clients_are_decoded_within_one_bound(narrow: Served) -> None:
    """Each takes 19 MB when it is decoded, and there is room for one."""
    content, peak, ended = png(2200), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], resident())

    assert narrow.upload("/api/files", "a.png", content)[0] == 200  # what one takes is there from now on
    first = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(lambda _: narrow.upload("/api/files", "a.png", content)[0], range(12)))
    ended.set()
    watcher.join()
    assert statuses == [200] * 12
    assert peak[0] - first < 100 * 2**20, "12 at once take 220 MB and more"


def half_sent(port: int, size: int = 10) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    head = "POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 250000"
    connection.sendall(head.encode() + b"\r\n\r\n" + b" " * size)
    return connection


def test_a_body_that_does_not_arrive_in_time_gets_408_and_is_closed(narrow: Served) -> None:
    stalled, slow = half_sent(narrow.port), half_sent(narrow.port)
    start = time.monotonic()
    while not select.select([slow], [], [], 0.05)[0]:
        slow.sendall(b" ")  # however often a byte comes
        assert time.monotonic() < start + 10
    for connection in (stalled, slow):
        with connection, connection.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 408")
            assert b"the body had not arrived after 1 seconds" in answer.read()  # which ends where it is closed


def test_full_is_not_ready_but_alive_and_what_goes_leaves_room(narrow: Served) -> None:
    def wait_for(status: int) -> None:
        end = time.monotonic() + 0.9  # before the time for their bodies is over
        while narrow.ask("GET", "/ready")[0] != status:
            assert time.monotonic() < end

    wait_for(200)
    with half_sent(narrow.port, 200_000), half_sent(narrow.port, 200_000):
        wait_for(503)
        assert narrow.ask("GET", "/health")[0] == 200
        with half_sent(narrow.port, 200_000) as third:
            assert third.recv(100).startswith(b"HTTP/1.1 503")
    wait_for(200)


def test_a_table_is_classified_row_by_row(texts: Served) -> None:
    table = b"id;review\n1;we loved the food\n2;\n3;bad service\n"
    status, answer = texts.upload("/api/table", "mine.csv", table, "file", "review")
    assert status == 200 and [row["text"] for row in answer["rows"]] == ["we loved the food", "bad service"]
    assert [row["row"] for row in answer["rows"]] == ["0", "2"] and "row 1" in answer["skipped"][0]
    clf = Classifier.from_pretrained(texts.folder, use=Run(texts.folder).adapted)
    assert [row["adapted"] for row in answer["rows"]] == clf.predict(["we loved the food", "bad service"])


def test_a_client_that_asks_too_often_has_to_wait(texts: Served) -> None:
    time.sleep(2)
    statuses = [texts.ask("GET", "/api/info")[0] for _ in range(180)]
    assert statuses[0] == 200 and 429 in statuses, "five seconds' worth at once"
    assert texts.ask("GET", "/health")[0] == 200
    time.sleep(0.3)
    assert texts.ask("GET", "/api/info")[0] == 200


def test_a_batch_that_fails_is_tried_one_by_one() -> None:
    def compute(samples: list[int]) -> list[int]:
        if 3 in samples:
            raise ValueError("three")
        return [10 * sample for sample in samples]

    async def ask() -> list[Any]:
        batcher = Batcher(compute, 8, 100, lambda n: None)
        batcher.start()
        answers = await asyncio.gather(*(batcher([i]) for i in range(6)), return_exceptions=True)
        batcher.stop()
        return answers

    answers = asyncio.run(ask())
    assert [a for a in answers if isinstance(a, list)] == [[0], [10], [20], [40], [50]]
    assert isinstance(answers[3], ValueError)


def test_vectors_and_the_description_of_the_api(tmp_path: Path) -> None:
    features, prototypes = groups()
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    np.save(tmp_path / "features.npy", features.numpy())
    clf = clf.adapt(
        tmp_path / "features.npy",
        settings={"steps": 5, "batch_size": 32},
        output=Output(tmp_path / "run", report=False),
    ).classifier
    served = Served(tmp_path / "run")
    try:
        vector = features[0].tolist()
        status, answer = served.ask("POST", "/api/predict", {"vectors": [vector]})
        assert status == 200 and answer["predictions"][0]["class"] == clf.predict(features[0])
        assert served.ask("POST", "/api/predict", {"vectors": [vector[:3]]})[1]["error"].startswith("vector 0 has 3")
        spec = served.ask("GET", "/openapi.json")[1]
        assert {"/api/predict", "/api/files", "/api/table", "/api/info", "/health", "/metrics"} <= spec["paths"].keys()
        assert "vectors of the model that computed the prototypes" in served.ask("GET", "/docs")[1]
        assert "Numbers of one vector" in served.ask("GET", "/")[1]
    finally:
        served.stop()


def test_the_command_listens_on_this_machine_alone_and_ends_by_a_signal(image_run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pouf", "serve", str(image_run), "--port", "0", "--neighbours", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        port = int(next(m[1] for line in lines if (m := re.search(r"http://127\.0\.0\.1:(\d+)", line))))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/api/info")
        assert json.loads(connection.getresponse().read())["classes"] == list(DIGITS)
        connection.close()
        taken = pouf("serve", image_run, "--port", port, cwd=tmp_path, code=2)
        assert "Give another --port" in taken.stderr
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and "error" not in errors, errors
    finally:
        process.kill()


def test_sigterm_ends_the_command_within_its_time_while_bodies_are_half_sent(image_run: Path) -> None:
    command = [sys.executable, "-m", "pouf", "serve", str(image_run), "--port", "0", "--neighbours", "0"]
    process = subprocess.Popen([*command, "--shutdown-timeout", "1"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        port = int(next(m[1] for line in lines if (m := re.search(r"http://127\.0\.0\.1:(\d+)", line))))
        opened = [half_sent(port) for _ in range(30)]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/ready")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        for each in opened:
            each.close()
    finally:
        process.kill()


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_the_page_in_a_browser(browser: Any, images: Served, texts: Served, few_digits: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def wait(found: Any) -> Any:
        return WebDriverWait(browser, 30).until(lambda _: found())

    def all_of(selector: str) -> list[Any]:
        return browser.find_elements(By.CSS_SELECTOR, selector)

    browser.get(images.url)
    verdict = browser.find_element(By.ID, "verdict").text
    assert verdict.split(".")[0] in str(Run(images.folder).verdict).replace("`", "")
    chosen = [str(path) for path in sorted(few_digits.rglob("*.png"))[:2]]
    browser.find_element(By.ID, "images").send_keys("\n".join(chosen))
    assert len(wait(lambda: all_of("article"))) == 2
    clf = Classifier.from_pretrained(images.folder, use=Run(images.folder).adapted)
    best = [side.text for side in all_of("article:last-child .best")]  # the first one chosen stands last
    assert best == [images.engine.zero_shot.classifier.predict(chosen[0]), clf.predict(chosen[0])]
    assert len(all_of("article:last-child .tag")) == 1 and len(all_of("article:last-child .near img")) == 4
    assert browser.execute_script("return [1, .9996, .997, .5, .05, .0001].map(percent).join()") == (
        "100 %,100 %,99.7 %,50 %,5.0 %,0 %"
    )
    cut = "return [...document.querySelectorAll('.n')].filter(n => n.scrollWidth > n.clientWidth).length"
    assert browser.execute_script(cut) == 0, "numbers that are cut off"
    assert errors(browser) == []
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    browser.find_element(By.ID, "images").send_keys(str(broken))
    wait(lambda: "not an image" in browser.find_element(By.ID, "problem").text)
    dropped = """const bytes = Uint8Array.from(atob(arguments[0]), c => c.charCodeAt(0)), data = new DataTransfer();
        data.items.add(new File([bytes], "d.png", {type: "image/png"}));
        document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));"""
    browser.execute_script(dropped, base64.b64encode(Path(chosen[0]).read_bytes()).decode())
    wait(lambda: len(all_of("article")) == 3)
    browser.set_window_size(390, 800)
    assert browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth") <= 0
    browser.get(f"{images.url}/docs")
    assert "/api/predict" in browser.find_element(By.TAG_NAME, "body").text
    browser.set_window_size(1200, 900)
    errors(browser)  # the browser notes the 422 of the broken image
    time.sleep(1)  # the test before may have used up the requests
    browser.get(texts.url)
    browser.find_element(By.ID, "text").send_keys("we loved <b>the</b> food")
    browser.find_element(By.ID, "ask").click()
    wait(lambda: all_of("article"))
    assert all_of("blockquote")[0].text == "we loved <b>the</b> food" and len(all_of(".side")) == 2
    table = tmp_path / "reviews.csv"
    table.write_text('text\n=1+1 bad film\n"good, very good"\n')
    browser.find_element(By.ID, "table").send_keys(str(table))
    wait(lambda: all_of("#download"))
    assert "2 rows" in all_of("article")[0].text
    target = browser.downloads / "predictions.csv"
    target.unlink(missing_ok=True)
    browser.find_element(By.ID, "download").click()
    wait(lambda: target.is_file() and target.stat().st_size > 10)
    lines = target.read_text().splitlines()
    assert lines[0] == "row,text,class,probability,zero_shot,adapted" and lines[1].startswith("0,'=1+1 bad film,")
    assert lines[2].startswith('1,"good, very good",') and errors(browser) == []
