"""The page in a headless Chromium, as people and assistive technology use it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_server import LiveServer, live_server
from tests.unit.server.test_thinking import THINKING
from tests.unit.server.test_tools import CITY, said

playwright = pytest.importorskip("playwright.sync_api", reason="extra `clients`")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="extra `clients`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian's package: chromium)"),
]
SLOW = "{%- if slow is defined -%}{{ '<|slow|>' }}{%- endif -%}" + THINKING
DONE = "#send:not([hidden])"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("page"), template=SLOW, context=4096) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def page(browser: Any, server: LiveServer, scheme: str) -> Iterator[Any]:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 820})
    page, troubles = context.new_page(), []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    page.wait_for_selector("#state[data-state=ready]")
    yield page
    context.close()
    assert not troubles


def ask(page: Any, text: str) -> None:
    """Type and send as with a keyboard."""
    page.fill("#text", text)
    page.press("#text", "Enter")


def until(page: Any, expression: str, seconds: float = 10.0) -> None:
    """Wait for a JavaScript expression; the page's policy forbids the driver's own way."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def check_accessible(page: Any) -> None:
    found = axe.Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
    assert found.violations_count == 0, found.generate_report()


def test_conversation_streams_is_regenerated_and_cleared(page: Any) -> None:
    check_accessible(page)
    ask(page, "hello 漢😀 <b>world</b>")
    page.wait_for_selector(DONE)
    assert page.text_content(".assistant .text") == "hello 漢😀 <b>world</b>"
    assert "tokens" in page.text_content(".assistant .note")
    check_accessible(page)
    ask(page, "second")
    page.wait_for_selector(DONE)
    assert page.locator(".assistant .text").all_text_contents()[1:] == ["second"]
    page.click("#again")
    page.wait_for_selector(DONE)
    assert page.locator("article").count() == 4
    assert page.locator(".assistant .text").last.text_content() == "second"
    page.click("#clear")
    assert page.locator("article").count() == 0
    assert page.is_visible("#empty")


def test_thought_is_folded_and_counted(page: Any) -> None:
    ask(page, "<think>\nI wonder\n</think>\n\nthe answer")
    page.wait_for_selector(DONE)
    assert page.text_content(".assistant .text") == "the answer"
    assert not page.is_visible(".assistant details > div")
    assert re.fullmatch(r"Thought for \d+ tokens", page.text_content(".assistant summary"))
    page.click(".assistant summary")
    assert page.text_content(".assistant details > div") == "I wonder"
    page.click("#show-settings")
    page.uncheck("#thinking")
    ask(page, "plain")
    page.wait_for_selector(DONE)
    assert page.locator(".assistant details:not([hidden])").count() == 1


def test_tool_call_is_shown_and_its_result_goes_back(page: Any) -> None:
    page.click("#show-settings")
    page.fill("#tools", json.dumps([{"name": "get_weather", "parameters": CITY}]))
    ask(page, "Let me look. " + said("get_weather", {"city": "Zürich 東京"}))
    page.wait_for_selector(".result")
    assert json.loads(page.text_content(".call pre")) == {"city": "Zürich 東京"}
    assert page.text_content(".call strong") == "get_weather"
    check_accessible(page)
    page.fill(".result input", "12 degrees")
    page.press(".result input", "Enter")
    until(page, "document.querySelectorAll('.assistant').length === 2")
    page.wait_for_selector(DONE)
    assert page.locator(".assistant .text").last.text_content() == "12 degrees"


def test_settings_reach_the_request(page: Any) -> None:
    page.click("#show-settings")
    check_accessible(page)
    page.fill("#max_tokens", "3")
    page.fill("#system", "be brief")
    with page.expect_request("**/chat/completions") as caught:
        ask(page, "hello world and more")
    body = json.loads(caught.value.post_data)
    assert (body["max_tokens"], body["messages"][0]) == (3, {"role": "system", "content": "be brief"})
    page.wait_for_selector(DONE)
    assert "cut at the token limit" in page.text_content(".assistant .note")
    page.fill("#tools", "no json")
    ask(page, "again")
    page.wait_for_selector(".failed")


def test_answer_is_stopped_by_button_and_by_escape(page: Any, server: LiveServer) -> None:
    page.click("#show-settings")
    page.fill("#system", "x")
    server_text = "word " * 300
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        page.route("**/chat/completions", lambda route: route.continue_(post_data=slow(route.request.post_data)))
        ask(page, server_text)
        until(page, "document.querySelector('article:last-of-type .text').textContent.length > 5")
        stop()
        page.wait_for_selector(DONE)
        page.unroute("**/chat/completions")
        assert page.locator(".assistant .note").last.text_content() == "Stopped"
    server.assert_idle_soon()


def slow(body: str) -> str:
    """The same request; a variable of the template makes the rule-driven engine slow."""
    fields = json.loads(body)
    fields["chat_template_kwargs"] = {"slow": True}
    return json.dumps(fields)


def test_probabilities_are_shown_on_hover_and_with_the_keyboard(page: Any) -> None:
    page.click("#show-settings")
    page.check("#probabilities")
    ask(page, "the quick 漢 fox")
    page.wait_for_selector(DONE)
    assert page.text_content(".assistant .text") == "the quick 漢 fox"
    page.hover(".token >> nth=1")
    assert page.is_visible("#tip")
    assert page.locator("#tip tr").count() >= 5
    assert page.locator("#tip .chosen").count() == 1
    check_accessible(page)
    page.mouse.move(5, 5)
    assert not page.is_visible("#tip")
    page.focus(".assistant .text")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#tip")
    page.keyboard.press("End")
    assert page.locator(".token.current").count() == 1
    page.keyboard.press("Escape")
    assert not page.is_visible("#tip")


def test_dashboard_is_live(page: Any) -> None:
    page.click("#show-dashboard")
    page.wait_for_selector("#figures dd")
    names = page.locator("#figures dt").all_text_contents()
    assert names[:4] == ["Tokens a second", "First token, mean", "Running", "Waiting"]
    assert "KiB" in page.text_content("#memory") or "MiB" in page.text_content("#memory")
    assert "computing" in page.get_attribute("#split", "aria-label")
    check_accessible(page)
    until(page, "document.querySelector('#rate path').getAttribute('d').split('L').length > 3")
    page.click("#show-dashboard")
    assert not page.is_visible("#dashboard")


def test_everything_is_reached_with_the_keyboard(page: Any) -> None:
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert reached[:5] == ["skip", "show-settings", "show-dashboard", "messages", "text"]
    page.focus("#show-settings")
    page.keyboard.press("Enter")
    assert page.get_attribute("#show-settings", "aria-expanded") == "true"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_small_screen_needs_no_sideways_scrolling(browser: Any, server: LiveServer, scheme: str, tmp_path: Path) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 360, "height": 740})
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#state[data-state=ready]")
    ask(page, "hello " * 40)
    page.wait_for_selector(DONE)
    for panel in ("settings", "dashboard"):
        page.click(f"#show-{panel}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    check_accessible(page)
    page.screenshot(path=str(tmp_path / "small.png"))
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 22, 26)") == (scheme == "dark")
    context.close()
