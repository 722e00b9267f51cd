"""The README's picture of the page: the built-in model's real answers to its first example.

Run: python -m bench.screenshot docs/page.png (needs Chromium).
"""

import argparse
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import expect

from bench.browser import chromium
from bench.load import free_port, wait_ready

SIZE = {"width": 1180, "height": 900}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="PNG file to write")
    parser.add_argument("--model", default="mini", help="as of serve.py")
    args = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "serve.py", "--model", args.model, "--port", str(port)])
    try:
        wait_ready(url)
        with chromium() as browser:
            page = browser.new_page(viewport=SIZE, reduced_motion="reduce")
            page.goto(url)
            page.get_by_label("State", exact=True).focus()
            for _ in range(2):  # the first answer is slower
                with page.expect_response("**/v1/systemone"):
                    page.keyboard.press("Control+Enter")
                expect(page.locator(".answer")).to_have_count(3)
            page.evaluate("document.activeElement.blur()")
            args.target.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=args.target)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
