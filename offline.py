"""`blink decide FILE.jsonl --out FILE`: answer a file of requests in this process, without a server.

Every line of the input is a request as on the wire, `{"state": ..., "questions": {...}}`, with an `id` if it likes;
every line of the output is its answer or its error, in the same order. What was written stays: run the command again
and it goes on where it stopped.
"""

import argparse
import fcntl
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, Protocol

from pydantic_core import from_json
from tqdm import tqdm

import logs
import serve
import wire
from serve import StartError
from transport import log_fault
from wire import BlinkError

WINDOW = 128  # lines under way: enough that a pass is packed while the next is tokenized
STANDARD = Path("-")  # standard input or output
_BUSY_S = 0.05
_DIGEST = 16  # hex digits that tell one input line from another


class OutputMismatch(Exception):
    """The output cannot be continued. The text is one line: why, and what to do."""


class Decider(Protocol):
    """A `blink.Batcher`."""

    def decide(self, request: wire.DecisionRequest, *, client_left: Callable[[], bool]) -> Any: ...

    def alive(self) -> bool: ...


class DeciderDied(Exception):
    """The decision worker ended: no line after this can be answered."""


def decide_file(
    decider: Decider,
    model: str,
    source: Path,
    target: Path,
    progress: Callable[[int], object] = lambda lines: None,
) -> int:
    """Answer every line of `source` that `target` does not answer yet; the number of lines whose answer is an error.

    A last line of `target` that was torn is written anew. Blank lines are passed over.

    Args:
        decider: decides from many threads.
        model: its name, which stands in every line.
        source: JSON Lines, one request a line.
        target: JSON Lines, one answer a line; made if it is not there.
        progress: told how many lines more are answered.

    Raises:
        OutputMismatch: `target` holds other lines' answers, or another model's, or another run writes it.
        DeciderDied: the decision worker died; what is answered is written.
        OSError: a file cannot be read or written.
    """
    with open_run(model, source, target) as run:
        progress(run.done)
        run.go_on(decider, progress)
    return run.failed


@contextmanager
def open_run(model: str, source: Path, target: Path) -> "Iterator[Run]":
    """The files of a run, open and compared; `-` is standard input or output, the latter cannot be continued."""
    with (
        open(sys.stdin.fileno() if source == STANDARD else source, "rb", closefd=source != STANDARD) as lines,
        open(sys.stdout.fileno(), "wb", closefd=False) if target == STANDARD else target.open("a+b") as out,
    ):
        yield Run(model, lines, out)


class Run:
    """The lines of a file of requests, and the answers that there are so far.

    Args:
        model: the name that stands in every answer.
        lines: the requests.
        out: the answers. If it can be read, it is locked and continued after its last whole line.

    Attributes:
        done: lines that are answered.
        failed: those of them whose answer is an error.

    Raises:
        OutputMismatch: see `decide_file`.
    """

    def __init__(self, model: str, lines: IO[bytes], out: IO[bytes]) -> None:
        self.done = self.failed = 0
        self._model = model
        self._waiting = _numbered(lines)
        self._out = out
        if out.readable():
            self._resume()

    def go_on(self, decider: Decider, progress: Callable[[int], object] = lambda lines: None) -> None:
        """Answer the lines that wait; `progress` is told how many more are answered.

        Raises:
            DeciderDied: what is answered is written.
        """
        under_way: deque[Future[dict[str, Any]]] = deque()
        stopped = threading.Event()
        pool = ThreadPoolExecutor(WINDOW, thread_name_prefix="blink-line")

        def begin(lines: int) -> None:
            for number, line in islice(self._waiting, lines):
                under_way.append(pool.submit(_answer, decider, self._model, number, line, stopped.is_set))

        try:
            begin(WINDOW)
            while under_way:
                answer = under_way.popleft().result()
                self._out.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
                self._out.flush()
                self.done += 1
                self.failed += "error" in answer
                progress(1)
                begin(1)
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _resume(self) -> None:
        """Pass over the lines that `out` answers, and cut off what it holds after its last whole line."""
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputMismatch("another run writes it: wait for its end, or give another --out") from None
        except OSError:
            pass  # a file system without locks
        whole = 0
        self._out.seek(0)
        for answer in self._out:
            if not answer.endswith(b"\n"):
                break
            self._pass_over(answer)
            whole = self._out.tell()
        self._out.truncate(whole)

    def _pass_over(self, answer: bytes) -> None:
        try:
            known = from_json(answer)
            named = (known["line"], known["input"], known["model"])
        except (ValueError, KeyError, TypeError):
            raise OutputMismatch("it holds something else than answers: give another --out") from None
        number, line = next(self._waiting, (0, b""))
        if named[:2] != (number, _digest(line)):
            raise OutputMismatch(f"it answers another line {named[0]} than the input's: give another --out")
        if named[2] != self._model:
            raise OutputMismatch(f"line {number} was answered by {named[2]}, not {self._model}: give another --out")
        self.done += 1
        self.failed += "error" in known


def count_lines(source: Path) -> int:
    """Lines that are not blank."""
    with source.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _numbered(lines: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _digest(line: bytes) -> str:
    return hashlib.sha256(line.strip()).hexdigest()[:_DIGEST]


def _answer(decider: Decider, model: str, number: int, line: bytes, stopped: Callable[[], bool]) -> dict[str, Any]:
    head: dict[str, Any] = {"line": number, "input": _digest(line)}
    try:
        data = from_json(line, allow_inf_nan=False)
        if isinstance(data, dict) and "id" in data:
            head["id"] = data["id"]
    except ValueError:
        pass  # the wire says what is wrong with it
    head["model"] = model
    try:
        decision = _decision(decider, wire.read(line), stopped)
    except BlinkError as error:
        return head | error.body
    except DeciderDied:
        raise
    except Exception as error:
        log_fault(f"line {number} failed", error)
        return head | wire.refusal(500, "api_error", "blink failed on this line; the log says where").body
    usage = wire.Usage(input_tokens=decision.input_tokens)
    return head | wire.DecisionResponse(model=model, answers=decision.answers, usage=usage).model_dump()


def _decision(decider: Decider, request: wire.DecisionRequest, stopped: Callable[[], bool]) -> Any:
    while True:
        try:
            return decider.decide(request, client_left=stopped)
        except BlinkError as error:
            if not decider.alive():
                raise DeciderDied from error
            if error.status != 503 or stopped():
                raise
        time.sleep(_BUSY_S)


# --- the command -----------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Settings, checked as far as possible without loading anything; exits with one line if one is bad."""
    parser = serve.new_parser("blink", "Typed decisions with a local model, without a server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="decide")
    decide = commands.add_parser(
        "decide",
        help="answer a file of requests",
        description="Answer every line of a JSON Lines file of requests. Run it again to go on where it stopped. "
        "Exits with 0, with 1 if a line's answer is an error or the model cannot be had, with 130 if it was stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    decide.add_argument(
        "file", type=Path, metavar="FILE", help="one request a line, as for POST /v1/systemone; - for standard input"
    )
    decide.add_argument(
        "--out",
        type=Path,
        required=True,
        help="answers in the same order; a file that exists is continued; - for standard output",
    )
    serve.add_engine_flags(serve.add_model_flags(decide))
    decide.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="warning", help="on stderr"
    )
    args = parser.parse_args(argv)
    serve.check_model_args(parser, args)
    if args.file != STANDARD:
        if not args.file.is_file():
            parser.error(f"FILE: {str(args.file)!r} is no file that can be read")
        if args.out.exists() and args.out.samefile(args.file):
            parser.error("--out should be another file than FILE")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    args = parse_args(argv)
    logs.set_up(args.log_level, "text")
    if serve.is_local(args.model):
        serve.go_offline()
    stopped = False

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal stopped
        stopped = True
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        return _run(args)
    except BaseException as error:
        if stopped:  # in the middle of an import a signal may end as any other error
            return _end("stopped; run the command again to go on", 130)
        if isinstance(error, BrokenPipeError) and args.out == STANDARD:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's end complains too
            return _end("whoever read the answers has left", 1)
        if words := _words(error):
            return _end(words, 1)
        raise


def _words(error: BaseException) -> str | None:
    """What the operator is told; nothing of an error that is a fault of this program."""
    match error:
        case StartError():
            return str(error)
        case OutputMismatch():
            return f"--out cannot be continued: {error}"
        case DeciderDied():
            return "the decision worker died; run the command again to go on"
        case OSError():
            place = f"{error.filename}: " if error.filename else ""
            return f"{place}{error.strerror or error}; mend that and run the command again to go on"
    return None


def _run(args: argparse.Namespace) -> int:
    name = serve.served_name(args)
    total = None if args.file == STANDARD else count_lines(args.file)
    with open_run(name, args.file, args.out) as run:
        if run.done != total:
            _go_on(run, args, total)
    if run.failed:
        return _end(f'{run.failed} of {run.done} lines could not be answered: see "error" in the output', 1)
    return 0


def _go_on(run: Run, args: argparse.Namespace, total: int | None) -> None:
    with tqdm(total=2, desc="loading", unit="step", leave=False, disable=None, delay=2) as bar:
        root, _, _ = serve.checked_model(args, lambda share: None)
        bar.update()
        engine, _ = serve.load_engine(root, args, lambda share: None)
        bar.update()
    from blink import Batcher

    batcher = Batcher(engine, max_requests=WINDOW, max_queued=WINDOW)
    serve.settle()
    try:
        with tqdm(total=total, initial=run.done, unit="line", desc=args.file.name, disable=None) as bar:
            run.go_on(batcher, bar.update)
    finally:
        batcher.close()  # the interpreter must not end in the middle of a pass


def _end(words: str, status: int) -> int:
    print(f"blink: {words}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
