"""The API keys of a server: one from the command, more from a file that can change while it runs."""

import hashlib
import hmac
import logging
from pathlib import Path

log = logging.getLogger("blink")

_LARGEST_FILE = 1 << 20


class KeyFileError(Exception):
    """Why a key file cannot be used, in one line that holds no key."""


class Keys:
    """Keys that open the server. Only their digests are kept, so a comparison tells nothing of a key, nor its length.

    Raises:
        KeyFileError: the file cannot be used.
    """

    def __init__(self, key: str | None = None, file: Path | None = None) -> None:
        self._own = frozenset({_digest(key.encode("utf-8", "surrogateescape"))} if key else ())
        self._file = file
        self._digests = self._own | (_read(file) if file else frozenset())

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, given: bytes) -> bool:
        """Whether this is one of the keys; takes as long whichever it is, or none."""
        digest = _digest(given)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def reload(self) -> None:
        """Read the file again. A file that cannot be used leaves the keys as they are, with a warning."""
        if self._file is None:
            return
        try:
            self._digests = self._own | _read(self._file)
        except KeyFileError as error:
            log.warning("the API keys stay as they were: %s", error)
        else:
            log.info("%d API keys, read again", len(self))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: Path) -> frozenset[bytes]:
    """The digests of a file's keys: one a line; blank lines and what follows a # at a word's start are skipped."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read ({error.strerror or type(error).__name__})") from None
    if len(data) > _LARGEST_FILE:
        raise KeyFileError(f"{path} is larger than {_LARGEST_FILE} bytes")
    digests: set[bytes] = set()
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        words = line.split()
        comment = next((i for i, word in enumerate(words) if word.startswith(b"#")), len(words))
        if comment > 1:
            raise KeyFileError(f"line {number} of {path} has white space inside its key; write one key a line")
        digests.update(_digest(word) for word in words[:comment])
    if not digests:
        raise KeyFileError(f"{path} has no key in it")
    return frozenset(digests)
