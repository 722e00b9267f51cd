"""The request files of `tests/cases`, over raw sockets. Their format is described there."""

import contextlib
import gzip
import json
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zstandard
from servers import RunningServer

CASES = {
    f"{file.stem}/{name}": case
    for file in sorted((Path(__file__).parent / "cases").glob("*.json"))
    for name, case in json.loads(file.read_text(encoding="utf-8")).items()
}
PATIENCE_S = 120.0


class Response(NamedTuple):
    """A final response: its headers by lower-case name, and its body."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """One client connection that reads responses exactly as framed and nothing beyond them."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=PATIENCE_S)
        self._input = self._socket.makefile("rb")
        self.saw_continue = False

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._input.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        # A server that has refused already may close before it has read everything: what it said still counts.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def end_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def receive(self, *, bodiless: bool = False) -> Response:
        """Return the next final response; note an interim one."""
        status, headers = self._head()
        if status == 100:
            self.saw_continue = True
            status, headers = self._head()
        assert "transfer-encoding" not in headers
        length = 0 if bodiless else int(headers["content-length"])
        body = self._input.read(length)
        assert len(body) == length
        return Response(status, headers, body)

    def receive_interim(self) -> bool:
        """Read up to and with an interim response; false if the next response is final, which stays unread."""
        line = self._input.peek(12)[:12]
        if not line.startswith(b"HTTP/1.1 100"):
            return False
        assert self._head() == (100, {})
        self.saw_continue = True
        return True

    def ended(self) -> bool:
        """Whether the server has closed its side; waits for it."""
        try:
            return self._input.read(1) == b""
        except ConnectionResetError:
            return True

    def _head(self) -> tuple[int, dict[str, str]]:
        status = self._input.readline()
        assert re.fullmatch(rb"HTTP/1\.1 [1-5][0-9][0-9] [ -~]*\r\n", status), status
        headers: dict[str, str] = {}
        while (line := self._input.readline()) != b"\r\n":
            name, colon, value = line.decode("latin-1").partition(":")
            assert colon
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value.strip()
        return int(status.split()[1]), headers


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_case(case: dict[str, Any], request: pytest.FixtureRequest) -> None:
    send, expect = case["send"], case["expect"]
    server = request.getfixturevalue("keyed_server" if send.get("key_needed") else "server")
    host = send.get("host", "127.0.0.1")
    statuses = expect["status"] if isinstance(expect["status"], list) else [expect["status"]]
    bodiless = send.get("method") == "HEAD"
    with Connection(host, server.port) as connection:
        deliver(connection, send)
        for status in statuses:
            response = connection.receive(bodiless=bodiless)
            assert response.status == status, response.body
            check_framing(response)
            if status >= 400 and not bodiless:
                check_error(response, expect)
        if "interim" in expect:
            assert connection.saw_continue is expect["interim"]
        for name, value in expect.get("headers", {}).items():
            assert response.headers.get(name.lower()) == value
        closes = response.headers.get("connection") == "close"
        assert closes is expect.get("closes", closes)
        if closes or send.get("half_close"):
            assert connection.ended()
        else:
            check_in_step(connection)
    if response.status == 200 and send.get("path", "/v1/systemone").startswith("/v1/systemone") and "raw" not in send:
        answered = json.loads(response.body, parse_constant=refuse_constant)
        check_answers(asked(send), answered)
        for name, known in expect.get("answers", {}).items():
            assert answered["answers"][name] | known == answered["answers"][name]
        compare(server, answered["answers"], expect)


def deliver(connection: Connection, send: dict[str, Any]) -> None:
    if "raw" in send:
        connection.send(joined(send["raw"]))
    else:
        head, body = request_bytes(send)
        if send.get("frame") == "expect":
            connection.send(head)
            if connection.receive_interim():
                connection.send(body)
        else:
            connection.send(head + body)
    if send.get("half_close"):
        connection.end_sending()


def request_bytes(send: dict[str, Any]) -> tuple[bytes, bytes]:
    """Head and framed body of a case's request."""
    body = plain_body(send)
    headers = send.get("headers", {})
    headers = list(headers.items()) if isinstance(headers, dict) else [tuple(pair) for pair in headers]
    version, frame = send.get("version", "1.1"), send.get("frame", "length")
    if version == "1.1" and not any(name.lower() == "host" for name, _ in headers):
        headers.append(("Host", "blink.test"))
    if body is not None:
        if not any(name.lower() == "content-type" for name, _ in headers):
            headers.append(("Content-Type", "application/json"))
        if coding := send.get("encode"):
            body = gzip.compress(body) if coding == "gzip" else zstandard.compress(body)
            headers.append(("Content-Encoding", coding))
        if frame == "chunked":
            headers.append(("Transfer-Encoding", "chunked"))
            size = send.get("chunk", 100)
            chunks = [body[i : i + size] for i in range(0, len(body), size)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
        elif frame in ("length", "expect"):
            headers.append(("Content-Length", str(len(body))))
        if frame == "expect":
            headers.append(("Expect", "100-continue"))
    method = send.get("method", "GET" if body is None else "POST")
    lines = [f"{method} {send.get('path', '/v1/systemone')} HTTP/{version}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n", body or b""


def plain_body(send: dict[str, Any]) -> bytes | None:
    if "parts" in send:
        return joined(send["parts"])
    return json.dumps(send["body"], ensure_ascii=False).encode() if "body" in send else None


def joined(parts: list[Any]) -> bytes:
    return b"".join(piece(part) for part in parts)


def piece(part: Any) -> bytes:
    match part:
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case [text, times]:
            return text.encode() * times
        case [text, times, joiner]:
            return joiner.join(text.replace("#", str(i)) for i in range(times)).encode()
        case _:
            return part.encode()


def asked(send: dict[str, Any]) -> dict[str, Any]:
    """The request as a reader of JSON sees it: of duplicate keys the last, no byte order mark."""
    body = plain_body(send)
    assert body is not None
    return json.loads(body.decode("utf-8-sig"))


def refuse_constant(name: str) -> Any:
    pytest.fail(f"{name} in the answer is not JSON")


def check_framing(response: Response) -> None:
    """What every response carries."""
    assert re.fullmatch(r"req_[0-9a-f]{32}", response.headers["x-typesafe-request-id"])
    expected = "text/plain" if b"# HELP" in response.body else "application/json"
    expected = "text/html" if b"<!doctype html>" in response.body else expected
    assert response.headers["content-type"].split(";")[0] == expected
    assert response.headers.get("server", "blink") == "blink"


def check_error(response: Response, expect: dict[str, Any]) -> None:
    body = json.loads(response.body, parse_constant=refuse_constant)
    assert list(body) == ["error", "detail"]
    assert isinstance(body["error"], str)
    assert body["error"]
    if response.status in (400, 422):
        assert body["detail"], "no violation listed"
        assert len(body["detail"]) <= 20
        for entry in body["detail"]:
            assert set(entry) == {"type", "loc", "msg"}
            assert entry["loc"][0] == "body"
            assert all(isinstance(entry[key], str) and entry[key] for key in ("type", "msg"))
        found = [[".".join(map(str, entry["loc"][1:])), entry["type"]] for entry in body["detail"]]
        assert found == expect.get("errors", found)
    else:
        assert set(body["detail"]) == {"error_type", "message"}
        assert all(isinstance(value, str) and value for value in body["detail"].values())
        assert body["detail"]["error_type"] == expect.get("error_type", body["detail"]["error_type"])
    for text in expect.get("says", []):
        assert text in body["error"]
    if "hides" in expect:
        assert expect["hides"].encode() not in response.body


def check_in_step(connection: Connection) -> None:
    """The connection carries the next request, and nothing lay between."""
    connection.send(b"GET /healthz HTTP/1.1\r\nHost: blink.test\r\n\r\n")
    following = connection.receive()
    assert following.status == 200
    assert json.loads(following.body)["ok"] is True


def check_answers(request: dict[str, Any], response: dict[str, Any]) -> None:
    """Complete, coherent answers to every question, in the order of the request."""
    assert list(response) == ["model", "answers", "usage"]
    assert response["model"]
    assert set(response["usage"]) == {"input_tokens", "output_tokens"}
    assert type(response["usage"]["input_tokens"]) is int
    assert response["usage"]["input_tokens"] > 0
    assert response["usage"]["output_tokens"] == 0
    assert list(response["answers"]) == list(request["questions"])
    for name, question in request["questions"].items():
        check_answer(question, response["answers"][name])


def check_answer(question: dict[str, Any], answer: dict[str, Any]) -> None:
    assert answer["type"] == question["type"]
    if question["type"] == "noul":
        assert list(answer) == ["type", "noul"]
        assert 0 <= answer["noul"] <= 1
        return
    given = question["criteria"]
    p = answer["probabilities"]
    assert all(0 <= value <= 1 for value in p.values())
    assert sum(p.values()) == pytest.approx(1, abs=1e-6)
    assert 0 <= answer["confidence"] <= 1
    if question["type"] == "choice":
        assert list(answer) == ["type", "choice", "confidence", "probabilities"]
        assert list(p) == list(given)
        best = max(p.values())
        assert answer["choice"] == next(name for name, value in p.items() if value == best)
        assert answer["confidence"] == pytest.approx(choice_confidence(list(p.values())), abs=1e-9)
        return
    assert list(answer) == ["type", "score", "confidence", "legend", "probabilities"]
    assert list(p) == [str(i) for i in range(len(given))]
    assert answer["legend"] == {str(i): level for i, level in enumerate(given)}
    levels = list(p.values())
    assert answer["score"] == pytest.approx(sum(i * value for i, value in enumerate(levels)), abs=1e-9)
    assert answer["confidence"] == pytest.approx(score_confidence(levels), abs=1e-9)


def choice_confidence(p: list[float]) -> float:
    """The part of the way from a blind guess to certainty that the best option has come."""
    guess = 1 / len(p)
    return 1.0 if len(p) == 1 else (max(p) - guess) / (1 - guess)


def score_confidence(p: list[float]) -> float:
    """One less the spread about the likeliest level, against the spread of a blind guess about the middle."""
    n = len(p)
    if n == 1:
        return 1.0
    likeliest = p.index(max(p))
    spread = sum(value * abs(i - likeliest) for i, value in enumerate(p))
    blind = sum(abs(i - (n - 1) / 2) for i in range(n)) / n
    return max(0.0, 1 - spread / blind)


def compare(server: RunningServer, answers: dict[str, Any], expect: dict[str, Any]) -> None:
    if "same_as" in expect:
        assert ask(server, expect["same_as"]) == answers
    if "unlike" in expect:
        others = ask(server, expect["unlike"])
        assert list(others) == list(answers)
        assert all(others[name] != answers[name] for name in answers)


def ask(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    """Answers to a plain request."""
    with Connection("127.0.0.1", server.port) as connection:
        connection.send(b"".join(request_bytes({"body": body})))
        response = connection.receive()
    assert response.status == 200, response.body
    answers: dict[str, Any] = json.loads(response.body)["answers"]
    return answers


def test_cases_use_known_words() -> None:
    """A misspelt expectation would check nothing."""
    send = {"body", "parts", "method", "path", "version", "host", "headers", "encode", "frame", "chunk", "raw"}
    send |= {"half_close", "key_needed"}
    expect = {"status", "interim", "errors", "error_type", "says", "hides", "headers", "answers", "same_as", "unlike"}
    expect |= {"closes"}
    for name, case in CASES.items():
        assert set(case) == {"why", "send", "expect"}, name
        assert set(case["send"]) <= send, name
        assert set(case["expect"]) <= expect, name
