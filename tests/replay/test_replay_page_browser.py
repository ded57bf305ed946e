"""The page in a real browser, at desktop and phone width: it draws, complains of nothing and asks nobody for anything."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair")
pytest.importorskip("selenium")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DESKTOP, PHONE = (1280, 900), (390, 844)
MAIN = "from leap_rs.replay.command import main; main()"
WORDS = [
    "traces/llama-3-8b-alpacaeval.parquet",
    *("--sweep", "load=1,1.6", "--num-prompts", "400", "--seeds", "2", "--max-num-seqs", "32"),
    *("--policy", "fcfs", "--policy", "sjf-prompt", "--policy", "leap", "--policy", "leap:aging_rate=0.02"),
    *("--policy", "sjf-oracle", "--goodput", "ttft:500", "tpot:50", "--metadata", "who=a b", "--json"),
]


@dataclass(frozen=True)
class Replayed:
    page: Path
    json: bytes


def leap_replay(*words: str) -> bytes:
    done = subprocess.run([sys.executable, "-c", MAIN, *words], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    page = tmp_path_factory.mktemp("pages") / "with a space.html"
    return Replayed(page, leap_replay(*WORDS, "--report", str(page)))


class Browser:
    """Chromium at one window size; a width below 600 is a phone."""

    def __init__(self, width: int, height: int) -> None:
        found = [shutil.which(name) for name in ("chromium", "google-chrome")]
        binary, driver = next((path for path in found if path), None), shutil.which("chromedriver")
        if binary is None or driver is None:
            pytest.fail("no browser: scripts/install-system.sh browser installs one")
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        if width < 600:
            metrics = {"width": width, "height": height, "pixelRatio": 2.0, "touch": True, "mobile": True}
            options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
        self.width = width
        self.driver = webdriver.Chrome(options=options, service=Service(driver))

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, page: Path, seconds: float = 30) -> None:
        """Open a file and wait until its charts are drawn, as far as they can be."""
        self.driver.get(page.as_uri())
        wait = WebDriverWait(self.driver, seconds, ignored_exceptions=())
        wait.until(lambda _: self.run("return document.documentElement.dataset.charts") or self.complaints)

    @property
    def complaints(self) -> list[str]:
        self._log = [*getattr(self, "_log", []), *self.driver.get_log("browser")]
        return [entry["message"] for entry in self._log if entry["level"] in ("SEVERE", "WARNING")]

    def faults(self) -> list[str]:
        """Everything that is wrong with the open page, in a word each and its detail."""
        found = [f"console: {message}" for message in self.complaints]
        wanted = self.run("return JSON.parse(document.getElementById('data').textContent).figures.length")
        marks = self.run(
            "return [...document.querySelectorAll('.chart')].map(chart =>"
            " chart.querySelectorAll('svg .mark-line path, svg .mark-rect path, svg .mark-symbol path').length)"
        )
        if wanted < 1 or len(marks) != wanted or min(marks) < 2:
            found.append(f"charts: {wanted} wanted, marks {marks}")
        asked = self.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
        found += [f"request: {name}" for name in asked if not name.startswith("data:")]
        wide = self.run("return document.scrollingElement.scrollWidth")
        if wide > self.width:
            found.append(f"width: {wide} of {self.width}")
        return found

    def opacities(self, chart: str) -> list[float]:
        """Of the lines of a chart, by their colours."""
        return [
            float(one)
            for one in self.run(
                "return [...document.querySelectorAll(`#${arguments[0]} .mark-line path`)]"
                ".map(line => line.getAttribute('opacity') ?? getComputedStyle(line).opacity)",
                chart,
            )
        ]


@pytest.fixture(scope="module", params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    opened = Browser(*request.param)
    yield opened
    opened.driver.quit()


def test_the_page_draws_fits_and_asks_for_nothing(browser: Browser, replayed: Replayed) -> None:
    browser.open(replayed.page)
    assert browser.faults() == []
    names = browser.run("return [...document.querySelectorAll('.chart')].map(chart => chart.id)")
    assert names == [
        *("f-mean-ptl-ms", "f-p99-e2el-ms", "f-cdf-ptl", "f-cdf-ttft", "f-cdf-e2el", "f-quartiles"),
        *("f-prediction-2", "f-prediction-3", "f-queue"),
    ]
    assert replayed.page.stat().st_size < 3_000_000
    unnamed = browser.run(
        "return [...document.querySelectorAll('.chart')].filter(chart => !chart.getAttribute('aria-label')).length"
    )
    assert unnamed == 0


def test_the_numbers_are_those_of_the_result(browser: Browser, replayed: Replayed) -> None:
    """Each cell to its last digit; the columns' headings say which number of the result it is."""
    browser.open(replayed.page)
    document = json.loads(replayed.json)
    checked = 0
    for i, point in enumerate(document["config"]["points"]):
        Select(browser.driver.find_element(By.ID, "point")).select_by_index(i)
        (table,) = browser.driver.find_elements(By.CSS_SELECTOR, ".numbers:not([hidden])")
        assert f"load {point['load']:g} " in table.find_element(By.TAG_NAME, "caption").get_attribute("textContent")
        groups, names, *rows = browser.run(
            "return [...arguments[0].rows].map(row => [...row.cells].map(cell => [cell.textContent, cell.colSpan]))",
            table,
        )
        columns = [group for group, span in groups[1:] for _ in range(span)]
        results = {r["policy"]: r for r in document["results"] if r["point"] == i}
        assert [row[0][0] for row in rows] == list(results)
        for (policy, _), *cells in rows:
            for group, (name, _), (text, _) in zip(columns, names, cells, strict=True):
                value = expected(results[policy], group, name)
                if value is None:
                    assert text == "-", (policy, group, name)
                    continue
                shown = text.partition(" ")[0]
                decimals = len(shown.partition(".")[2])
                assert float(shown) == pytest.approx(value, abs=0.5000001 * 10**-decimals), (policy, group, name)
                checked += 1
    assert checked > 120


def expected(result: dict[str, Any], group: str, name: str) -> float | None:
    """What stands under a heading, from the JSON result."""
    metric, _, unit = group.partition(", ")
    if unit:
        key = f"{name.lower()}_{metric.lower()}_ms"
        mean = result["metrics"][key]["mean"]
        return None if mean is None else float(mean) / (1000 if unit == "s" else 1)
    found: float | None = {
        "goodput/s": lambda: result["metrics"]["request_goodput"]["mean"],
        "req/s": lambda: result["metrics"]["request_throughput"]["mean"],
        "max": lambda: result["metrics"]["max_slowdown"]["mean"],
        "% steps": lambda: 100 * result["queue"]["share_of_steps_with_queue"],
        "preempted": lambda: result["queue"]["preemptions"],
        "Spearman": lambda: result["prediction"]["spearman"],
    }[name]()
    return found


def test_the_legend_picks_policies_in_every_chart(browser: Browser, replayed: Replayed) -> None:
    browser.open(replayed.page)
    charts = ["f-mean-ptl-ms", "f-cdf-ttft", "f-quartiles", "f-queue"]
    assert all(set(browser.opacities(chart)) == {1.0} for chart in charts)
    chip = browser.driver.find_element(By.CSS_SELECTOR, ".chip[data-policy='2']")
    chip.click()
    WebDriverWait(browser.driver, 10).until(lambda _: min(browser.opacities("f-queue")) < 0.5)
    for chart in charts:
        WebDriverWait(browser.driver, 10).until(lambda _, chart=chart: min(browser.opacities(chart)) < 0.5)
        assert sorted(one > 0.5 for one in browser.opacities(chart)) == [False] * 4 + [True], chart
    assert chip.get_attribute("aria-pressed") == "true"
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, ".numbers:not([hidden]) tr.dim")) == 4
    browser.driver.find_element(By.ID, "all").click()
    for chart in charts:
        WebDriverWait(browser.driver, 10).until(lambda _, chart=chart: set(browser.opacities(chart)) == {1.0})
    assert browser.faults() == []


def test_the_selector_changes_what_single_points_show(browser: Browser, replayed: Replayed) -> None:
    browser.open(replayed.page)
    line = "return document.querySelector('#f-cdf-ptl .mark-line path').getAttribute('d')"
    seen = []
    for i in (0, 1, 0):
        Select(browser.driver.find_element(By.ID, "point")).select_by_index(i)
        if seen:
            WebDriverWait(browser.driver, 10).until(lambda _: browser.run(line) != seen[-1])
        seen.append(browser.run(line))
    assert seen[0] == seen[2]
    assert browser.faults() == []


@pytest.mark.parametrize("browser", [DESKTOP], indirect=True, ids=["desktop"])
def test_the_command_on_the_page_gives_the_same_again(browser: Browser, replayed: Replayed) -> None:
    browser.open(replayed.page)
    words = shlex.split(browser.run("return document.getElementById('command').textContent"))
    assert words == ["leap-replay", *WORDS, "--report", str(replayed.page), "--seed", "0"]
    before = replayed.page.read_bytes()
    assert leap_replay(*words[1:]) == replayed.json
    assert replayed.page.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"use strict";', '"use strict"; throw new Error("injected");', "console: "),
        ('"mark":{"type":"line"', '"mark":{"type":"lime"', "console: "),
        ("rows: rows(at(figure.tables))", "rows: []", "charts: "),
        ("</main>", '<p style="width: 2000px">wide</p></main>', "width: "),
        ("</main>", '<img src="http://127.0.0.1:9/x.png" alt=""></main>', "console: "),
        (
            '<meta http-equiv="Content-Security-Policy"',
            '<link rel="stylesheet" href="http://127.0.0.1:9/x.css"><meta name="none"',
            "request: ",
        ),
    ],
    ids=["script", "specification", "empty", "width", "blocked", "request"],
)
def test_a_page_with_a_fault_is_caught(
    browser: Browser, replayed: Replayed, tmp_path: Path, old: str, new: str, fault: str
) -> None:
    text = replayed.page.read_text()
    broken = tmp_path / "broken.html"
    # The last one: the bundle has strict scripts of its own.
    at = text.rindex(old)
    broken.write_text(text[:at] + new + text[at + len(old) :])
    browser.open(broken)
    assert any(found.startswith(fault) for found in browser.faults())
