"""API keys: from the command, from a file, and changed while the server runs."""

import hmac
import logging
import os
import signal
from pathlib import Path

import pytest
from servers import RunningServer, StartServer, wait_until
from test_serve import run_serve
from test_service import ASKED, get, post

import keys
from keys import KeyFileError, Keys


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("\ufeff# ours\n\nalpha\r\n  beta\t# Ana's\nga#mma\nключ\n#delta\nalpha\n".encode() + b"\xff\xfe")
    known = Keys("own", file)
    assert len(known) == 6
    for key in (b"own", b"alpha", b"beta", b"ga#mma", "ключ".encode(), b"\xff\xfe"):
        assert key in known
    for key in (b"", b"#", b"delta", b"#delta", b"alph", b"alpha\n", b"ALPHA", b"Ana's", b"ours"):
        assert key not in known
    assert not Keys()
    assert b"" not in Keys()
    assert "gamma" not in repr(vars(Keys("gamma")))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "No such file"),
        (b"", "has no key in it"),
        (b"# nothing\n \n", "has no key in it"),
        (b"one\ntwo words\n", "line 2 of"),
        (b"k" * (1 << 20) + b"\nmore", "is larger than"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, data: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(KeyFileError, match=words) as caught:
        Keys("own", file)
    assert "\n" not in str(caught.value)
    assert "two" not in str(caught.value)
    with pytest.raises(KeyFileError, match="Is a directory"):
        Keys(None, tmp_path)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\na-much-longer-one\n")
    known = Keys(None, file)
    lengths: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        lengths.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(keys.hmac, "compare_digest", counted)
    for given in (b"one", b"two", b"a-much-longer-one", b"none of them", b""):
        lengths.clear()
        assert (given in known) == (given in (b"one", b"two", b"a-much-longer-one"))
        assert lengths == [(32, 32)] * 3


def test_a_bad_file_keeps_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    known = Keys("own", file)
    caplog.set_level(logging.INFO)
    file.write_text("new key\n")
    known.reload()
    file.unlink()
    known.reload()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert b"old" in known
    file.write_text("new\n")
    known.reload()
    assert caplog.records[-1].getMessage() == "2 API keys, read again"
    assert b"old" not in known
    assert b"new" in known
    assert b"own" in known
    assert "new key" not in caplog.text
    Keys("own").reload()


def status(running: RunningServer, key: str) -> int:
    return get(f"{running.url}/v1/models", Authorization=f"Bearer {key}")[0]


def test_a_server_changes_its_keys_at_a_hangup(start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n# a comment\nsecond\n")
    with start_server("--api-key-file", str(file), env={"BLINK_API_KEY": "own"}) as running:
        assert [status(running, key) for key in ("first", "second", "own", "third", "#", "")] == [200] * 3 + [401] * 3
        assert post(running.url, ASKED, Authorization="Bearer second")[0] == 200
        file.write_text("two words\n")
        os.kill(running.process.pid, signal.SIGHUP)
        wait_until(lambda: "stay as they were" in running.stderr)
        assert [status(running, key) for key in ("first", "own", "two")] == [200, 200, 401]
        file.write_text("third\n")
        for _ in range(20):
            os.kill(running.process.pid, signal.SIGHUP)
        wait_until(lambda: status(running, "third") == 200)
        assert [status(running, key) for key in ("first", "second", "own")] == [401, 401, 200]
        assert running.stderr.count("stay as they were") == 1
        assert running.process.poll() is None
        for key in ("first", "second", "third"):
            assert key not in running.stderr


def test_a_bad_key_file_ends_the_start(tiny_qwen35: Path, tmp_path: Path) -> None:
    ended = run_serve("--model", str(tiny_qwen35), "--api-key-file", str(tmp_path / "none"))
    assert ended.returncode == 2
    assert "--api-key-file" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_hangup_without_a_key_file_ends_the_server(start_server: StartServer) -> None:
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    try:
        with start_server() as running:
            os.kill(running.process.pid, signal.SIGHUP)
            assert running.process.wait(30) == -signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, inherited)
