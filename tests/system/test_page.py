"""The web page in a real browser on a real mesh: every view, a killed service, both themes.

Screenshots go to build/screenshots, where CI keeps what it shows to people.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect, sync_playwright

from deepmesh.supervisor import Mesh

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build" / "screenshots"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
KEY = "sk-page"
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)
CONFIG = """
[mesh]
name = "page"
run_dir = "{folder}/run"
model = "{model}"
[gateway]
port = 0
api_keys = ["{digest}"]
[router]
count = 1
[executor]
ranks = 2
[kvstore]
count = 1
"""
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
            },
        },
    }
]


class Seen:
    """What a page must not do: complain, or ask anybody else."""

    def __init__(self, page: Page, url: str) -> None:
        self.complaints: list[str] = []
        self._host = urlparse(url).netloc
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"raised {error}"))
        page.on("request", lambda request: self._on_request(request.url))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _on_request(self, url: str) -> None:
        if urlparse(url).netloc != self._host:
            self.complaints.append(f"asked {url}")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "mesh.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(CONFIG.format(folder=folder, model=ROOT / "models" / "tiny", digest=digest))
    with Mesh(path) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(mesh: Mesh, browser: Browser) -> Iterator[Page]:
    """The page behind its dialog for the key; it ends without a complaint."""
    context = browser.new_context(viewport={"width": 1360, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{mesh.url}/ui")
    # Told by the browser itself: the first answer is 401, and that is how the page learns of it.
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#live")).to_contain_text("live", timeout=WAIT_MS)
    seen = Seen(page, mesh.url)
    yield page
    context.close()
    assert seen.complaints == []


def ask(page: Page, text: str) -> None:
    """Send it and wait for the end of the answer."""
    before = page.locator(".turn .meta button").count()
    page.fill("#text", text)
    page.keyboard.press("Enter")
    expect(page.locator(".turn .meta button")).to_have_count(before + 1, timeout=WAIT_MS)


def shoot(page: Page, name: str) -> None:
    """The page in both themes."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        page.screenshot(path=SHOTS / f"{name}-{theme}.png")


def test_a_chat_streams_and_shows_where_its_time_went(page: Page) -> None:
    page.select_option("#p-thinking", "disabled")
    page.fill("#p-temperature", "2")
    page.fill("#p-seed", "2")  # 300 tokens; of most seeds the model has said all after 20
    page.fill("#p-max_tokens", "300")
    page.fill("#text", "Tell me a long story.")
    page.keyboard.press("Enter")
    content = page.locator(".turn [data-part=content]").last
    expect(content).not_to_be_empty()
    first = content.inner_text()
    page.wait_for_function(
        "before => [...document.querySelectorAll('[data-part=content]')].at(-1).textContent.length"
        " > before",
        arg=len(first),
    )
    page.locator(".turn .meta button").last.click()
    bars = page.locator("#answer-waterfall .span")
    expect(bars.first).to_be_visible()
    legend = page.locator("#answer-waterfall .legend").inner_text()
    for service in ("gateway", "tokenizer", "scheduler", "executor"):
        assert service in legend
    shoot(page, "chat")


def test_a_seed_gives_the_same_answer_and_again_asks_again(page: Page) -> None:
    page.fill("#p-temperature", "1")
    page.fill("#p-seed", "11")
    page.fill("#p-max_tokens", "40")
    ask(page, "Hello")
    first = page.locator("[data-part=content]").last.inner_text()
    page.click("#again")
    expect(page.locator(".turn .meta button")).to_have_count(2)
    assert page.locator("[data-part=content]").last.inner_text() == first


def without_end(route: Route) -> None:
    """Send it on as one whose answer ends at its most tokens only."""
    body = json.loads(route.request.post_data or "")
    route.continue_(post_data={**body, "ignore_eos": True})


def test_stop_ends_an_answer(page: Page) -> None:
    page.route("**/v1/chat/completions", without_end)
    page.fill("#p-temperature", "1.5")
    page.fill("#p-max_tokens", "4000")
    page.fill("#p-stop", "")
    page.select_option("#p-thinking", "enabled")
    page.fill("#text", "Write until I stop you.")
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".turn .meta").last).to_contain_text("stopped")


def test_reasoning_is_folded_and_tools_go_round(page: Page) -> None:
    page.select_option("#p-thinking", "enabled")
    ask(page, "What is 417 + 256?")
    folded = page.locator(".turn details").first
    expect(folded).to_be_visible()
    assert folded.get_attribute("open") is None
    folded.locator("summary").click()
    expect(folded.locator(".text")).not_to_be_empty()
    page.click("#clear")
    page.fill("#p-tools", "[{]")
    page.fill("#text", "What is the weather in Paris?")
    page.keyboard.press("Enter")
    expect(page.locator(".turn").last).to_contain_text("Tools (JSON)")
    page.click("#clear")
    page.fill("#p-tools", json.dumps(WEATHER))
    page.select_option("#p-tool_choice", "required")
    page.select_option("#p-thinking", "disabled")
    ask(page, "Weather in Paris?")
    call = page.locator(".tool").first
    expect(call).to_contain_text("Calls get_weather")
    call.locator("input").fill("sunny")
    page.select_option("#p-tool_choice", "none")
    page.get_by_role("button", name="Send the results").click()
    expect(page.locator(".turn.user").last).to_contain_text("sunny")
    expect(page.locator(".turn .meta").last).to_contain_text("ended")
    shoot(page, "chat-tools")


def test_a_refusal_is_shown_in_the_words_of_the_mesh(page: Page) -> None:
    # In the stream: the browser itself would log an answer with a status that says no.
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=200,
            content_type="text/event-stream",
            body='data: {"error": {"message": "temperature: at most 2"}}\n\n',
        ),
    )
    page.fill("#text", "Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".turn .failed")).to_contain_text("temperature: at most 2")


def test_the_map_turns_red_when_a_service_is_killed_and_green_again(mesh: Mesh, page: Page) -> None:
    page.click("#tab-mesh")
    for name in ("gateway-0", "tokenizer-0", "router-0", "scheduler-0", "executor-0-1"):
        expect(page.locator(f"[data-process={name}][data-state=up]")).to_be_visible(timeout=WAIT_MS)
    assert page.locator("#map .edge").count() >= 5
    shoot(page, "mesh")
    mesh.kill("executor-0-1")
    # Both at one moment: on a fast machine it is up again before anybody has seen it down, and
    # then shown as restarted for a few seconds.
    page.wait_for_function(
        "() => document.querySelector('[data-process=executor-0-1].lost')"
        " && document.querySelector('#live.bad')"
    )
    shoot(page, "mesh-down")
    expect(page.locator("[data-process=executor-0-1].ok")).to_be_visible(timeout=60_000)
    expect(page.locator("[data-news='executor-0-1 restarted']").first).to_be_visible()
    row = page.locator("#processes tr:has(td:text-is('executor-0-1'))")
    expect(row.locator("td.num")).to_have_text("1")
    expect(page.locator("#live")).to_have_class("pill good", timeout=WAIT_MS)


def test_charts_follow_the_load(page: Page) -> None:
    ask(page, "What is 12 + 30?")
    page.click("#tab-charts")
    curves = page.locator("#charts-grid svg.chart")
    expect(curves).to_have_count(6)
    page.wait_for_function(
        "() => [...document.querySelectorAll('#charts-grid .line')]"
        ".filter(line => line.getAttribute('d').includes('L')).length >= 5"
    )
    curves.first.hover()
    expect(page.locator("#charts-grid .cross")).to_have_count(6)
    shoot(page, "charts")


def test_the_timeline_zooms_by_mouse_and_keys_and_explains_a_step(page: Page) -> None:
    page.fill("#p-max_tokens", "200")
    page.fill("#p-temperature", "1")
    page.fill("#p-seed", "4")
    ask(page, "Tell me a story.")
    page.click("#tab-timeline")
    expect(page.locator("#gantt .bar").first).to_be_visible()
    page.click("#hold")
    seen = page.locator("#gantt-range")
    before = seen.inner_text()
    page.locator("#gantt svg").hover()
    page.mouse.wheel(0, -300)
    expect(seen).not_to_have_text(before)
    zoomed = seen.inner_text()
    page.focus("#gantt")
    page.keyboard.press("+")
    expect(seen).not_to_have_text(zoomed)
    page.keyboard.press("Enter")
    detail = page.locator("#step-detail")
    expect(detail).to_contain_text("Step ")
    for part in ("plan", "device"):
        expect(detail).to_contain_text(part)
    expect(detail).to_contain_text("MFU", timeout=WAIT_MS)  # counted once a heartbeat
    shoot(page, "timeline")


def test_requests_are_listed_and_open_their_waterfall(page: Page) -> None:
    ask(page, "Hello")
    page.click("#tab-requests")
    row = page.locator("tr[data-request]").first
    expect(row).to_contain_text("done")
    row.locator("button").click()
    expect(page.locator("#request-waterfall .span").first).to_be_visible()
    shoot(page, "requests")


def test_the_whole_page_works_by_keyboard(page: Page) -> None:
    page.focus("#tab-chat")
    for view in ("mesh", "charts", "timeline", "requests"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{view}")).to_be_focused()
        expect(page.locator(f"#{view}")).to_be_visible()
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
