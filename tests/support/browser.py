"""A headless Chromium, driven by Playwright in a thread and a loop of its own: the tests' loops come and go.

`await browser(page.goto(url))` runs there what the test awaits here. Each `Page` records what its console and its
policy complained of.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


def missing() -> str | None:
    """Why there can be no browser here."""
    if importlib.util.find_spec("playwright") is None:
        return "needs the Python package playwright"
    return None if CHROMIUM else "needs Debian's chromium"


class Browser:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    async def _start(self) -> None:
        from playwright.async_api import async_playwright

        self._playwright = await async_playwright().start()
        self._chromium = await self._playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))

    async def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @contextlib.asynccontextmanager
    async def page(self, **options: Any) -> AsyncIterator[tuple[Any, list[str]]]:
        """A page with no past, and the list of what went wrong on it."""
        wrong: list[str] = []
        page = await self(self._page(wrong, options))
        try:
            yield page, wrong
        finally:
            await self(page.context.close())

    async def _page(self, wrong: list[str], options: dict[str, Any]) -> Any:
        """All that speaks to the browser does so in its loop, also where there is nothing to be awaited."""
        context = await self._chromium.new_context(**options)
        context.set_default_timeout(15000)
        page = await context.new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        return page

    def stop(self) -> None:
        async def stop() -> None:
            await self._chromium.close()
            await self._playwright.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def browsers() -> Iterator[Browser]:
    """For a fixture."""
    browser = Browser()
    yield browser
    browser.stop()
