"""The page at `GET /`: one HTML file without outside resources, and the policy that holds it to that."""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """What a server sends."""

    body: bytes
    headers: Mapping[str, str]


def load() -> Page:
    """The page with its headers; its policy allows the script and the style of the file as they are, and no others."""
    body = resources.files(__name__).joinpath("page.html").read_bytes()
    sources = {"script": "", "style": ""}
    for kind, text in _INLINE.findall(body):
        sources[kind.decode()] += f" 'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
    policy = [
        "default-src 'none'",
        f"script-src{sources['script']}",
        f"style-src{sources['style']}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(body, headers)
