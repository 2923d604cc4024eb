"""The live page of a real gateway in a real browser, with streams whose every byte is the test's own."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import browser as browsers
from tests.support import script as s
from tests.support.browser import Browser
from tests.support.client import RawClient
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

reason = browsers.missing()
pytestmark = [pytest.mark.skipif(reason is not None, reason=str(reason)), pytest.mark.seconds(60)]

Start = Callable[..., Awaitable[Gateway]]
Connect = Callable[..., Awaitable[RawClient]]

REFUSED = re.compile("net::ERR_(CONNECTION|EMPTY|INCOMPLETE)")  # the browser's own words while the gateway is away


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers.browsers()


def address(gateway: Gateway) -> str:
    return f"http://{gateway.admin_host}:{gateway.admin_port}/-/dashboard"


def expect(what: Any) -> Any:
    """Playwright's assertions: they wait for what is to come."""
    from playwright.async_api import expect

    expect.set_options(timeout=15000)
    return expect(what)


@pytest.fixture
async def look(browser: Browser) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """`await look(url, **options)`: a page that is live; nothing may have gone wrong on it at the end.

    `first`: a script that runs before the page's own.
    """
    open_pages: list[tuple[Any, Any, list[str]]] = []

    async def look(url: str, *, first: str = "", **options: Any) -> Any:
        context = browser.page(**options)
        page, wrong = await context.__aenter__()
        open_pages.append((context, page, wrong))
        await browser(page.add_init_script(first))
        await browser(page.goto(url))
        await browser(expect(page.locator("#connection")).to_have_text("Live"))
        return page

    yield look
    for context, _, _ in open_pages:
        await context.__aexit__(None, None, None)
    complaints = [text for _, _, wrong in open_pages for text in wrong if not REFUSED.search(text)]
    assert not complaints


def sooner(late: int, soon: int) -> str:
    """A script: whoever asks to be called after `late` ms is called after `soon`."""
    return f"const later = setTimeout; window.setTimeout = (f, ms) => later(f, ms === {late} ? {soon} : ms);"


def chat(request_id: str, **members: Any) -> bytes:
    return s.post({**s.CHAT, **members}, fields=[("X-Request-Id", request_id)])


async def streaming(upstream: RawUpstream, client: RawClient, request_id: str, tokens: int, **members: Any) -> HttpWire:
    """A stream under way; its wire is the backend's side."""
    upstream.script = held = s.Held(s.SSE_HEAD, *[s.chunk(s.delta("x"))] * tokens)
    await client.send(chat(request_id, **members))
    return await held.wire()


async def test_it_shows_and_updates(
    gateway: Gateway, upstream: RawUpstream, connect: Connect, browser: Browser, look: Any
) -> None:
    """A stream with its phase and tokens, as they come; its backend; its end."""
    page = await look(address(gateway))
    await browser(expect(page.locator("#streams-note")).to_have_text("Nothing is in flight."))
    client = await connect()
    wire = await streaming(upstream, client, "shown-1", 3)
    row = page.locator("#stream-rows tr", has_text="shown-1")
    await browser(expect(row.locator("td").nth(4)).to_have_text("3"))
    await browser(expect(row).to_contain_text("streaming"))
    await browser(expect(row).to_contain_text("POST /v1/chat/completions from 127.0.0.1"))
    await wire.send(s.chunk(s.delta("y")) * 4)
    await browser(expect(row.locator("td").nth(4)).to_have_text("7"))
    await browser(expect(page.locator("#figure-flight .reading")).to_contain_text("1"))
    backend = page.locator("#backend-rows tr")
    await browser(expect(backend).to_contain_text(upstream.url.removeprefix("http://")))
    await browser(expect(backend.locator("td").nth(2)).to_have_text("1"))
    await browser(expect(page).to_have_title("1 in flight – tokenpipe"))
    await wire.send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
    assert (await client.read_response()).complete
    await browser(expect(row).to_have_count(0))
    ended = page.locator("#ending-rows tr", has_text="complete")
    await browser(expect(ended.locator("td").nth(1)).to_have_text("1"))
    await browser(expect(page.locator("#figure-ttft .reading")).to_contain_text("ms"))
    await browser(expect(page.locator("#figure-ttft path.first")).not_to_have_count(0))


async def test_a_client_that_holds_back_is_seen(
    gateway: Gateway, upstream: RawUpstream, connect: Connect, browser: Browser, look: Any
) -> None:
    async def flood(wire: HttpWire, request: Message) -> None:
        await wire.send(s.SSE_HEAD)
        try:
            while True:
                await wire.send(s.chunk(s.delta("y" * 8000)) * 8)
        except ConnectionError:
            pass

    upstream.script = flood
    client = await connect(receive_buffer=4096)
    await client.send(chat("held-back"))
    page = await look(address(gateway))
    held = page.locator("#stream-rows tr", has_text="held-back").locator("td").nth(6)
    await browser(expect(held).to_contain_text("still"))
    client.reset()


async def test_abort(gateway: Gateway, upstream: RawUpstream, connect: Connect, browser: Browser, look: Any) -> None:
    """By pointer: asked first, and "Keep it" keeps it; then the backend is told, the client sees a broken answer."""
    page = await look(address(gateway))
    clients = [await connect() for _ in range(2)]
    wires = [await streaming(upstream, client, f"abort/{n}:+=@~", 2) for n, client in enumerate(clients)]
    rows = page.locator("#stream-rows tr")
    await browser(expect(rows).to_have_count(2))
    await browser(rows.first.get_by_role("button").click())
    dialog = page.get_by_role("dialog", name="Abort this stream?")
    await browser(expect(dialog).to_be_visible())
    await browser(dialog.get_by_role("button", name="Keep it").click())
    await browser(expect(dialog).to_be_hidden())
    await browser(expect(rows).to_have_count(2))
    await browser(rows.first.get_by_role("button").click())
    await browser(dialog.get_by_role("button", name="Abort").click())
    await wires[0].wait_closed(5)
    assert not (await clients[0].read_response()).complete
    await browser(expect(rows).to_have_count(1))
    await browser(expect(page.locator("#said")).to_have_text("Aborted abort/0:+=@~."))
    await gateway.logged(outcome="draining", request_id="abort/0:+=@~")
    await wires[1].send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
    assert (await clients[1].read_response()).complete


async def test_by_keyboard(gateway: Gateway, upstream: RawUpstream, connect: Connect, browser: Browser, look: Any) -> None:
    """Past the plots to the streams, a stream aborted, and the focus never lost; a plot's past by the arrow keys."""
    clients = [await connect() for _ in range(2)]
    wires = [await streaming(upstream, client, f"key/{n}", 2) for n, client in enumerate(clients)]
    page = await look(address(gateway))
    await browser(expect(page.locator("#stream-rows tr")).to_have_count(2))

    async def press(*keys: str) -> str:
        for key in keys:
            await browser(page.keyboard.press(key))
        return str(await browser(page.evaluate(FOCUS)))

    assert await press("Tab") == "Skip to the streams"
    assert await press("Tab") == "Pause"
    assert await press("Tab") == "In flight, by the moment"
    plot = page.locator("#figure-flight svg")
    await press("ArrowLeft", "ArrowLeft")
    await browser(expect(plot).to_have_attribute("aria-valuenow", "-2"))
    await browser(expect(plot).to_have_attribute("aria-valuetext", re.compile("^2 s ago: ")))
    await press("End")
    await browser(expect(plot).to_have_attribute("aria-valuetext", re.compile("^now: 2, requests, 2 streaming")))
    await press("Shift+Tab", "Shift+Tab")
    await press("Enter")
    assert await press("Tab") == "Abort key/0"
    assert await press("Enter") == "Keep it"  # so that a second Enter harms nobody
    await press("Escape")
    await browser(expect(page.get_by_role("dialog")).to_be_hidden())
    assert await press("Enter", "Tab") == "Abort"
    await press("Enter")
    await wires[0].wait_closed(5)
    await browser(expect(page.locator("#stream-rows tr")).to_have_count(1))
    assert await press() == "Abort key/1"
    wires[1].reset()
    await browser(expect(page.locator("#stream-rows tr")).to_have_count(0))
    assert await press() == "Streams"


async def test_pause(gateway: Gateway, upstream: RawUpstream, connect: Connect, browser: Browser, look: Any) -> None:
    """What moves by itself can be stopped, and goes on with what came meanwhile (WCAG 2.2.2)."""
    page = await look(address(gateway))
    button = page.get_by_role("button", name="Pause")
    await browser(button.click())
    await browser(expect(page.locator("#connection")).to_have_text("Paused"))
    client = await connect()
    wire = await streaming(upstream, client, "meanwhile", 1)
    taken = await browser(page.evaluate("performance.now()"))
    await browser(page.wait_for_function("t => performance.now() > t + 1500", arg=taken))
    await browser(expect(page.locator("#stream-rows tr")).to_have_count(0))
    await browser(button.click())
    await browser(expect(page.locator("#stream-rows tr")).to_have_count(1))
    wire.reset()


FOCUS = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
NASTY = "<img src=x onerror=alert(1)><script>alert(2)</script>" + "w" * 5000
LAYOUT = """() => ({
    wide: document.documentElement.scrollWidth > innerWidth,
    ground: getComputedStyle(document.body).backgroundColor,
    small: [...document.querySelectorAll('button')].filter(b => b.offsetParent && b.offsetHeight < 24).length,
    clipped: [...document.querySelectorAll('.card')].filter(c => c.scrollWidth > c.clientWidth + 1).length,
})"""
CONTRAST = """() => {
    const rgb = (text) => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
    const light = (text) => {
        const [r, g, b] = rgb(text).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const color = getComputedStyle(e).backgroundColor;
            if (!/, 0\\)$/.test(color)) return color;
        }
        return 'rgb(255, 255, 255)';
    };
    const low = [];
    for (const e of document.querySelectorAll('body *')) {
        const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
        if (!own || !e.getClientRects().length) continue;
        const style = getComputedStyle(e);
        const both = [light(e instanceof SVGElement ? style.fill : style.color), light(ground(e))];
        const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        if (contrast < 4.5) low.push(`${e.tagName} ${e.textContent.slice(0, 20)} ${contrast.toFixed(2)}`);
    }
    return low;
}"""


async def test_phone_and_desk_light_and_dark(
    gateway: Gateway, upstream: RawUpstream, connect: Connect, browser: Browser, look: Any
) -> None:
    """Nothing is wider than the window, all text has a contrast of 4.5 and more (WCAG 1.4.3), buttons can be hit.

    And what a client names its model is shown as it is: no markup, no script, and no room taken.
    """
    client = await connect()
    wire = await streaming(upstream, client, "a" * 100, 2, model=NASTY)
    page = await look(address(gateway), reduced_motion="reduce", has_touch=True)
    await browser(expect(page.locator("#stream-rows")).to_contain_text(NASTY[:60]))
    assert await browser(page.locator("main img, main script").count()) == 0
    for width, scheme in itertools.product((360, 820, 1280), ("light", "dark")):
        await browser(page.set_viewport_size({"width": width, "height": 760}))
        await browser(page.emulate_media(color_scheme=scheme, reduced_motion="reduce"))
        layout = await browser(page.evaluate(LAYOUT))
        assert (layout["wide"], layout["small"], layout["clipped"]) == (False, 0, 0), (width, scheme)
        darkness = sum(map(int, re.findall(r"\d+", layout["ground"])[:3]))
        assert darkness < 128 if scheme == "dark" else darkness > 640
        await browser(page.locator("#stream-rows button").click())
        assert await browser(page.evaluate(CONTRAST)) == [], (width, scheme)
        await browser(page.keyboard.press("Escape"))
    assert await browser(page.locator(".bar i").first.evaluate("e => getComputedStyle(e).transitionDuration")) == "0s"
    wire.reset()


async def test_it_survives_a_restart(start_gateway: Start, upstream: RawUpstream, browser: Browser, look: Any) -> None:
    """It says that the gateway is away, keeps what it shows, and goes on by itself."""
    gateway = await start_gateway(backends=[upstream.url])
    port = str(gateway.admin_port)
    page = await look(address(gateway))
    await browser(expect(page.locator("#figure-flight path.first")).not_to_have_count(0))
    gateway.signal(signal.SIGTERM)
    await gateway.stopped()
    await browser(expect(page.locator("#connection")).to_have_text("Reconnecting"))
    await browser(expect(page.get_by_role("alert")).to_contain_text("cannot be reached"))
    await browser(expect(page.locator("#backend-rows tr")).to_have_count(1))
    await start_gateway(backends=[upstream.url], flags=["--admin-port", port])
    await browser(expect(page.locator("#connection")).to_have_text("Live"))
    await browser(expect(page.locator("#notice")).to_be_hidden())


async def test_it_leaves_a_gateway_that_falls_silent(
    start_gateway: Start, upstream: RawUpstream, browser: Browser, look: Any
) -> None:
    """A connection that is there, but brings nothing, is not taken for a live one."""
    gateway = await start_gateway(backends=[upstream.url])
    page = await look(address(gateway), first=sooner(5000, 2000))
    gateway.signal(signal.SIGSTOP)
    try:
        await browser(expect(page.locator("#connection")).to_have_text("Reconnecting"))
    finally:
        gateway.signal(signal.SIGCONT)
    await browser(expect(page.locator("#connection")).to_have_text("Live"))


async def test_the_token(
    start_gateway: Start, upstream: RawUpstream, browser: Browser, look: Any, tmp_path: Path, connect: Connect
) -> None:
    """The browser asks for it, and sends it along with the feed, and with the end of a stream."""
    token = tmp_path / "token"
    token.write_text("s3cret-of-the-admin\n")
    config = {"listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0", "token_file": str(token)}}
    gateway = await start_gateway(config=config, backends=[upstream.url])
    page = await look(address(gateway), http_credentials={"username": "", "password": "s3cret-of-the-admin"})
    client = await gateway.connect()
    wire = await streaming(upstream, client, "with-token", 1)
    await browser(page.get_by_role("button", name="Abort with-token").click())
    await browser(page.get_by_role("dialog").get_by_role("button", name="Abort").click())
    await wire.wait_closed(5)
    client.reset()


def watching(gateway: Gateway) -> int:
    """Connections to its admin listener (proc(5): /proc/net/tcp)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{gateway.admin_port:04X}") and row[3] == "01" for row in rows)


HIDDEN = """hidden => {
    Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
}"""


async def test_nobody_looks(gateway: Gateway, browser: Browser) -> None:
    """A page that is left in the background for half a minute asks no more, and one that is closed never."""
    await until(lambda: not watching(gateway), "the end of what was before")
    async with browser.page() as (page, wrong):
        await browser(page.add_init_script(sooner(30000, 50)))
        await browser(page.goto(address(gateway)))
        await browser(expect(page.locator("#connection")).to_have_text("Live"))
        connections = watching(gateway)
        await browser(page.evaluate(HIDDEN, True))
        await browser(expect(page.locator("#connection")).to_have_text("Resting"))
        await until(lambda: watching(gateway) < connections, "the feed's end")
        await browser(page.evaluate(HIDDEN, False))
        await browser(expect(page.locator("#connection")).to_have_text("Live"))
    assert not wrong
    await until(lambda: not watching(gateway), "the end of all that it asked for")
