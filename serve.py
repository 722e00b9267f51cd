"""`python serve.py --model FOLDER`: answer typed questions over HTTP with a local model.

The port opens at once and `/healthz` says 503 with a progress figure until the model is loaded, checked and warm.
SIGTERM or Ctrl-C finishes what is queued and exits 0; a dead decision worker exits 1.
"""

import argparse
import contextlib
import gc
import hashlib
import logging
import math
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError
from tqdm import tqdm

import logs
import page
from keys import KeyFileError, Keys
from service import Service, handler_for
from transport import Server, listen

if TYPE_CHECKING:
    import blink

log = logging.getLogger("blink")

DEFAULT_MODEL = "thegovind/blink-4b"
DRAIN_S = 30.0
_QUIET_CHECKS = 5
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")


class StartError(Exception):
    """Why the server cannot start, as one line that says what to do."""


# --- flags -----------------------------------------------------------------------------------------------------------


def window_ms(text: str) -> float:
    """Milliseconds from 0 to 1000, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"should be a number of milliseconds from 0 (off) to 1000, not {text!r}")
    return value


def int_range(lo: int, hi: int) -> Callable[[str], int]:
    """A whole number from `lo` to `hi`, as an argparse type."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not lo <= int(text) <= hi:
            raise argparse.ArgumentTypeError(f"should be a whole number from {lo} to {hi}, not {text!r}")
        return int(text)

    return parse


def api_key(text: str) -> str:
    """A key without the white space that a file leaves around it, as an argparse type."""
    key = text.strip()
    if not key:
        raise argparse.ArgumentTypeError("should not be empty; leave it out to serve everyone")
    return key


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise StartError(f"BLINK_TEMPERATURE should be a positive number, not {text!r}")
    return value


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong without the usage, which is longer than a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"blink: {' '.join(message.split())} (--help lists the settings)\n")


def new_parser(prog: str, description: str) -> argparse.ArgumentParser:
    return _OneLineParser(prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def add_model_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags about the model that every server has; returns their group for further ones."""
    env = os.environ.get
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        default=env("BLINK_MODEL") or DEFAULT_MODEL,
        help="a model folder, a hub id, or 'mini' for the small built-in model; env BLINK_MODEL",
    )
    model.add_argument("--revision", default=env("BLINK_REVISION") or None, help="of a hub id; env BLINK_REVISION")
    model.add_argument("--model-name", help="name in answers and /v1/models; the folder's or id's own if not given")
    return model


def add_engine_flags(model: argparse._ArgumentGroup) -> None:
    """The flags of what `load_engine` makes."""
    model.add_argument("--device", help="cuda, cuda:1 or cpu; the GPU if there is one")
    model.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the weights; bfloat16 on a GPU and float32 on a CPU if not given (label scores are always float32)",
    )
    model.add_argument(
        "--engine",
        choices=("auto", "reference"),
        default="auto",
        help="auto: the packed pass where GPU and model allow; reference: transformers in any case",
    )


def add_address_flags(parser: argparse.ArgumentParser) -> None:
    address = parser.add_argument_group("address")
    address.add_argument("--host", default="127.0.0.1", help="address to bind; 0.0.0.0 or :: for every interface")
    address.add_argument("--port", type=int_range(0, 65535), default=8000, help="0 picks a free one")
    address.add_argument(
        "--api-key",
        type=api_key,  # not with its environment variable as the default, which --help shows
        help="ask clients for this Bearer key; open to all if not given; env BLINK_API_KEY",
    )
    address.add_argument(
        "--api-key-file",
        type=Path,
        default=os.environ.get("BLINK_API_KEY_FILE") or None,
        help="a file of further keys, one a line, # for comments; read again at SIGHUP; env BLINK_API_KEY_FILE",
    )
    address.add_argument("--no-page", action="store_true", help="serve no page at / to try the model in a browser")


def add_limit_flags(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument("--max-body-bytes", type=int_range(1024, 1 << 30), default=20 << 20, help="of a request")
    limits.add_argument("--max-connections", type=int_range(1, 65536), default=512, help="one more is answered 503")
    limits.add_argument(
        "--request-timeout-s", type=int_range(1, 3600), default=180, help="a decision that takes longer is answered 504"
    )


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--access-log", action="store_true", help="log a line for every request")
    add("--log-format", choices=("text", "json"), default="text", help="json: every line is one object")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="how much to log")


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "blink-serve",
        "Answer typed questions about a state with probabilities, from one forward pass of a local model. "
        "Serves POST /v1/systemone, GET /v1/models, /healthz, /metrics and a page to try it at /.",
    )
    add_engine_flags(add_model_flags(parser))
    add_address_flags(parser)
    grouping = parser.add_argument_group("grouping", "without these, requests are decided one at a time in order")
    grouping.add_argument(
        "--batch-window-ms",
        type=window_ms,
        default=os.environ.get("BLINK_BATCH_WINDOW_MS") or "0",
        help="decide requests that arrive within this time together; 0 is off; env BLINK_BATCH_WINDOW_MS",
    )
    grouping.add_argument(
        "--continuous", action="store_true", help="decide whatever is queued when the device is free, without waiting"
    )
    grouping.add_argument("--max-batch-requests", type=int_range(1, 64), default=16, help="most requests of a window")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queued-requests", type=int_range(1, 1024), default=64, help="waiting requests; one more is answered 503"
    )
    add_limit_flags(limits)
    add_log_flags(parser)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Settings, checked as far as possible without loading anything; exits with one line if one is bad."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.continuous and args.batch_window_ms:
        parser.error("--continuous does not wait, so it takes no --batch-window-ms: choose one")
    check_shared_args(parser, args)
    return args


def check_shared_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check what `add_model_flags` and `add_address_flags` read, and add the settings without a flag."""
    check_model_args(parser, args)
    try:
        if args.api_key is None and (key := os.environ.get("BLINK_API_KEY")):
            args.api_key = api_key(key)
        args.keys = Keys(args.api_key, args.api_key_file)
    except argparse.ArgumentTypeError as error:
        parser.error(f"BLINK_API_KEY {error}")
    except KeyFileError as error:
        parser.error(f"--api-key-file: {error}")


def check_model_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check what `add_model_flags` reads, and add the settings without a flag."""
    if args.revision and is_local(args.model):
        args.revision = None  # an environment variable may be set for another model
    try:
        own = os.environ.get("BLINK_TEMPERATURE")
        args.temperature = _temperature(own) if own else None
        _check_model(args.model)
    except StartError as error:
        parser.error(str(error))


def is_local(model: str) -> bool:
    """Whether a `--model` value needs nothing from the hub."""
    return model == "mini" or Path(model).is_dir()


def _check_model(model: str) -> None:
    if is_local(model):
        if model != "mini" and not (Path(model) / "config.json").is_file():
            raise StartError(f"--model: the folder {model!r} has no config.json; download a model into it first")
    elif not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise StartError(f"--model: {model!r} is no folder, and no hub id such as {DEFAULT_MODEL}")


# --- the weights -----------------------------------------------------------------------------------------------------


def sha256(path: Path, progress: Callable[[int], object] = lambda size: None) -> str:
    """Hex digest of a file, telling `progress` the size of each part read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(8 << 20):
            digest.update(part)
            progress(len(part))
    return digest.hexdigest()


def verify(root: Path, progress: Callable[[float], None] = lambda share: None) -> tuple[bool | None, list[str]]:
    """Check a folder's files against its `weights.sha256`, lines of `<hex digest> <name>`.

    Returns:
        (None, []) without such a list, (True, []) if every listed file matches, else (False, names): of files that
        differ or are missing, of names that leave the folder, or of the list itself if it is empty or unreadable.
    """
    listing = Path(root) / "weights.sha256"
    if not listing.is_file():
        return None, []
    expected: dict[str, str] = {}
    bad: list[str] = []
    for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        digest, _, name = line.strip().partition(" ")
        name = name.strip().removeprefix("*")
        path = PurePosixPath(name)
        if not re.fullmatch(r"[0-9a-fA-F]{64}", digest) or not name:
            bad.append(listing.name)
        elif path.is_absolute() or ".." in path.parts or "\\" in name or not (Path(root) / name).is_file():
            bad.append(name)
        else:
            expected[name] = digest.lower()
    if not expected and not bad:
        bad.append(listing.name)
    if bad:
        return False, bad
    total = sum((Path(root) / name).stat().st_size for name in expected)
    given_up = False
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="checking weights", delay=1, disable=None) as bar,
        ThreadPoolExecutor(4) as pool,
    ):

        def read(size: int) -> None:
            if given_up:
                raise InterruptedError
            bar.update(size)
            progress(bar.n / max(1, total))

        try:
            digests = pool.map(lambda name: sha256(Path(root) / name, read), expected)
            bad = [name for name, digest in zip(expected, digests, strict=True) if digest != expected[name]]
        except BaseException:  # a signal: the threads would read on to the end of their files
            given_up = True
            raise
    return not bad, bad


def go_offline() -> None:
    """Keep the libraries off the network, unless the operator said otherwise; before any of them is imported."""
    for name in _OFFLINE:
        os.environ.setdefault(name, "1")


def find_model(model: str, revision: str | None) -> tuple[Path, str | None]:
    """The model's folder, fetched if need be, and its revision if it came from the hub.

    Raises:
        StartError: it cannot be had.
    """
    if model == "mini":
        from mini.build import MiniUnavailable, ensure

        try:
            return ensure(), None
        except MiniUnavailable as error:
            raise StartError(str(error)) from None
    if is_local(model):
        return Path(model), None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        root = Path(snapshot_download(model, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartError(
            f"{model} cannot be downloaded ({type(error).__name__}); download it to a folder and pass that to --model"
        ) from None
    return root, root.name


# --- start to end ----------------------------------------------------------------------------------------------------


def checked_model(
    args: argparse.Namespace, progress: Callable[[float], None], meanwhile: Callable[[], object] = lambda: None
) -> tuple[Path, str | None, bool | None]:
    """The model's folder, its revision if it came from the hub, and whether its files have known digests.

    `progress` is told the share of the files read, 0 to 1; `meanwhile` runs while they are read.

    Raises:
        StartError: it cannot be had, or a file does not match its digest.
    """
    root, revision = find_model(args.model, args.revision)
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(verify, root, progress)
        meanwhile()
        verified, bad = checked.result()
    if bad:
        raise StartError(f"these files do not match weights.sha256, download them again: {', '.join(bad)}")
    progress(1.0)
    return root, revision, verified


def load_engine(
    root: Path, args: argparse.Namespace, progress: Callable[[float], None]
) -> "tuple[blink.TorchEngine, bool]":
    """The engine over a model folder, and whether it repeats itself to the bit.

    `progress` is told the share that is done, 0 to 1.

    Raises:
        StartError: the folder cannot be served.
    """
    import torch

    import blink

    logging.getLogger("transformers").setLevel(logging.ERROR)  # what it would say of kernels is in /healthz
    dtype = getattr(torch, args.dtype) if args.dtype else None
    fast = args.engine == "auto"
    try:
        engine = blink.TorchEngine(root, args.device, args.temperature, dtype=dtype, fast=fast, progress=progress)
        repeat_identical = engine.warm_up()
    except Exception as error:  # over broken files the libraries raise errors of every kind
        log.debug("loading failed", exc_info=True)
        raise StartError(f"{args.model} cannot be loaded: {reason(error)}") from None
    if engine.why_reference and fast and engine.device.type == "cuda":
        log.warning("the packed pass is not used: %s", engine.why_reference)
    return engine, repeat_identical


def load(service: Service, args: argparse.Namespace, on_death: Callable[[], None]) -> None:
    """Find, check and load the model, warm it up and open the service.

    Raises:
        StartError: the model cannot be served.
    """

    def verifying(share: float) -> None:
        service.progress = 0.3 * share

    def loading(share: float) -> None:
        service.progress = 0.3 + 0.6 * share

    root, revision, verified = checked_model(args, verifying, lambda: import_module("blink"))

    import huggingface_hub.constants

    import blink

    engine, repeat_identical = load_engine(root, args, loading)
    grouped = args.continuous or args.batch_window_ms > 0
    max_requests = (args.max_queued_requests if args.continuous else args.max_batch_requests) if grouped else 1
    service.decider = blink.Batcher(
        engine,
        args.batch_window_ms / 1e3,
        max_requests,
        max_queued=args.max_queued_requests,
        stuck_s=args.request_timeout_s,
        on_batch=service.metrics.on_batch,
        on_death=on_death,
    )
    service.metrics.watch_memory(lambda: engine.memory)
    service.max_queued = args.max_queued_requests
    if grouped:
        service.batching = {
            "window_ms": args.batch_window_ms,
            "max_requests": max_requests,
            "max_queued": args.max_queued_requests,
        }
    service.facts = {
        "revision": revision,
        "weights_verified": verified,
        "hub_offline": huggingface_hub.constants.HF_HUB_OFFLINE,
        "warmup": {"repeat_identical": repeat_identical},
        "kernels": engine.kernels,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "engine": engine.name,
        "limits": {"context_tokens": engine.context},
    }
    settle()
    service.progress = 1.0
    service.status = "ok"


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, ValidationError):  # its first line only counts the others
        lines = [error.errors(include_url=False)[0]["msg"]]
    return ": ".join([type(error).__name__, *lines[:1]])


def settle() -> None:
    """Make the interpreter ready for many threads and one that must not wait."""
    gc.collect()
    gc.freeze()  # a full collection over the model's objects would stall every thread
    sys.setswitchinterval(0.0005)


def served_name(args: argparse.Namespace) -> str:
    if args.model_name:
        return str(args.model_name)
    if args.model == "mini":
        return "blink-mini"
    return Path(args.model).resolve().name if is_local(args.model) else str(args.model)


def mode(args: argparse.Namespace) -> str:
    if args.continuous:
        return "continuous batching"
    if args.batch_window_ms:
        return f"batches within {args.batch_window_ms:g} ms, up to {args.max_batch_requests} requests"
    return "one request at a time"


def new_service(args: argparse.Namespace, mode: str) -> Service:
    """Set up logging and the libraries' environment, and make the service that is still to be loaded."""
    logs.set_up(args.log_level, args.log_format)
    if args.log_format == "json":
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if is_local(args.model):
        go_offline()
    return Service(
        name=served_name(args),
        keys=args.keys,
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
        request_timeout_s=args.request_timeout_s,
        access_log=args.access_log,
        mode=mode,
        page=None if args.no_page else page.load(),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    args = parse_args(argv)
    service = new_service(args, mode(args))
    status = run(service, args, lambda on_death: load(service, args, on_death))
    if status:  # the worker may be in the middle of a pass, which would turn the interpreter's end into an abort
        sys.stderr.flush()
        os._exit(status)
    return status


def run(service: Service, args: argparse.Namespace, start: Callable[[Callable[[], None]], None]) -> int:
    """Serve from the first moment: open the port, call `start`, wait for a signal or the worker's death, drain."""
    stop: queue.SimpleQueue[None] = queue.SimpleQueue()  # an event's lock would hold a signal that meets another

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.put(None)
        if service.status == "loading":
            raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    hangups: queue.SimpleQueue[None] = queue.SimpleQueue()
    if args.api_key_file:  # else a closed terminal ends the server, as it does without a handler
        signal.signal(signal.SIGHUP, lambda number, frame: hangups.put(None))
    try:
        servers = listen(args.host, args.port, handler_for(service), max_connections=args.max_connections)
    except OSError as error:
        words = f"cannot listen on {args.host} port {args.port}: {error.strerror or error}"
        logs.last_words(words, args.log_format)
        return 1
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    address = f"http://{_url_host(args.host)}:{servers[0].server_port}"
    log.info("loading %s; %s/healthz tells when it is ready", service.name, address)
    try:
        start(lambda: stop.put(None))
    except BaseException as error:
        if not stop.empty():  # a signal: what it raised in the middle of an import may end as any other error
            return 0
        if not isinstance(error, StartError):
            raise
        logs.last_words(str(error), args.log_format)
        return 1
    facts = service.facts
    log.info(
        "ready: %s on %s (%s), kernels %s, at %s, %s",
        service.name,
        facts.get("device"),
        facts.get("dtype"),
        facts.get("kernels"),
        address,
        service.mode,
    )
    while True:
        with contextlib.suppress(queue.Empty):
            stop.get(timeout=0.5)  # the interpreter runs signal handlers between waits
            break
        if not hangups.empty():
            hangups.get()
            service.keys.reload()
    return drain(service, servers)


def drain(service: Service, servers: Sequence[Server]) -> int:
    """Answer what is queued within `DRAIN_S`, then end: 0, or 1 if the worker had died or did not finish."""
    died = not service.worker_alive()
    service.status = "failed" if died else "draining"
    log.info(
        "stopping: %s", "the decision worker died or hangs" if died else f"finishing {service.queued()} queued requests"
    )
    deadline = time.monotonic() + DRAIN_S
    for server in servers:
        server.stop()
    quiet = 0
    while quiet < _QUIET_CHECKS and time.monotonic() < deadline:  # a thread may be about to read what has arrived
        quiet = 0 if any(server.busy() for server in servers) else quiet + 1
        time.sleep(0.02)
    assert service.decider is not None
    finished = service.decider.close(max(0.0, deadline - time.monotonic()))
    return 1 if died or not finished else 0


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(main())
