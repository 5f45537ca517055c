"""The dashboard in a real browser, on a real server under load, until its engine is killed."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import psutil
import pytest

from tests.e2e.server_process import ServerProcess, serving

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
LIMIT_SECONDS = 40.0
KEY = "a-key-of-this-server"
HEADERS = {"authorization": f"Bearer {KEY}"}
# Whoever names a model must not get a script into the page.
MODEL = "<img src=x onerror=alert(1)>"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver: apt-get install chromium chromium-driver",
)

# Pixels of the lanes that have the colour of windows or of chunks.
COUNT_BLOCKS = """
const canvas = document.getElementById("lanes");
const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const found = {window: 0, chunk: 0};
for (const name of Object.keys(found)) {
  const [r, g, b] = color(name).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  for (let i = 0; i < data.length; i += 4) {
    found[name] += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255;
  }
}
return found;
"""
FIGURES = """
return Object.fromEntries([...document.querySelectorAll(".tile")].map(
  (tile) => [tile.dataset.figure, [...tile.children].slice(1).map((part) => part.textContent)]));
"""
HOLD = "document.querySelector('#spans').lastElementChild.click()"
# Where a block of the first lane is, in a picture that stands still from then on.
FIND_BLOCK = f"""
const frame = {{width: document.getElementById("lanes").clientWidth, gutter: 96}};
const spans = view.shown.plans.map((plan) => plan.spans[0]).filter(Boolean);
const places = spans.map((span) => place(frame, (span.arrived + span.ended) / 2));
const found = places.find((x) => x > frame.width / 3 && x < frame.width * 0.95);
if (found) {HOLD};
return found;
"""


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(servers: None) -> Iterator[None]:
    """Of the whole file, in place of each test: a browser starts processes when it likes."""
    before = set(psutil.Process().children(recursive=True))
    yield
    wait_for(
        lambda: not set(psutil.Process().children(recursive=True)) - before,
        "the end of the browser and the server",
    )


@pytest.fixture(scope="module")
def server(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """For these tests alone: the last one kills its engine."""
    options = ("-pp", "2", "--speculative-config", '{"model": "demo-draft"}')
    options += ("--api-key", KEY, "--served-model-name", MODEL)
    with serving("demo", tmp_path_factory.mktemp("server"), *options) as process:
        yield process


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def resize(browser: Any, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def text(browser: Any, element_id: str) -> str:
    return str(
        browser.execute_script(f"return document.getElementById('{element_id}').textContent")
    )


def wait_for(condition: Any, what: str) -> Any:
    """What the condition is, once it is true."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.05)
    return found


def asked_paths(browser: Any, page: str) -> set[str]:
    """All that a page has asked for since the last call, without queries."""
    found = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            parameters = message["params"]
            if parameters["documentURL"] == page:
                found.add(parameters["request"]["url"].partition("?")[0][:200])
    return found


@contextmanager
def traffic(server: ServerProcess) -> Iterator[None]:
    """Three completions at a time, with prompts of many chunks and of few tokens."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        url = server.url
        with httpx2.Client(base_url=url, headers=HEADERS, timeout=LIMIT_SECONDS) as client:
            for turn in range(1000):
                if is_over.is_set():
                    return
                prompt = f"The list of {number} and {turn} is " * (1 + 3 * (turn % 3))
                body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0.5}
                assert client.post("/v1/completions", json=body).status_code == 200

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def enter(browser: Any, key: str) -> None:
    browser.execute_script(
        "document.getElementById('key').value = arguments[0];"
        "document.getElementById('key-form').requestSubmit()",
        key,
    )


def is_asked_for_key(browser: Any) -> bool:
    return not browser.execute_script("return document.getElementById('key-form').hidden")


def test_it_asks_for_the_key_and_keeps_it_to_itself(server: ServerProcess, browser: Any) -> None:
    resize(browser, 1200, 1100)
    browser.get(f"{server.url}/dashboard")
    wait_for(lambda: is_asked_for_key(browser), "the question for the key")
    enter(browser, "no key of this server")
    wait_for(lambda: "does not know" in text(browser, "key-error"), "the refusal of a wrong key")
    enter(browser, KEY)
    wait_for(lambda: text(browser, "status-text") == "serving", "the server's state")
    assert not is_asked_for_key(browser)
    assert text(browser, "model") == MODEL
    assert browser.execute_script("return document.images.length") == 0
    kept = "return [localStorage.length, sessionStorage.length, document.cookie, location.search]"
    assert browser.execute_script(kept) == [0, 0, "", ""]
    told = [entry["message"] for entry in browser.get_log("browser")]
    assert told and all("401" in message for message in told)


def test_it_draws_a_pipeline_at_work(server: ServerProcess, browser: Any) -> None:
    with traffic(server):

        def has_blocks() -> bool:
            blocks = browser.execute_script(COUNT_BLOCKS)
            return blocks["window"] > 500 and blocks["chunk"] > 500

        wait_for(has_blocks, "windows and chunks in the lanes")
        rows = "return document.querySelectorAll('#requests tr').length"
        wait_for(lambda: browser.execute_script(rows), "a request in the table")
        # Rows change their request: a bar that slides would show what is true of neither.
        bar = "document.querySelector('#requests .track i')"
        slide = f"const bar = {bar}; return bar && getComputedStyle(bar).transitionDuration"
        assert wait_for(lambda: browser.execute_script(slide), "a bar in the table") == "0s"
        assert "layers" in text(browser, "facts") and "pp 2 × tp 1" in text(browser, "facts")
        for word in ("busy", "hop", "idle"):
            assert text(browser, "shares").count(word) == 2
        x = wait_for(lambda: browser.execute_script(FIND_BLOCK), "a block in the first lane")
        browser.execute_cdp_cmd(
            "Input.dispatchMouseEvent",
            browser.execute_script(
                "const box = document.getElementById('lanes').getBoundingClientRect();"
                f"return {{type: 'mouseMoved', x: box.left + {x}, y: box.top + 20}}"
            ),
        )
        wait_for(lambda: "step" in text(browser, "tip"), "what a block is")
        assert "on stage 0" in text(browser, "tip") and "token" in text(browser, "tip")
        browser.execute_script(HOLD)
        # What is looked at stands still.
        assert browser.execute_script("return view.pointer !== null")
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 5, "y": 5})
        wait_for(lambda: browser.execute_script("return view.pointer === null"), "a new picture")


def test_shares_are_those_of_the_lanes(browser: Any) -> None:
    def shares(plans: list[Any], now: float) -> Any:
        """(committed, [arrived, ended, hop] or null) of plans on a stage, read at `now`."""
        return browser.execute_script(
            "const [plans, now] = arguments, kept = state.plans;"
            "state.plans = new Map(plans.map(([committed, span], step) =>"
            " [step, planOf([step, 0, committed, 1, 0, 1, 0, 0, [span]])]));"
            "try { return shareOf(0, now); } finally { state.plans = kept; }",
            plans,
            now,
        )

    assert shares([], 5) is None
    first, second = [101, [100, 101, 0.25]], [103, [102, 103, 0]]
    # No longer back than there is word of.
    assert shares([first, second], 104) == {"busy": 1.75, "hop": 0.25, "whole": 4}
    # Nobody knows yet what the open plan does.
    assert shares([first, second, [None, None]], 104) == {"busy": 1.75, "hop": 0.25, "whole": 3}
    # Ten seconds; of the first plan, what reaches into them.
    assert shares([first, second], 110.5) == {"busy": 1.5, "hop": 0, "whole": 10}
    assert shares([first, second], 200) == {"busy": 0, "hop": 0, "whole": 10}


def test_its_figures_are_those_of_the_server(server: ServerProcess, browser: Any) -> None:
    def info() -> Any:
        return httpx2.get(f"{server.url}/server_info", headers=HEADERS).json()

    wait_for(lambda: info()["stats"]["num_running"] == 0, "an idle engine")
    now = info()["stats"]
    speculation, cache = now["speculation"], now["prefix_cache"]
    wanted = {
        "tokens a second": ["0.0", f"{now['num_generated_tokens']:,} generated"],
        "requests running": [f"0 of {info()['engine']['max_num_seqs']}", "0 waiting"],
        "tokens a round": [
            f"{1 + speculation['num_accepted_tokens'] / speculation['num_windows']:.2f}",
            f"{speculation['num_accepted_tokens']:,} of {speculation['num_draft_tokens']:,} drafts",
        ],
        "plans in flight": ["0 of 2", f"{now['num_steps']:,} steps"],
    }

    def shown() -> dict[str, list[str]]:
        figures = browser.execute_script(FIGURES)
        return {name: [part.strip() for part in figures[name]] for name in wanted}

    deadline = time.monotonic() + LIMIT_SECONDS
    while shown() != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shown() == wanted
    cached = f"{cache['num_hit_tokens']:,} of {cache['num_query_tokens']:,} tokens"
    assert browser.execute_script(FIGURES)["prompt from cache"][1] == cached
    states = f"0 running, {cache['num_checkpoints']:,} checkpoint"
    assert text(browser, "slots-note").startswith(states)
    held = now["num_pages"] - now["num_free_pages"]
    assert f"{held} of {now['num_pages']:,}" in text(browser, "meters")
    bars = browser.execute_script(
        "return [...document.querySelectorAll('.bar')].map((bar) => bar.title)"
    )
    drafted, accepted = (speculation[f"{kind}_per_position"] for kind in ("drafted", "accepted"))
    # Those of the last minute, which is all there was, but for what came before the page did.
    assert len(bars) == len(drafted)
    for position, title in enumerate(bars):
        part, _, whole = title.partition(": ")[2].partition(" of ")
        assert int(part.replace(",", "")) <= accepted[position]
        assert int(whole.replace(",", "")) <= drafted[position]
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    page = f"{server.url}/dashboard"
    asked = {url for url in asked_paths(browser, page) if not url.startswith("data:")}
    assert asked == {page, f"{page}/data"}


def test_it_fits_a_phone(browser: Any) -> None:
    resize(browser, 390, 844)
    wait_for(
        lambda: browser.execute_script("return document.getElementById('lanes').clientWidth < 390"),
        "the narrow page",
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    wide = browser.execute_script(
        "return [...document.querySelectorAll('.card, .tile')]"
        ".filter((card) => card.getBoundingClientRect().right > 390).length"
    )
    assert wide == 0


def test_a_dead_engine_and_a_server_that_is_gone_are_told(
    server: ServerProcess, browser: Any
) -> None:
    server.loop_process().kill()
    wait_for(lambda: text(browser, "status-text") == "dead", "the death of the engine")
    assert "killed" in text(browser, "banner")
    assert text(browser, "lanes-note") == "the last plans"
    # A page that is opened afterwards still shows the last plans.
    browser.refresh()
    wait_for(lambda: is_asked_for_key(browser), "the question for the key")
    enter(browser, KEY)
    wait_for(lambda: text(browser, "status-text") == "dead", "the same from a new page")
    assert browser.execute_script(COUNT_BLOCKS)["window"] > 0
    psutil.Process(server.process.pid).terminate()
    wait_for(lambda: text(browser, "status-text") == "no connection", "the loss of the server")
    assert "Trying again" in text(browser, "banner")
