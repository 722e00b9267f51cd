"""The system's Chromium without a window, for the picture of the page and for its tests."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NoBrowserError(Exception):
    """There is none; says how to get one."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, started.

    Raises:
        NoBrowserError: it is not installed.
    """
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise NoBrowserError("Chromium is not installed (Debian and Ubuntu: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        try:
            yield browser
        finally:
            browser.close()
