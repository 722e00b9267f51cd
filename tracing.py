"""The W3C trace context of a request: which trace of the caller it belongs to."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(NamedTuple):
    """The caller's trace, and its span that made the request."""

    trace_id: str
    parent_id: str
    sampled: bool


def read(headers: Sequence[str]) -> Trace | None:
    """What the `traceparent` headers of a request say, or None if there is not one valid one.

    Versions after 00 are read as far as 00 goes, as the standard asks.
    """
    found = _TRACEPARENT.fullmatch(headers[0].strip(" \t")) if len(headers) == 1 else None
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return Trace(trace_id, parent_id, bool(int(flags, 16) & 1))
