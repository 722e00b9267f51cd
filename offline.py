"""`blink decide FILE.jsonl --out FILE`: answer a file of requests in this process, without a server.

Every line of the input is a request as on the wire, `{"state": ..., "questions": {...}}`, with an `id` if it likes;
every line of the output is its answer or its error, in the same order. What was written stays: run the command again
and it goes on where it stopped.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from wire import BlinkError

WINDOW = 128  # lines under way: enough that a pass is packed while the next is tokenized
_DIGEST = 16  # hex digits that tell one input line from another


class OutputMismatch(Exception):
    """The output answers other lines, or by another model. The text is one line: where, and what to do."""


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
        OutputMismatch: `target` holds other lines' answers, or another model's.
        DeciderDied: the decision worker died; what is answered is written.
        OSError: a file cannot be read or written.
    """
    with source.open("rb") as lines, target.open("a+b") as out:
        waiting = _numbered(lines)
        failed = _resume(out, waiting, model, progress)
        under_way: deque[Future[dict[str, Any]]] = deque()
        stopped = threading.Event()
        pool = ThreadPoolExecutor(WINDOW, thread_name_prefix="blink-line")

        def begin(lines: int) -> None:
            for number, line in islice(waiting, lines):
                under_way.append(pool.submit(_answer, decider, model, number, line, stopped.is_set))

        try:
            begin(WINDOW)
            while under_way:
                answer = under_way.popleft().result()
                out.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
                out.flush()
                failed += "error" in answer
                progress(1)
                begin(1)
        finally:
            stopped.set()
            os.fsync(out.fileno())
            pool.shutdown(wait=False, cancel_futures=True)
    return failed


def count_lines(source: Path) -> int:
    """Lines that are not blank."""
    with source.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _numbered(lines: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _digest(line: bytes) -> str:
    return hashlib.sha256(line.strip()).hexdigest()[:_DIGEST]


def _resume(out: IO[bytes], waiting: Iterator[tuple[int, bytes]], model: str, progress: Callable[[int], object]) -> int:
    """Pass over what `out` answers, and leave it at the end of its last whole line; how many answers are errors."""
    failed = whole = 0
    out.seek(0)
    for answer in out:
        if not answer.endswith(b"\n"):
            break
        try:
            known = from_json(answer)
            named = (known["line"], known["input"], known["model"])
        except (ValueError, KeyError, TypeError):
            raise OutputMismatch("it holds something else than answers: give another --out") from None
        number, line = next(waiting, (0, b""))
        if named[:2] != (number, _digest(line)):
            raise OutputMismatch(f"it answers another line {named[0]} than the input's: give another --out")
        if named[2] != model:
            raise OutputMismatch(f"line {number} was answered by {named[2]}, not {model}: give another --out")
        failed += "error" in known
        whole = out.tell()
        progress(1)
    out.truncate(whole)
    return failed


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
        decision = decider.decide(wire.read(line), client_left=stopped)
    except BlinkError as error:
        if not decider.alive():
            raise DeciderDied from error
        return head | error.body
    answers = {name: answer.model_dump() for name, answer in decision.answers.items()}
    return head | {"answers": answers, "usage": {"input_tokens": decision.input_tokens}}


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
    decide.add_argument("file", type=Path, metavar="FILE", help="one request a line, as for POST /v1/systemone")
    decide.add_argument(
        "--out", type=Path, required=True, help="answers in the same order; it is continued if it exists"
    )
    serve.add_engine_flags(serve.add_model_flags(decide))
    decide.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="warning", help="on stderr"
    )
    args = parser.parse_args(argv)
    serve.check_model_args(parser, args)
    if not args.file.is_file():
        parser.error("FILE is no file that can be read")
    if args.out.exists() and args.out.samefile(args.file):
        parser.error("--out should be another file than FILE")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    args = parse_args(argv)
    logs.set_up(args.log_level, "text")
    if serve.is_local(args.model):
        serve.go_offline()

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        return _run(args)
    except StartError as error:
        return _end(str(error), 1)
    except OutputMismatch as error:
        return _end(f"--out cannot be continued: {error}", 1)
    except DeciderDied:
        return _end("the decision worker died; run the command again to go on", 1)
    except OSError as error:
        return _end(f"{error.strerror or error}; run the command again to go on", 1)
    except KeyboardInterrupt:
        return _end("stopped; run the command again to go on", 130)


def _run(args: argparse.Namespace) -> int:
    total = count_lines(args.file)
    with tqdm(total=2, desc="loading", unit="step", leave=False, disable=None, delay=2) as bar:
        root, _, _ = serve.checked_model(args, lambda share: None)
        bar.update()
        engine, _ = serve.load_engine(root, args, lambda share: None)
        bar.update()
    from blink import Batcher

    batcher = Batcher(engine, max_requests=WINDOW, max_queued=WINDOW)
    serve.settle()
    with tqdm(total=total, unit="line", desc=args.file.name, disable=None) as bar:
        failed = decide_file(batcher, serve.served_name(args), args.file, args.out, bar.update)
    batcher.close()
    if failed:
        return _end(f'{failed} of {total} lines could not be answered: see "error" in the output', 1)
    return 0


def _end(words: str, status: int) -> int:
    print(f"blink: {words}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
