"""Log lines on stderr: plain text for people, or one JSON object a line for machines."""

import json
import logging
import sys
from datetime import UTC, datetime

log = logging.getLogger("blink")

_TEXT = "%(asctime)s %(levelname)s %(message)s"
_CHATTY = ("httpx", "huggingface_hub", "urllib3", "filelock", "torch")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what a caller passes as `extra={"fields": {...}}` becomes keys of it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str, form: str) -> None:
    """Send every log line to stderr as "text" or "json", warnings of libraries too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(form == "json")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def last_words(message: str, form: str) -> None:
    """Say why the command ends, in a line that stands alone."""
    if form == "json":
        log.critical("%s", message)
    else:
        print(f"blink: {message}", file=sys.stderr)
