"""`python serve_vllm.py --model FOLDER`: the routes of `serve.py`, with vLLM scheduling the model's passes.

For more load than one GPU or one pass at a time can take. Wire, prompts, labels and answers are the same code as
`serve.py`'s; only the scores come from vLLM, which has to be installed (`requirements-vllm.txt`).
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import serve
from serve import StartError
from service import Service, versions
from transport import log_fault

log = logging.getLogger("blink")

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0
# Ours unless the operator said otherwise; vLLM reads them when it is imported.
_SETTINGS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy locks that the HTTP threads hold, and their sockets
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


# --- flags -----------------------------------------------------------------------------------------------------------


def share(text: str) -> float:
    """A number above 0 and at most 1, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"should be a number above 0 and at most 1, not {text!r}")
    return value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Settings, checked as far as possible without loading anything; exits with one line if one is bad."""
    parser = serve.new_parser(
        "blink-serve-vllm",
        "Answer typed questions about a state with probabilities; vLLM runs the model. "
        "Serves POST /v1/systemone, GET /v1/models, /healthz, /metrics and a page to try it at /.",
    )
    model = serve.add_model_flags(parser)
    model.add_argument(
        "--quantization",
        default="auto",
        help="auto: as a compressed-tensors checkpoint says, bfloat16 otherwise; else a method of vLLM's",
    )
    serve.add_address_flags(parser)
    count = serve.int_range
    engine = parser.add_argument_group("vLLM", "handed to vLLM, which calls them the same")
    add = engine.add_argument
    add("--max-num-seqs", type=count(1, 4096), default=32, help="questions read in one step")
    add("--max-num-batched-tokens", type=count(1, 1 << 20), default=8192, help="tokens read in one step")
    add("--gpu-memory-utilization", type=share, default=0.85, help="share of the device's memory that vLLM may take")
    add("--max-model-len", type=count(2, 1 << 20), default=32768, help="context in tokens; a longer question gets 422")
    add("--tensor-parallel-size", type=count(1, 64), default=1, help="GPUs that share one copy of the model")
    add("--data-parallel-size", type=count(1, 64), default=1, help="copies of the model")
    add("--prefix-cache", action="store_true", help="keep what prompts begin with for later requests")
    add("--no-chunked-prefill", action="store_true", help="read every prompt in one step")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-concurrency", type=count(1, 4096), default=32, help="requests at a time; one more is answered 503"
    )
    serve.add_limit_flags(limits)
    serve.add_log_flags(parser)
    args = parser.parse_args(argv)
    if args.no_chunked_prefill and args.max_num_batched_tokens < args.max_model_len:
        parser.error("--no-chunked-prefill asks for --max-num-batched-tokens of at least --max-model-len")
    serve.check_shared_args(parser, args)
    return args


# --- what vLLM is asked for, and what it does ------------------------------------------------------------------------


def quantization(root: Path, asked: str) -> str | None:
    """The method to hand to vLLM, None for weights as they are.

    Raises:
        StartError: `asked` is auto and the checkpoint is quantized in a way nobody tested here.
    """
    if asked != "auto":
        return asked
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    method = found.get("quant_method")
    if method not in (None, "compressed-tensors"):
        raise StartError(f"the checkpoint is quantized with {method!r}, which is not tested: --quantization {method}")
    return method


def engine_settings(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of vLLM's `AsyncEngineArgs`.

    Raises:
        StartError: as `quantization`.
    """
    from wire import LIMITS

    return {
        "model": str(root),
        "dtype": "bfloat16",
        "quantization": quantization(root, args.quantization),
        "hf_overrides": {"head_dtype": "float32"},
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": LIMITS.options,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "tensor_parallel_size": args.tensor_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "enable_prefix_caching": args.prefix_cache,
        "enable_chunked_prefill": not args.no_chunked_prefill,
        "disable_log_stats": True,
        # Ctrl-C reaches vLLM's processes as well as this one: they too finish what they have.
        "shutdown_timeout": int(serve.DRAIN_S),
    }


def effective_settings(config: Any) -> dict[str, Any]:
    """What vLLM made of the settings, by the names of `engine_settings`."""
    model, cache, scheduler, parallel = (
        config.model_config,
        config.cache_config,
        config.scheduler_config,
        config.parallel_config,
    )
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "head_dtype": str(model.head_dtype).removeprefix("torch."),
        "logprobs_mode": str(model.logprobs_mode),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
    }


def check_effective(asked: dict[str, Any], effective: dict[str, Any]) -> None:
    """Compare what decides the answers and the limits with what was asked.

    Raises:
        StartError: vLLM runs otherwise.
    """
    wanted = asked | asked["hf_overrides"]
    decisive = (
        *("dtype", "quantization", "head_dtype", "logprobs_mode", "max_model_len"),
        *("enable_prefix_caching", "enable_chunked_prefill"),
    )
    differing = [
        f"{name} {effective[name]!r} instead of {wanted[name]!r}"
        for name in decisive
        if effective[name] != wanted[name]
    ]
    if differing:
        raise StartError(f"vLLM runs with {', '.join(differing)}")


# --- start to end ----------------------------------------------------------------------------------------------------


def load(service: Service, args: argparse.Namespace, on_death: Callable[[], None]) -> None:
    """Find and check the model, start vLLM over it, warm it up and open the service.

    Raises:
        StartError: the model cannot be served.
    """
    try:
        import vllm
    except ImportError as error:
        raise StartError(f"vLLM does not import ({error}): pip install -r requirements-vllm.txt") from None

    def verifying(share: float) -> None:
        service.progress = 0.3 * share

    root, revision, verified = serve.checked_model(args, verifying)
    settings = engine_settings(root, args)

    import huggingface_hub.constants
    from transformers import AutoTokenizer

    from answers import Temperatures
    from prompts import PromptEncoder
    from vllm_engine import VllmDecider

    def make_engine() -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**settings))

    try:
        encoder = PromptEncoder(AutoTokenizer.from_pretrained(root))
        decider = VllmDecider(
            make_engine,
            encoder,
            max_model_len=args.max_model_len,
            max_concurrency=args.max_concurrency,
            max_questions=2 * args.max_num_seqs,
            temperatures=Temperatures.of_folder(root, args.temperature),
            on_death=on_death,
        )
        service.decider = decider
        service.progress = 0.9
        config = decider.engine.vllm_config
        effective = effective_settings(config)
        check_effective(settings, effective)
        repeat_identical = decider.warm_up()
    except StartError:
        raise
    except Exception as error:  # over broken files the libraries raise errors of every kind
        log.debug("loading failed", exc_info=True)
        raise StartError(f"{args.model} cannot be loaded: {serve.reason(error)}") from None
    service.max_queued = args.max_concurrency
    service.facts = {
        "revision": revision,
        "weights_verified": verified,
        "hub_offline": huggingface_hub.constants.HF_HUB_OFFLINE,
        "warmup": {"repeat_identical": repeat_identical},
        "kernels": f"vllm {vllm.__version__}",
        "versions": versions() | {"vllm": vllm.__version__},
        "device": config.device_config.device_type,
        "dtype": effective["dtype"],
        "engine": "vllm",
        "limits": {"context_tokens": decider.context},
        "vllm": {"version": vllm.__version__} | effective,
    }
    serve.settle()
    service.progress = 1.0
    service.status = "ok"


def adopt_orphans() -> None:
    """Let workers whose own parent died become children of this process, so that it can end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """End every process below this one: asked first, made to after `_END_S`."""
    try:
        import psutil
    except ImportError:  # it comes with vLLM, without which there are none
        return

    asked: set[int] = set()
    deadline = time.monotonic() + _END_S
    while children := [child for child in psutil.Process().children(recursive=True) if not _tracks_resources(child)]:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                if time.monotonic() > deadline:
                    child.kill()
                elif child.pid not in asked:
                    asked.add(child.pid)
                    child.terminate()
        psutil.wait_procs(children, timeout=0.2)


def _tracks_resources(process: Any) -> bool:
    """Whether this is multiprocessing's own helper, which ends by itself once it has tidied up after all others."""
    import psutil

    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command. No process that vLLM started is left when it ends."""
    args = parse_args(argv)
    for name, value in (_SETTINGS | {"VLLM_LOGGING_LEVEL": args.log_level.upper()}).items():
        os.environ.setdefault(name, value)
    service = serve.new_service(args, f"vLLM, up to {args.max_concurrency} requests at a time")
    adopt_orphans()
    status = 1
    try:
        status = serve.run(service, args, lambda on_death: load(service, args, on_death))
    except SystemExit as ended:  # a signal during the start
        status = int(ended.code or 0)
    except BaseException as error:
        log_fault("the server failed", error)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_children()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # The thread that loads or runs vLLM may be anywhere in its libraries: the interpreter is not taken down around it.
    os._exit(status)


if __name__ == "__main__":
    main()
