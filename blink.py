"""The decision core: prompts become label logits in one forward pass, label logits become answers.

Use as a library:

    from blink import Batcher, TorchEngine

    engine = TorchEngine("./blink-4b")
    decision = engine.decide(
        "The parcel never came.",
        {"refund": {"type": "noul", "instructions": "Does the writer want money back?"}},
    )
    decision["answers"]["refund"]["noul"]  # probability of yes

    batcher = Batcher(engine, window_s=0.005, max_requests=16)  # many threads may call batcher.submit(...)
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

import qwen35
import wire
from answers import Scores, Temperatures, build_decision, probabilities
from batcher import Batcher, BlinkBusy
from prompts import SMALL_QUESTIONS, PromptEncoder, Prompts, check_length, small_request
from reference import EngineError, ReferenceBody, free_memory
from wire import LIMITS, BlinkError

__all__ = ["TEMPERATURE", "Batcher", "BlinkBusy", "BlinkError", "EngineError", "FastBody", "TorchEngine"]

log = logging.getLogger("blink")

TEMPERATURE = float(os.environ.get("BLINK_TEMPERATURE") or 1.0)
TOKEN_BUDGET = 32_768
_SMALLEST_BUDGET = 256  # tokens of a pass of the fast body
_TOLERANCE = 0.02  # of a probability, beyond what bfloat16 alone moves


class FastBody:
    """The packed pass of `qwen35` behind the same face as the reference body."""

    name = "qwen35"

    def __init__(
        self, root: Path, device: torch.device, dtype: torch.dtype, progress: Callable[[float], None] | None = None
    ) -> None:
        self._engine = qwen35.Qwen35Engine(root, device, dtype=dtype, progress=progress)
        self.token_budget = self._engine.token_budget
        self.kernels = self._engine.kernels
        self.passes = 0

    def warm_up(self, root: Sequence[int], progress: Callable[[float], None] | None = None) -> None:
        """Keep the state of the ids that prompts begin with, compile every kernel and capture the graphs."""
        self._engine.keep_root(root)
        self._engine.warm_up(progress)

    def head_rows(self, ids: Sequence[int]) -> Tensor:
        return self._engine.head_rows(ids)

    def open(self, prompts: Prompts) -> qwen35.Job:
        return self._engine.open(qwen35.Forked(prompts.prefix, prompts.tails))

    def step(self, jobs: Sequence[qwen35.Job]) -> list[tuple[qwen35.Job, Tensor | EngineError]]:
        """One pass over the jobs; out of memory it is retried in halves, then the first job alone fails."""
        budget = self.token_budget
        while budget >= _SMALLEST_BUDGET:
            try:
                self.passes += 1
                return [(job, job.hidden) for job in self._engine.step(jobs, budget)]
            except torch.OutOfMemoryError:
                free_memory()
                budget //= 2
        return [(jobs[0], EngineError("out of memory"))]


@dataclass(slots=True, eq=False)
class _Job:
    """A body's job with the number of labels that each of its questions offers."""

    inner: Any
    counts: list[int]

    @property
    def left(self) -> int:
        """Tokens still to be read."""
        return int(self.inner.left)


@dataclass(slots=True)
class _Readout:
    """A pass on its way to the host: logits [questions of the jobs that did not fail, most labels offered], float32."""

    jobs: list[_Job]
    failed: dict[int, EngineError]
    logits: Tensor | None
    copied: "torch.cuda.Event | None"

    def wait(self) -> None:
        """Return when the logits are on the host."""
        if self.copied is not None:
            self.copied.synchronize()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def outcomes(self) -> list[Scores | Exception]:
        """What became of each job; logits that are not finite fail their request alone."""
        self.wait()
        rows = iter(self.logits.tolist() if self.logits is not None else [])
        return [self.failed[i] if i in self.failed else _scores(rows, job.counts) for i, job in enumerate(self.jobs)]


def _scores(rows: Iterator[list[float]], counts: Sequence[int]) -> Scores | EngineError:
    scores = [next(rows)[:count] for count in counts]
    if all(math.isfinite(logit) for logits in scores for logit in logits):
        return scores
    return EngineError("the model gave logits that are not finite")


class TorchEngine:
    """Scores the offered labels of a Hugging Face causal LM folder in one forward pass, FP32 at the labels.

    On CUDA the layers of Qwen3.5 decoders run through the packed pass of `qwen35`, once it has shown the same answers
    as the reference on this machine; everything else runs through `transformers`.

    Args:
        root: folder with config, safetensors and tokenizer with a chat template.
        device: where to run; CUDA if there is one, else the CPU.
        temperature: divides the label logits before the softmax. Unless told otherwise, and unless BLINK_TEMPERATURE
            is set, the folder's own for each question type.
        dtype: of the weights; bfloat16 on CUDA and float32 on the CPU unless told otherwise.
        token_budget: most tokens of a pass of the reference.
        fast: whether the packed pass may be used.
        progress: told the share of loading and warming up that is done, 0 to 1.

    Raises:
        ValueError: the folder cannot be served (no chat template, no one-token labels, ...).
        OSError: the folder is no model.
    """

    def __init__(
        self,
        root: str | Path,
        device: str | torch.device | None = None,
        temperature: float | None = None,
        *,
        dtype: torch.dtype | None = None,
        token_budget: int = TOKEN_BUDGET,
        fast: bool = True,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        if temperature is None and os.environ.get("BLINK_TEMPERATURE"):
            temperature = TEMPERATURE
        self.temperatures = Temperatures.of_folder(Path(root), temperature)
        torch.backends.cuda.matmul.allow_tf32 = False  # label scores are FP32

        self._encoder = PromptEncoder(AutoTokenizer.from_pretrained(root))
        self.label_ids = self._encoder.label_ids
        config = AutoConfig.from_pretrained(root).get_text_config()
        self.context = min(LIMITS.tokens_per_question, config.max_position_embeddings)
        progress(0.1)
        self.why_reference = self._why_reference(Path(root), fast)
        self._body: Any = None
        if self.why_reference is None:
            self._load_fast(Path(root), progress)
        if self._body is None:
            self._use(ReferenceBody(Path(root), self.device, self.dtype, token_budget=token_budget))
        progress(1.0)

    @property
    def passes(self) -> int:
        """Passes made so far."""
        return int(self._body.passes)

    @property
    def name(self) -> str:
        """Which body runs, with the reason if it is not the fast one."""
        return str(self._body.name) if self.why_reference is None else f"reference ({self.why_reference})"

    @property
    def kernels(self) -> str:
        """The DeltaNet kernels in use."""
        return str(self._body.kernels)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of device memory: `reserved` now and `peak`, the most ever in use; empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        reserved, peak = torch.cuda.memory_reserved(self.device), torch.cuda.max_memory_allocated(self.device)
        return {"reserved": reserved, "peak": peak}

    def decide(self, state: Any, questions: Mapping[str, Any]) -> dict[str, Any]:
        """Answer questions about a state, as on the wire: `{"answers": ..., "meta": {"input_tokens": int, ...}}`.

        Raises:
            BlinkError: the request is not valid or too long.
            EngineError: the pass failed.
        """
        request = wire.validate({"state": state, "questions": questions})
        prompts = self.prepare(request)
        (scores,) = self.score([prompts])
        if isinstance(scores, Exception):
            raise scores
        return build_decision(request, prompts, scores, self.temperatures).as_dict()

    def prepare(self, request: wire.DecisionRequest) -> Prompts:
        """Render and tokenize a request; needs no device.

        Raises:
            BlinkError: a question is longer than the model's context, naming the first one.
        """
        prompts = self._encoder.encode(request)
        check_length(request, prompts, self.context)
        return prompts

    def score(self, batch: Sequence[Prompts]) -> list[Scores | Exception]:
        """Label logits of every request, or the reason why there are none. One thread at a time."""
        jobs = [self.open(prompts) for prompts in batch]
        found: dict[int, Scores | Exception] = {}
        while waiting := [job for job in jobs if id(job) not in found]:
            done = self.step(waiting)
            found |= zip(map(id, done.jobs), done.outcomes(), strict=True)
        return [found[id(job)] for job in jobs]

    def warm_up(self) -> bool:
        """Decide a small request twice; true if both answers are the same to the bit.

        Raises:
            EngineError: the pass failed.
        """
        prompts = self.prepare(small_request())
        first, second = self.score([prompts]), self.score([prompts])
        for scores in (*first, *second):
            if isinstance(scores, Exception):
                raise scores
        return first == second

    def open(self, prompts: Prompts) -> _Job:
        """Begin a request."""
        return _Job(self._body.open(prompts), prompts.counts)

    @torch.inference_mode()
    def step(self, jobs: Sequence[_Job]) -> _Readout:
        """Start a pass over the jobs, the first ones first; a long one may take several.

        The readout is one FP32 product over the labels offered and one copy to the host.
        """
        mine = {id(job.inner): job for job in jobs}
        done: list[_Job] = []
        hidden: list[Tensor] = []
        failed: dict[int, EngineError] = {}
        for inner, states in self._body.step([job.inner for job in jobs]):
            if isinstance(states, EngineError):
                failed[len(done)] = states
            else:
                hidden.append(states)
            done.append(mine[id(inner)])
        if not hidden:
            return _Readout(done, failed, None, None)
        offered = max(count for i, job in enumerate(done) if i not in failed for count in job.counts)
        logits = torch.nn.functional.linear(torch.cat(hidden).float(), self._rows[:offered])
        if self.device.type != "cuda":
            return _Readout(done, failed, logits, None)
        on_host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True).copy_(logits, non_blocking=True)
        copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return _Readout(done, failed, on_host, copied)

    def _use(self, body: Any) -> None:
        self._body = body
        self._rows = body.head_rows(self.label_ids)
        self.token_budget = body.token_budget

    def _why_reference(self, root: Path, fast: bool) -> str | None:
        """Why the packed pass is not even tried."""
        if not fast:
            return "switched off"
        if self.device.type == "cuda" and self.dtype != torch.bfloat16:
            return f"the packed pass runs in bfloat16, not {self.dtype}"
        return qwen35.unsupported(root, self.device)

    def _load_fast(self, root: Path, progress: Callable[[float], None]) -> None:
        """Use the packed pass if its answers to a small request are those of the reference.

        How far bfloat16 alone moves an answer is seen from the reference itself, which reads the same questions
        together and one by one; the packed pass may differ by `_TOLERANCE` more than that.
        """
        requests = [small_request([name]) for name in SMALL_QUESTIONS]
        prompts = [self.prepare(small_request()), *(self.prepare(request) for request in requests)]
        reference = ReferenceBody(root, self.device, self.dtype, token_budget=TOKEN_BUDGET)
        self._use(reference)
        with reference.published_operators():
            together, *apart = [_probabilities(self.score([one])[0]) for one in prompts]
        del reference
        noise = _largest_difference(together, [p for (p,) in apart])
        self._body = None
        free_memory()
        progress(0.4)
        body = FastBody(root, self.device, self.dtype, lambda share: progress(0.4 + 0.3 * share))
        body.warm_up(self._encoder.root, lambda share: progress(0.7 + 0.3 * share))
        self._use(body)
        difference = _largest_difference(together, _probabilities(self.score(prompts[:1])[0]))
        if difference > _TOLERANCE + noise:
            self.why_reference = f"the packed pass moves answers by {difference:.3f}, bfloat16 alone by {noise:.3f}"
            self._body = None
            free_memory()


def _probabilities(scores: Scores | Exception) -> list[list[float]]:
    if isinstance(scores, Exception):
        raise scores
    return [probabilities(logits) for logits in scores]


def _largest_difference(one: list[list[float]], other: list[list[float]]) -> float:
    pairs = (pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True))
    return max(abs(x - y) for x, y in pairs)
