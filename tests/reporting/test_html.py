"""Reports: everything in one file, nothing that could break out of it; and in a real browser."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_models import sentence_encoder

from pouf import EMBEDDED, Classifier, Images, Recipe, Texts
from pouf.data.base import Unlabelled
from pouf.data.vectors import Vectors
from pouf.demo import DIGITS
from pouf.reporting.html import read_review, record, write_report, write_review
from pouf.runs.folder import Run
from pouf.validation.evaluation import wilson
from pouf.validation.review import Review, ReviewQuestion, sample_questions

NASTY = '</script><script>document.title="broken"</script><img src=x onerror=alert(1)>'


def write_questions(run: Path, data: Unlabelled) -> None:
    zero_shot, adapted = (Classifier.from_pretrained(run, use=use) for use in ("zero-shot", "last"))
    write_review(run, *sample_questions(zero_shot, adapted, data, 6), adapted.classes)


@pytest.fixture(scope="module")
def image_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo as a newcomer runs it. That it gains on every seed is measured by benchmarks/demo.py."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "pouf", "demo", "--seed", "0", "--out", "here", "--json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=True)
    assert result.stderr == "", "neither a warning nor an alarm"
    (folder / "facts.json").write_text(result.stdout)
    write_questions(folder / "here", Images.from_folder(folder / "here-images"))
    return folder / "here"


def test_the_demo_gains_and_says_so_in_json(image_run: Path) -> None:
    facts = json.loads((image_run.parent / "facts.json").read_text())
    assert facts.keys() >= {
        "n",
        "zero_shot",
        "prior_corrected",
        "last",
        "advised",
        "per_class",
        "seconds",
        "run",
        "verdict",
    }
    assert facts["n"] == 1797 and facts["run"] == "here" and facts["report"] == "here/report.html"
    assert facts["zero_shot"] <= 0.78
    assert facts["last"] >= 0.90 and facts["advised"] >= 0.90
    assert "no warning signs" in facts["verdict"] and (image_run / "details/metrics.jsonl").is_file()


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report-texts")
    model = sentence_encoder(folder / "model")
    texts = Texts([f"the film is {word} {i} {NASTY}" for i in range(10) for word in ("good", "bad", "okay")])
    classifier = Classifier.from_pretrained(model, [f"good {NASTY}", "bad"], ["it is {}"])
    recipe = Recipe.load("texts").with_settings(steps=4, snapshots=2)
    classifier.adapt(texts, recipe=recipe, output=folder / "run")
    write_questions(folder / "run", texts)
    return folder / "run"


def test_the_report_holds_everything_and_needs_no_network(image_run: Path) -> None:
    page = (image_run / "report.html").read_text()
    for part in ("Warning signs", "With labels", "Confusion", "Over time", "Mean probability", "Where inputs",
                 "Nearest", "Similarity", "Most changed", "Settings", "Versions"):  # fmt: skip
        assert part in page, part
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    items = json.loads(re.search(r'id="items">(.*?)</script>', page, re.S).group(1))
    assert page.count('class="p" data-i=') == 2 * len(items) == 1000
    neighbours = re.search(r'<div id="neighbours">(.*?)<h2>', page, re.S).group(1)
    assert neighbours.count("<img ") == neighbours.count("data-i=") == 100 and "✗" in neighbours
    about = re.search(r'id="about">(.*?)</p>', page, re.S).group(1)
    assert about == (
        "pouf/tiny-clip, 1,797 images from here-images, 10 classes in “a photo of a {}.”; pouf changed all weights "
        "(623,873 parameters) in 150 steps of 96 samples."
    )
    assert page.count('class="star"') == 20 and "Colour and shape show the true class" in page
    assert page.count("share of inputs on which both agree") == 1, "the signs that alarms go by"
    assert (
        "<td>classes in use (exp H of the mean prediction) <span" in page
        and "classes in use" not in page.split("Over time")[1].split("<h2>")[0]
    )
    assert f"<b>step {Run(image_run).verdict.chosen} of 150</b>" in page
    assert page.count("second opinion:") == 2
    assert "Most frequent confusions" in page
    assert "@import" not in page and page.count("<svg") >= 5
    assert "prefers-color-scheme: dark" in page and "@media print" in page and "width=device-width" in page
    picture = re.search(r"data:image/png;base64,([\w+/=]+)", page)
    assert base64.b64decode(picture.group(1)).startswith(b"\x89PNG")


def test_names_and_texts_are_escaped(text_run: Path) -> None:
    for name in ("report.html", "review.html"):
        page = (text_run / name).read_text()
        assert NASTY not in page and "<img src=x" not in page
        content = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S).group(1)
        assert NASTY in json.dumps(json.loads(content), ensure_ascii=False).replace('\\"', '"'), "and nothing is lost"


def test_an_alarm_stands_on_top_and_the_adapted_model_is_still_shown(
    image_run: Path, few_digits: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(image_run, tmp_path / "run")
    verdict = json.loads((run / "details/verdict.json").read_text())
    alarm = {"name": "collapse", "message": "predictions use 1.0 of 10 classes", "advice": "Slow."}
    verdict |= {"advised": "zero-shot", "message": "Do not trust it: 1.0 of 10.", "trusted": False}
    verdict["alarms"] = [alarm, alarm | {"name": "shifted"}]
    (run / "details/verdict.json").write_text(json.dumps(verdict))
    page = write_report(run, Images.from_folder(few_digits)).read_text()
    assert "Colour and shape show the predicted class" in page and "✗" not in page
    assert 'class="verdict alarm" id="verdict">Do not trust it: 1.0 of 10.' in page
    assert '<b class="tag alarm">alarm</b> <b>collapse</b>: predictions use 1.0 of 10 classes. Slow.' in page
    items = json.loads(re.search(r'id="items">(.*?)</script>', page, re.S).group(1))
    assert any(item["before"] != item["after"] for item in items), "what training did is shown, though not used"


def test_a_classifier_without_a_run_has_a_report(few_digits: Path, tmp_path: Path) -> None:
    Classifier.from_pretrained(EMBEDDED, DIGITS).save_pretrained(tmp_path / "saved")
    page = write_report(tmp_path / "saved", Images.from_folder(few_digits)).read_text()
    assert "Nothing was trained" in page and "No prediction changed" in page


def test_many_classes_have_pairs_instead_of_a_matrix(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    prototypes, labels = torch.randn(50, 8, generator=draw), torch.arange(200) % 50
    Classifier.from_vectors(prototypes, [f"class {i}" for i in range(50)]).save_pretrained(tmp_path / "saved")
    labels[:20] = 7  # what is said of them stays the same
    vectors = Vectors(prototypes[torch.arange(200) % 50])
    page = write_report(tmp_path / "saved", vectors, labels.tolist()).read_text()
    assert "Confusion matrix" not in page and "class 7 → class 3 (1)" in page
    assert "18 more classes are not shown" in page and "Nothing was trained" in page


def test_wilsons_interval() -> None:
    low, high = wilson(80, 100)
    assert (low, high) == (pytest.approx(0.711, abs=1e-3), pytest.approx(0.867, abs=1e-3))
    assert wilson(0, 10)[0] == 0 and wilson(10, 10)[1] == 1 and wilson(0, 0) == (0.0, 1.0)


def errors(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def point_at(browser, element, tip) -> None:
    """Until the tip shows: scrolling hides it, and is told to the page a little later."""
    from selenium.webdriver.common.action_chains import ActionChains

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    for _ in range(20):
        ActionChains(browser).move_to_element(element).perform()
        if tip.is_displayed():
            return
        time.sleep(0.2)
        ActionChains(browser).move_by_offset(9, 9).perform()
    raise AssertionError("no tip was shown")


@pytest.mark.parametrize("kind", ["image_run", "text_run"])
def test_the_report_in_a_browser(browser, kind: str, request: pytest.FixtureRequest) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    run = request.getfixturevalue(kind)
    browser.get((run / "report.html").as_uri())
    assert errors(browser) == [] and browser.title == f"pouf: {run.name}"
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    point = browser.find_element(By.CSS_SELECTOR, "circle.p")
    point_at(browser, point, tip)
    assert "→" in tip.text
    assert len(tip.find_elements(By.TAG_NAME, "img")) == (1 if kind == "image_run" else 0)
    near = browser.find_element(By.CSS_SELECTOR, "#neighbours [data-i]")
    point_at(browser, near, tip)
    assert "→" in tip.text
    colour_by = Select(browser.find_element(By.ID, "by"))
    colour_by.select_by_visible_text("changed / unchanged")
    colours = {each.get_attribute("fill") for each in browser.find_elements(By.CSS_SELECTOR, ".maps .p")[:40]}
    assert colours <= {"var(--after)", "var(--before)"} and "unchanged" in browser.find_element(By.ID, "key").text
    colour_by.select_by_index(len(colour_by.options) - 1)
    assert colour_by.options[-1].text in browser.find_element(By.ID, "key").text
    browser.set_window_size(400, 800)
    wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0, "a phone needs no scrolling sideways"
    browser.set_window_size(1100, 900)
    assert browser.find_elements(By.CSS_SELECTOR, "details:not([open])")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert not browser.find_elements(By.CSS_SELECTOR, "details:not([open])"), "paper shows everything"
    assert errors(browser) == []


def test_the_review_page_keeps_answers_over_a_reload(browser, text_run: Path) -> None:
    from selenium.webdriver.common.by import By

    page = (text_run / "review.html").as_uri()
    browser.get(page)
    for pause in (0, 1, 3, 8):  # a browser writes to its disk when it finds the time
        browser.execute_script("localStorage.clear(); localStorage.setItem('control', '1')")
        browser.get(page)
        for _ in range(2):
            browser.find_elements(By.CSS_SELECTOR, "button.answer")[1].click()
        time.sleep(pause)
        browser.get(page)
        if "Question 3 of 6, 2 answered" in browser.find_element(By.ID, "place").text:
            break
    else:
        if browser.execute_script("return localStorage.getItem('control')") is None:
            pytest.skip("this browser keeps nothing of a file over a reload, whoever stores it")
        raise AssertionError("the answers are gone after a reload")
    browser.execute_script("localStorage.clear()")


def test_many_classes_are_in_alphabetical_order_and_each_has_keys(browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    names = [f"thing {number:02}" for number in range(40, 0, -1)] + ["Apple"]
    questions = [ReviewQuestion(f"id {i}", "disagree", "thing 01", "thing 02") for i in range(5)]
    write_review(tmp_path, Review({"disagree": {"thing 02": 5}, "agree": {}}, questions), ["a text"] * 5, names)
    browser.get((tmp_path / "review.html").as_uri())
    body, place = (browser.find_element(By.CSS_SELECTOR, which) for which in ("body", "#place"))
    shown = [button.text for button in browser.find_elements(By.CSS_SELECTOR, "#classes button")]
    assert [each[2:] for each in shown] == ["Apple", *sorted(names[:-1])]
    assert len({each[:2] for each in shown}) == 41 and shown[0] == "11Apple" and shown[35] == "21thing 35"
    body.send_keys("2")
    assert "0 answered" in place.text and len(browser.find_elements(By.CSS_SELECTOR, "#classes button")) == 6
    body.send_keys("1")  # the second key of thing 35
    body.send_keys("0")
    body.send_keys("/")
    browser.switch_to.active_element.send_keys("apple\ue007")
    assert "Question 4 of 5, 3 answered" in place.text
    answers = browser.execute_script("return answers")
    assert answers == {"id 0": "thing 35", "id 1": "none of these", "id 2": "Apple"} and errors(browser) == []


@pytest.mark.parametrize("kind", ["image_run", "text_run"])
def test_the_review_page_saves_answers(browser, kind: str, request: pytest.FixtureRequest) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    run = request.getfixturevalue(kind)
    page = (run / "review.html").as_uri()
    browser.get(page)
    browser.execute_script("localStorage.clear()")
    browser.get(page)
    for _ in range(2):
        browser.find_elements(By.CSS_SELECTOR, "button.answer")[1].click()
    browser.find_element(By.TAG_NAME, "body").send_keys("2")
    assert "3 answered" in browser.find_element(By.ID, "place").text
    assert browser.find_element(By.ID, "progress").get_attribute("aria-valuenow") == "3"
    keys = [key.text for key in browser.find_elements(By.CSS_SELECTOR, "button.answer kbd")]
    assert keys == [*"123456789a"[: len(keys) - 1], "0"], "every class has its key, and so has none of them"
    browser.find_element(By.TAG_NAME, "body").send_keys("0")
    assert str(run.resolve()) in browser.find_element(By.TAG_NAME, "body").text, "the command names the real run"

    assert "Question 5 of 6, 4 answered" in browser.find_element(By.ID, "place").text
    target = browser.downloads / "answers.csv"
    target.unlink(missing_ok=True)
    browser.find_element(By.ID, "save").click()
    WebDriverWait(browser, 10).until(lambda _: target.is_file() and target.stat().st_size > 10)
    from pouf.validation.review import NO_CLASS, read_answers, score_answers

    classes = Classifier.from_pretrained(run).classes
    answers = read_answers(target, classes)
    assert list(answers.values()) == [classes[1]] * 3 + [NO_CLASS]
    result = score_answers(read_review(run), answers, classes)
    assert result.answered == 4 and result.none_of_these == 1
    assert errors(browser) == []
    record(run, result)
    assert Run(run).verdict.review == result
    browser.get((run / "report.html").as_uri())
    review = browser.find_element(By.ID, "review").text
    assert "Review: 4 answers" in review and result.advice in review and "none of these" in review
    record(run, result._replace(answered=5))
    assert (run / "report.html").read_text().count("<h2>Review: ") == 1, "the new answers replace the old"
