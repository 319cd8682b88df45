"""The dashboard in a real browser."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser, Tab
from serve_process import ROOT, Running, poll

Start = Callable[..., Running]
READY = "document.getElementById('state').dataset.state === 'ready'"


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Opens tabs. At the end, none may have requested anything from another server."""
    tabs: list[tuple[Tab, Running]] = []

    def go(server: Running, **screen: object) -> Tab:
        tab = browser.tab(server.url + "/", **screen)
        tabs.append((tab, server))
        tab.until("document.readyState === 'complete' && document.title.includes('Counterpoint')")
        return tab

    yield go
    for tab, server in tabs:
        tab.wait(0)
        assert all(url.startswith((server.url, "data:")) for url in tab.requested_urls), (
            tab.requested_urls
        )
        tab.close()


def status_line(tab: Tab) -> str:
    return tab.run("[...document.querySelectorAll('#talk .told')].at(-1)?.textContent ?? ''")


def answer(tab: Tab) -> str:
    return tab.run("[...document.querySelectorAll('#talk .model')].at(-1)?.textContent ?? ''")


def ask(tab: Tab, text: str) -> None:
    tab.click("ask")
    tab.type(text)
    tab.press("Enter")


def test_a_chat(server: Running, open_page: Callable[..., Tab]):
    tab = open_page(server)
    tab.until(READY)
    text = "Grüße, <b>bold</b> <img src=x onerror=alert(1)> & 🎼"
    ask(tab, text)
    tab.until("document.querySelector('#talk .told')?.textContent.includes('tokens/s')")
    tab.until("!chat.running")
    assert answer(tab) == text, "what a model says is text, never markup"
    assert "first token" in status_line(tab) and f"{len(text.encode()) + 1} tokens" in status_line(
        tab
    )
    assert tab.run("document.querySelectorAll('#talk img, #talk b').length") == 0
    ask(tab, "and again")
    tab.until("document.querySelectorAll('#talk .model').length === 2 && !chat.running")
    assert answer(tab) == "and again" and tab.run("chat.messages.length") == 4
    tab.until("document.getElementById('ttft-p50').textContent !== '–'")
    tab.until("document.getElementById('now-prefill').textContent === 'idle'")
    assert tab.run("view.steps.some(s => s[5]) && view.steps.some(s => s[6])")
    assert not tab.problems


@pytest.mark.parametrize("way", ["button", "key"])
def test_stopping_an_answer(server: Running, open_page: Callable[..., Tab], way: str):
    tab = open_page(server)
    tab.until(READY)
    tab.run("document.getElementById('most').value = '2000'")
    ask(tab, "on and on " * 190)
    tab.until("document.querySelector('#talk .model')?.textContent.length > 20")
    assert tab.text("send") == "Stop"
    tab.click("send") if way == "button" else tab.press("Escape")
    tab.until("!chat.running")
    assert "stopped" in status_line(tab) and tab.text("send") == "Send"
    poll(
        lambda: server.metric("counterpoint_requests_running") == 0,
        what="the stopped answer goes on",
    )
    assert not tab.problems


def test_reasoning_is_shown_apart_and_not_sent_back(server: Running, open_page: Callable[..., Tab]):
    """The stream that a reasoning model produces on any server of this API."""
    tab = open_page(server)
    tab.until(READY)
    deltas = [
        {"role": "assistant"},
        {"reasoning_content": "let me "},
        {"reasoning_content": "think"},
        {"content": "done"},
    ]
    events = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    tab.run(f"window.fetch = async () => new Response({json.dumps(stream)})")
    ask(tab, "why?")
    tab.until("!chat.running && document.querySelectorAll('#talk .model').length === 1")
    assert (
        answer(tab) == "done"
        and tab.run("document.querySelector('#talk .thoughts').textContent") == "let me think"
    )
    assert tab.run("chat.messages.at(-1).content") == "done"


def test_an_error_is_shown(server: Running, open_page: Callable[..., Tab]):
    tab = open_page(server)
    tab.until(READY)
    ask(tab, "FAIL THE STEP")
    tab.until("document.querySelector('#talk .told.error')")
    assert "as asked" in status_line(tab)


def test_a_key_is_asked_for(own_server: Start, open_page: Callable[..., Tab]):
    server = own_server(api_key="swordfish-7").wait_ready()
    tab = open_page(server)
    tab.until("document.getElementById('locked').open")
    assert "echo" not in tab.run("document.body.textContent"), "nothing is told without the key"
    tab.type("swordfish")
    tab.press("Enter")
    tab.until(
        "document.getElementById('wrong').textContent && document.getElementById('locked').open"
    )
    tab.type("swordfish-7")
    tab.press("Enter")
    tab.until(READY)
    ask(tab, "let me in")
    tab.until("!chat.running && document.querySelectorAll('#talk .model').length === 1")
    assert answer(tab) == "let me in"


def test_a_lost_server_is_shown(own_server: Start, open_page: Callable[..., Tab]):
    server = own_server().wait_ready()
    tab = open_page(server)
    tab.until(READY)
    server.engine.kill()
    tab.until("document.getElementById('state').dataset.state === 'dead'")
    assert "ended" in tab.text("state")
    assert server.stop() == 0
    tab.until("document.getElementById('state').dataset.state === 'lost'")


def test_a_phone_and_the_dark(server: Running, open_page: Callable[..., Tab]):
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = open_page(server, width=360, height=740, features=["prefers-color-scheme: light"])
    dark = open_page(server, width=360, height=740, features=["prefers-color-scheme: dark"])
    for tab in (light, dark):
        tab.until(READY)
        assert tab.run("document.documentElement.scrollWidth") <= 360, "it must not scroll sideways"
        assert tab.run("document.getElementById('strip').clientWidth") > 280
    brightness = "(.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0))"
    assert (
        light.run(paper + brightness[1:-1]) > 3 * 200
        and dark.run(paper + brightness[1:-1]) < 3 * 60
    )
    assert not light.problems and not dark.problems


def test_with_the_keyboard_alone_and_for_screen_readers(
    server: Running, open_page: Callable[..., Tab]
):
    tab = open_page(server, features=["prefers-reduced-motion: reduce"])
    tab.until(READY)
    tab.press("/")
    assert (
        tab.run("document.activeElement.id") == "ask"
        and tab.run("document.activeElement.value") == ""
    )
    tab.type("by hand")
    tab.press("Enter")
    tab.until("!chat.running && document.querySelectorAll('#talk .model').length === 1")
    assert answer(tab) == "by hand"
    reached = set()
    for _ in range(30):
        tab.press("Tab")
        reached.add(tab.run("document.activeElement.id || document.activeElement.tagName"))
    assert {"play", "pause", "span", "talk", "ask", "SUMMARY", "fresh", "send"} <= reached
    nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox", "spinbutton", "link", "log", "image", "img", "region"}
    found = [
        (n["role"]["value"], n.get("name", {}).get("value", ""))
        for n in nodes
        if n["role"]["value"] in roles and not n["ignored"]
    ]
    assert {"button", "textbox", "combobox", "log"} <= {role for role, _ in found}
    assert all(name.strip() for _, name in found), found
    assert any(role in ("image", "img") and "running" in name for role, name in found), (
        "the picture is told in words"
    )
    assert not tab.problems


def test_policy_figures_are_shown(server: Running, open_page: Callable[..., Tab]):
    tab = open_page(server)
    tab.until(READY)
    tab.until("view.frame")
    knows = {
        "about": {"model": "m", "units": 132, "lanes": "", "policy": "auto", "context_tokens": 1},
        "splits": [[100, 32, 0.5], [132, 132, 0.3], [84, 48, 0.2]],
        "active_share": 0.62,
        "resplit_rate": 1.5,
        "fallbacks": {"fused gains more": 12, "no split meets tpot": 3},
        "prediction_errors": {"decode": [0.03, 0.07]},
        "guards": [["decode on 32", 1.2], ["prefill on 132", 1.0]],
    }
    ids = ["splits", "resplits", "fallbacks", "errors", "guards"]
    seen = tab.run(  # at once: the next frame is on its way
        f"""(() => {{ show({{...view.frame, ...{json.dumps(knows)}}}, 1, 2);
        return {ids}.map((id) => document.getElementById(id).textContent
            .replaceAll("\\u00a0", " ")) }})()"""
    )
    assert dict(zip(ids, seen, strict=True)) == {
        "splits": "cores at work 62 %; prefill + decode cores 100 + 32 50 %; all for both 30 %; "
        "84 + 48 20 %",
        "resplits": "1.5",
        "fallbacks": "not split: fused gains more 12; no split meets tpot 3",
        "errors": "predictions off by (p50, p95) decode 3.0 %, 7.0 %",
        "guards": "guards up to 1.20 decode on 32",
    }
    assert not tab.problems


def test_pausing_the_picture(server: Running, open_page: Callable[..., Tab]):
    tab = open_page(server)
    tab.until(READY)
    tab.until("view.frame && view.shown")
    tab.click("pause")
    picture = tab.run("document.getElementById('strip').toDataURL()")
    last = tab.run("view.frame.now_s")
    tab.until(f"view.frame.now_s > {last} + 1")
    assert (
        tab.run("view.shown.now") < last + 0.5
        and tab.run("document.getElementById('pause').ariaPressed") == "true"
    )
    tab.click("pause")
    tab.until("view.shown.now > view.frame.now_s - 1")
    tab.run("draw()")
    assert tab.run("document.getElementById('strip').toDataURL()") != picture


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two lanes need two cores")
def test_both_lanes_are_drawn(tiny: str, tmp_path: Path, open_page: Callable[..., Tab]):
    """Multiplex on two cores: prefill above and decode below, at the same time."""
    flags = [
        "--port",
        "0",
        "--policy",
        "multiplex",
        "--cores",
        "2",
        "--load-format",
        "dummy",
        "--layer-group",
        "1",
    ]
    server = Running(
        tmp_path / "log", [sys.executable, "-m", "counterpoint", "serve", tiny, *flags]
    ).wait_ready()
    try:
        tab = open_page(server)
        tab.until(READY)
        tab.run("document.getElementById('span').value = '60'")
        tab.click("play")
        both = (
            "view.steps.some(p => p[5] && p[4] === 1 && "
            "view.steps.some(d => d[6] && d[4] === 1 && d[2] < p[3] && p[2] < d[3]))"
        )
        tab.until(both, 60)
        tab.until("!playing", 60)
        assert (
            tab.run("view.frame.about.roles") == ["decode", "prefill"]
            and tab.run("view.frame.about.units") == 2
        )
        seen = tab.run(
            """(() => { draw(); const {left, right, staff} = layout(), ratio = devicePixelRatio;
            const found = new Set();
            for (const [name, share] of [["above", 0.25], ["below", 0.75]]) {
              const y = Math.round((staff.y + share * staff.h) * ratio);
              const {data} = pen.getImageData(left * ratio, y, (right - left) * ratio, 1);
              for (let i = 0; i < data.length; i += 4) {
                if (data[i + 3] < 100) continue;
                if (data[i] > data[i + 2] + 60) found.add(name + " prefill");
                if (data[i + 2] > data[i] + 60) found.add(name + " decode");
              }
            } return [...found] })()"""
        )
        assert {"above prefill", "below decode"} <= set(seen), seen
        assert not tab.problems
    finally:
        assert server.stop() == 0


def test_the_page_is_one_document(server: Running):
    response = server.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert (
        "{{" not in response.text
        and (ROOT / "counterpoint/serve/dashboard/page.js").read_text() in response.text
    )


def luminance(colour: str) -> float:
    """WCAG 2.2, "relative luminance"."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_contrast():
    """WCAG 2.2, criterion 1.4.3: a contrast of 4.5, in the light and in the dark."""
    style = (ROOT / "counterpoint/serve/dashboard/page.css").read_text()
    themes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(themes) == 2
    for theme in themes:
        for ground in ("paper", "card"):
            for word in ("ink", "faint", "prefill", "decode", "bad"):
                light, dark = sorted(
                    (luminance(theme[word]), luminance(theme[ground])), reverse=True
                )
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (word, theme[word], ground)
