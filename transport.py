"""HTTP/1.1 over the standard library's threaded server: bounded connections, deadlines, bodies, one write a response.

A handler subclass maps routes to methods that return a `Reply` or raise `wire.BlinkError`; everything about the
connection stays here. Framing is strict: whatever leaves it unclear where a body ends is refused and the connection
closed, so that bytes of one request are never read as another.
"""

import contextlib
import gzip
import io
import json
import logging
import re
import select
import socket
import socketserver
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import zstandard

import tracing
import wire
from wire import BlinkError

log = logging.getLogger("blink.http")

IDLE_S = 75.0  # clients keep idle connections for 30 s and must not find them closed
HEAD_S = 10.0
BODY_S = 60.0
WRITE_S = 30.0
LINGER_S = 2.0
MAX_LINE = 65_536
DRAIN_BYTES = 1 << 20
_LINGER_BYTES = 64 << 20
_MAX_REFUSALS = 64
_MAX_TRAILERS = 100
_MAX_HEADERS = 100
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(_TOKEN + rb" [\x21-\x7e\x80-\xff]+ HTTP/[0-9.]+\r?\n")
_HEADER = re.compile(_TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r?\n")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[\t ]*(;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_POLL_LEFT = getattr(select, "POLLRDHUP", 0)


class Reply(NamedTuple):
    """What a route answers with."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    content_type: str = "application/json"


def json_reply(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, json.dumps(body, ensure_ascii=False).encode("utf-8"), headers or {})


def error_reply(error: BlinkError) -> Reply:
    return json_reply(error.status, error.body, error.headers)


def failed_reply(request_id: str) -> Reply:
    return error_reply(wire.refusal(500, "api_error", f"the server failed on request {request_id}"))


def log_fault(what: str, error: BaseException | None, **fields: object) -> None:
    """Log a fault as one line; a traceback, which may hold request text, only at level debug."""
    reason = (
        error.message if isinstance(error, BlinkError) else f"{type(error).__name__} (--log-level debug tells more)"
    )
    log.error("%s: %s", what, reason, extra={"fields": fields})
    log.debug("%s", what, exc_info=error, extra={"fields": fields})


def find_route(routes: Mapping[str, Mapping[str, str]], target: str, method: str) -> str:
    """What `routes`, path -> method -> name, call the answer to a request.

    Raises:
        BlinkError: 404 or 405; 400 if the target is no URL.
    """
    try:
        path = urlsplit(target).path.rstrip("/")
    except ValueError:
        raise bad_framing("the request target is not valid") from None
    methods = routes.get(path or "/")
    if methods is None:
        raise wire.refusal(404, "not_found", "there is nothing at this path")
    allowed = [*methods, *(["HEAD"] if "GET" in methods else [])]
    if method not in allowed:
        raise wire.refusal(405, "method_not_allowed", "this path does not take this method", Allow=", ".join(allowed))
    return methods["GET" if method == "HEAD" else method]


def bad_framing(message: str) -> BlinkError:
    return wire.violation("http_invalid", ["body"], message, status=400)


class _DeadlineInput(io.RawIOBase):
    """The reading side of a socket with one deadline over many reads, so that a trickle of bytes cannot extend it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Server(ThreadingHTTPServer):
    """One listening address. Connections beyond `slots` are answered 503 and closed.

    Raises:
        OSError: the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(
        self, address: tuple[str, int], handler: type["Handler"], slots: threading.Semaphore, *, family: int
    ) -> None:
        self.address_family = family
        self.stopping = False
        self._handler = handler
        self._slots = slots
        self._refusals = threading.Semaphore(_MAX_REFUSALS)
        self._in_flight = 0
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            both = self.server_address[0] == "::"
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
        socketserver.TCPServer.server_bind(self)  # the HTTP server's own would ask DNS for the host's name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had
            self._slots.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def _refuse(self, request: socket.socket) -> None:
        refused = error_reply(wire.busy("too many connections"))
        with contextlib.suppress(OSError):
            request.settimeout(1.0)
            request.sendall(_response_bytes(refused, new_request_id(), close=True))
        self._handler.on_refusal()
        if not self._refusals.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            threading.Thread(target=self._refused, args=(request,), daemon=True).start()
        except RuntimeError:  # no thread to be had
            self._refusals.release()
            self.shutdown_request(request)

    def _refused(self, request: socket.socket) -> None:
        try:
            _see_off(request)
        finally:
            self._refusals.release()
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log_fault("a connection failed", sys.exc_info()[1])

    @contextlib.contextmanager
    def in_flight(self) -> Any:
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def busy(self) -> bool:
        """Whether a request is between its first byte and the end of its answer."""
        return self._in_flight > 0

    def stop(self) -> None:
        """Take what the kernel has accepted already, then stop listening; each connection ends with its next answer.

        Clients that connect anew as soon as they are turned away would keep it busy for ever: it takes no more than
        what waits at first.
        """
        self.stopping = True
        self.shutdown()
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):
            for _ in range(self._backlog()):
                self.process_request(*self._accept())
        self.server_close()

    def _backlog(self) -> int:
        """Connections that the kernel has accepted and holds; the most that it may hold where it does not tell."""
        if sys.platform == "linux":  # of a listening socket, tcpi_unacked is the length of that queue
            return int.from_bytes(self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[24:], sys.byteorder)
        return self.request_queue_size + 1

    def _accept(self) -> tuple[socket.socket, Any]:
        connection, address = self.socket.accept()
        connection.setblocking(True)
        return connection, address


def listen(host: str, port: int, handler: type["Handler"], *, max_connections: int) -> list[Server]:
    """Bind `host`, in both families where it means this machine; port 0 picks a free one for all.

    `localhost` and `127.0.0.1` also listen on `::1` where there is IPv6, because many clients try it first, and `::`
    also takes IPv4.

    Raises:
        OSError: the address cannot be bound.
    """
    slots = threading.Semaphore(max_connections)
    host = "127.0.0.1" if host == "localhost" else host
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    servers = [Server((host, port), handler, slots, family=family)]
    if host == "127.0.0.1":
        with contextlib.suppress(OSError):
            servers.append(Server(("::1", servers[0].server_port), handler, slots, family=socket.AF_INET6))
    return servers


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def _response_bytes(reply: Reply, request_id: str, *, close: bool, head: bool = False, date: str = "") -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status} {_phrase(reply.status)}",
        "Server: blink",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        f"x-typesafe-request-id: {request_id}",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
    ]
    if date:
        lines.append(f"Date: {date}")
    if close:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (b"" if head else reply.body)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


class Handler(BaseHTTPRequestHandler):
    """One connection. Subclasses fill `routes`: path -> method -> name of the handler's method."""

    routes: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self._input = _DeadlineInput(self.connection)
        self._reader = io.BufferedReader(self._input, MAX_LINE)
        self.rfile = self._reader

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.request_id = new_request_id()
        self.command = ""
        self._unread: int | None = 0
        self._expects_continue = False
        self._probed = False
        try:
            self._input.deadline = time.monotonic() + IDLE_S
            if not self._reader.peek(1):
                return
            self.began = time.monotonic()
            with self.server.in_flight():
                self._input.deadline = self.began + HEAD_S
                self.raw_requestline = self.rfile.readline(MAX_LINE + 1)
                if self.raw_requestline in (b"\r\n", b"\n"):  # tolerated between requests
                    self.close_connection = False
                    return
                if len(self.raw_requestline) > MAX_LINE:
                    self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
                    return
                if self.parse_request():
                    self._serve()
            self._discard_unread()
        except (TimeoutError, ConnectionError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are logged by `on_reply` of the subclass, if at all."""

    def identity(self) -> dict[str, str]:
        """What log lines call the request by: its id, and the caller's trace if it is in one."""
        found = tracing.read(self.headers.get_all("traceparent", [])) if self.command else None
        traced = {"trace_id": found.trace_id, "parent_id": found.parent_id} if found else {}
        return {"request_id": self.request_id, **traced}

    def on_reply(self, status: int) -> None:
        """Called after each response, for logs and metrics."""

    @classmethod
    def on_refusal(cls) -> None:
        """Called for each connection that is answered 503 before anything is read from it."""

    def parse_request(self) -> bool:
        """Check the lines of the head, then leave them to the library, which would read a lone CR as a line's end."""
        if not _REQUEST_LINE.fullmatch(self.raw_requestline):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        lines: list[bytes] = []
        while (line := self._reader.readline(MAX_LINE + 1)) not in (b"\r\n", b"\n"):
            if len(line) > MAX_LINE or len(lines) == _MAX_HEADERS:
                self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return False
            if not _HEADER.fullmatch(line):  # also where the client stops in the middle
                self.send_error(HTTPStatus.BAD_REQUEST)
                return False
            lines.append(line)
        self.rfile = io.BytesIO(b"".join(lines))
        try:
            return super().parse_request()
        finally:
            self.rfile = self._reader

    def handle_expect_100(self) -> bool:
        self._expects_continue = True  # answered only when the body is wanted
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the request parser refuses, without echoing what it read."""
        self._unread = None
        self.command = ""  # known or not, the headers that would go with it are not
        if code == HTTPStatus.BAD_REQUEST:
            error = bad_framing("the request head is not valid HTTP")
        else:
            error = wire.refusal(int(code), "invalid_request_error", _phrase(code).lower())
        self.respond(error_reply(error))

    # --- a request ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if self.request_version == "HTTP/1.0":
            self.close_connection = True
        try:
            self._frame_body()
            reply = self._route()()
        except BlinkError as error:
            if error.status == 499:
                self.close_connection = True
                self.on_reply(error.status)
                return
            reply = error_reply(error) if error.status != 500 else self._failed(error)
        except (TimeoutError, ConnectionError):
            raise
        except Exception as error:
            reply = self._failed(error)
        self.respond(reply)

    def _failed(self, error: Exception) -> Reply:
        identity = self.identity()
        log_fault(f"request {' '.join(identity.values())} failed", error, **identity)
        return failed_reply(self.request_id)

    def _route(self) -> Callable[[], Reply]:
        route: Callable[[], Reply] = getattr(self, find_route(self.routes, self.path, self.command))
        return route

    def respond(self, reply: Reply) -> None:
        """Send a response in one write."""
        self.close_connection |= self.server.stopping
        if self._unread is None or self._unread > DRAIN_BYTES or (self._unread and self._expects_continue):
            self.close_connection = True
        data = _response_bytes(
            reply,
            self.request_id,
            close=self.close_connection,
            head=self.raw_requestline.startswith(b"HEAD "),  # known before the head as a whole is
            date=self.date_time_string(),
        )
        self.connection.settimeout(WRITE_S)
        self.wfile.write(data)
        self.on_reply(reply.status)

    def client_left(self) -> bool:
        """Whether the client hung up; asked while its answer is in the making.

        A client that closed only its sending side still wants the answer and looks the same at first. An interim
        response tells them apart: a closed peer resets the connection.
        """
        poller = select.poll()
        poller.register(self.connection, _POLL_LEFT)
        events = poller.poll(0)
        mask = events[0][1] if events else 0
        if mask & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            return True
        if mask & _POLL_LEFT and not self._probed and self.request_version != "HTTP/1.0":
            self._probed = True
            with contextlib.suppress(OSError):
                self.connection.send(_CONTINUE)
        return False

    # --- bodies ------------------------------------------------------------------------------------------------------

    def _frame_body(self) -> None:
        """Settle how long the body is: `_unread` bytes, or None for chunks."""
        self._unread = None
        lengths = self.headers.get_all("Content-Length", [])
        codings = [coding.strip(" \t").lower() for coding in self.headers.get_all("Transfer-Encoding", [])]
        if codings:
            if lengths or self.request_version == "HTTP/1.0" or codings != ["chunked"]:
                self.close_connection = True
                raise bad_framing("Transfer-Encoding should be 'chunked', without a Content-Length")
            return
        if len(lengths) > 1 or not all(re.fullmatch(r"[0-9]{1,18}", length.strip(" \t")) for length in lengths):
            self.close_connection = True
            raise bad_framing("Content-Length should be one whole number")
        self._unread = int(lengths[0]) if lengths else 0

    def read_body(self, limit: int) -> bytes:
        """The request's body, decoded, at most `limit` bytes long before and after decoding.

        Raises:
            BlinkError: 400 for a body that ends early or does not decode, 408, 413, 415.
        """
        coding = content_coding(self.headers.get("Content-Encoding"))
        if self._unread is not None and self._unread > limit:
            raise too_large(limit)
        if self._expects_continue:
            self.wfile.write(_CONTINUE)
            self._expects_continue = False
        self._input.deadline = time.monotonic() + BODY_S
        try:
            body = self._read_chunks(limit) if self._unread is None else self._read_exactly(self._unread)
        except TimeoutError:
            self._unread = None
            raise wire.refusal(408, "timeout", "the body did not arrive in time") from None
        self._unread = 0
        return decode(body, coding, limit)

    def _read_exactly(self, length: int) -> bytes:
        data = self.rfile.read(length)
        if len(data) < length:
            self._unread = None
            raise bad_framing("the body ended early")
        return data

    def _read_chunks(self, limit: int) -> bytes:
        body = bytearray()
        while size := self._chunk_size():
            if len(body) + size > limit:
                raise too_large(limit)
            body += self._read_exactly(size)
            if self._read_exactly(2) != b"\r\n":
                raise bad_framing("a chunk is longer than its size")
        for _ in range(_MAX_TRAILERS):
            line = self.rfile.readline(MAX_LINE)
            if line == b"\r\n":
                return bytes(body)
            if not _HEADER.fullmatch(line):
                raise bad_framing("a trailer is not valid HTTP")
        raise bad_framing("too many trailers")

    def _chunk_size(self) -> int:
        line = _CHUNK_SIZE.fullmatch(self.rfile.readline(MAX_LINE))
        if line is None:
            raise bad_framing("a chunk size should be a hexadecimal number")
        return int(line[1], 16)

    def _discard_unread(self) -> None:
        """Read past a body nobody wanted, or a part of it before closing."""
        if not self.close_connection:
            self._input.deadline = time.monotonic() + BODY_S
            while self._unread:
                data = self.rfile.read(min(self._unread, MAX_LINE))
                if not data:
                    self.close_connection = True
                    return
                self._unread -= len(data)
        elif self._unread != 0:
            _see_off(self.connection)


def _see_off(connection: socket.socket) -> None:
    """Read for a while what a client still sends: closing before that would take the response back."""
    deadline = time.monotonic() + LINGER_S
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        for _ in range(_LINGER_BYTES // MAX_LINE):
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            if not connection.recv(MAX_LINE):
                return


def too_large(limit: int) -> BlinkError:
    return wire.refusal(413, "request_too_large", f"the body may have at most {limit} bytes")


def content_coding(given: str | None) -> str:
    """The coding that a Content-Encoding header names.

    Raises:
        BlinkError: 415 if `decode` does not know it.
    """
    coding = (given or "identity").strip().lower()
    if coding not in ("identity", "gzip", "zstd"):
        raise wire.refusal(
            415, "unsupported_encoding", "a body may be plain, zstd or gzip", Accept_Encoding="zstd, gzip"
        )
    return coding


def decode(body: bytes, coding: str, limit: int) -> bytes:
    """The plain body.

    Raises:
        BlinkError: 400 if it is not in this coding, 413 if it is longer than the limit.
    """
    if coding == "identity":
        return body
    try:
        if coding == "gzip":
            decoded = gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
        else:
            decoded = _decode_zstd(body, limit)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError):
        raise wire.violation("encoding_invalid", ["body"], f"The body is not valid {coding}", status=400) from None
    if len(decoded) > limit:
        raise too_large(limit)
    return decoded


def _decode_zstd(body: bytes, limit: int) -> bytes:
    """The frames of a body, at most one byte more than the limit.

    Raises:
        zstandard.ZstdError: a frame is not valid or shorter than it says.
    """
    largest = 1 << max(23, limit.bit_length())  # a frame's window may span the whole body, no more
    decompressor = zstandard.ZstdDecompressor(max_window_size=largest)
    decoded = decompressor.stream_reader(body, read_across_frames=True).read(limit + 1)
    promised = zstandard.frame_content_size(body)  # -1 if the frame does not say
    if len(decoded) < min(promised, limit + 1):
        raise zstandard.ZstdError("the frame is cut short")
    return decoded
