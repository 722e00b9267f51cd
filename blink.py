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

import inspect
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import wire
from prompts import PromptEncoder, Prompts, option_keys
from wire import LIMITS, BlinkError

log = logging.getLogger("blink")

TEMPERATURE = float(os.environ.get("BLINK_TEMPERATURE") or 1.0)
TOKEN_BUDGET = 32_768
_LEFT_POLL_S = 0.05


class BlinkBusy(BlinkError):
    """The queue is full or closing: try again in a second (503)."""

    def __init__(self, message: str) -> None:
        refused = wire.busy(message)
        super().__init__(message, refused.detail, status=refused.status, headers=refused.headers)


class EngineError(RuntimeError):
    """One request's pass failed through no fault of the request; its neighbours are not touched."""


# --- logits -> answer ------------------------------------------------------------------------------------------------


def probabilities(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Softmax over the offered labels only."""
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def choice_confidence(p: Sequence[float]) -> float:
    """How far the largest probability stands above a guess: (n max p - 1) / (n - 1), and 1 for a single option."""
    n = len(p)
    return 1.0 if n == 1 else min(1.0, max(0.0, (n * max(p) - 1) / (n - 1)))


def score_confidence(p: Sequence[float]) -> float:
    """One less the mean distance from the likeliest level, in units of a uniform guess about the middle.

    1 - sum(p_i |i - k|) / D with k the first likeliest level and D = floor(n^2 / 4) / n, as the official adapter does.
    """
    n = len(p)
    if n == 1:
        return 1.0
    top = p.index(max(p))
    distance = math.fsum(weight * abs(level - top) for level, weight in enumerate(p))
    return min(1.0, max(0.0, 1 - distance / (n * n // 4 / n)))


def build_answer(question: wire.Question, p: Sequence[float]) -> wire.Answer:
    """The typed answer from the probabilities of the offered labels, in label order."""
    named = dict(zip(option_keys(question), p, strict=True))
    match question:
        case wire.Noul():
            return wire.NoulAnswer(noul=p[0])
        case wire.Choice():
            best = max(named, key=named.__getitem__)  # the first of equals
            return wire.ChoiceAnswer(choice=best, confidence=choice_confidence(p), probabilities=named)
        case wire.Score():
            return wire.ScoreAnswer(
                score=math.fsum(level * weight for level, weight in enumerate(p)),
                confidence=score_confidence(p),
                legend={str(level): text for level, text in enumerate(question.criteria)},
                probabilities=named,
            )


# --- engine ----------------------------------------------------------------------------------------------------------

Scores = list[list[float]]
"""Label logits of one request: for each question those of its offered labels, FP32 values."""


class Engine(Protocol):
    """What a `Batcher` needs: `prepare` from any thread, `score` from the one thread that owns the device."""

    temperature: float
    token_budget: int

    def prepare(self, request: wire.DecisionRequest) -> Prompts: ...

    def score(self, batch: Sequence[Prompts]) -> Sequence[Scores | Exception]: ...


@dataclass(slots=True)
class Decision:
    """The answers to one request by question id, in request order, with what they took."""

    answers: dict[str, wire.Answer]
    input_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each stage."""

    def as_dict(self) -> dict[str, Any]:
        answers = {name: answer.model_dump() for name, answer in self.answers.items()}
        return {"answers": answers, "meta": {"input_tokens": self.input_tokens, "seconds": self.seconds}}


def build_decision(request: wire.DecisionRequest, prompts: Prompts, scores: Scores, temperature: float) -> Decision:
    answers = {
        name: build_answer(question, probabilities(logits, temperature))
        for (name, question), logits in zip(request.questions.items(), scores, strict=True)
    }
    return Decision(answers, prompts.input_tokens)


class TorchEngine:
    """Scores the offered labels of any Hugging Face causal LM folder with `transformers`, in one forward pass each.

    Args:
        root: folder with config, safetensors and tokenizer with a chat template.
        device: where to run; CUDA if there is one, else the CPU.
        temperature: divides the label logits before the softmax.
        dtype: of the weights; bfloat16 on CUDA and float32 on the CPU unless told otherwise.
        token_budget: most tokens of a padded pass.

    Raises:
        ValueError: the folder cannot be served (no chat template, no one-token labels, ...).
        OSError: the folder is no model.
    """

    def __init__(
        self,
        root: str | Path,
        device: str | torch.device | None = None,
        temperature: float = TEMPERATURE,
        *,
        dtype: torch.dtype | None = None,
        token_budget: int = TOKEN_BUDGET,
    ) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature should be a positive number, not {temperature}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.temperature = temperature
        self.token_budget = token_budget
        torch.backends.cuda.matmul.allow_tf32 = False  # label scores are FP32

        self._encoder = PromptEncoder(AutoTokenizer.from_pretrained(root))
        model: Any = AutoModelForCausalLM.from_pretrained(root, dtype=self.dtype, device_map={"": self.device})
        self.kernels = _choose_kernels(model, self.device)
        text_config = model.config.get_text_config()
        self.context = min(LIMITS.tokens_per_question, text_config.max_position_embeddings)
        self.architecture: str = text_config.model_type
        self._body = model.base_model
        self._config = text_config
        # Recurrent layers can be neither repeated for many tails nor cut where the questions part.
        self._shares_prefix = all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=text_config).layers)
        window = getattr(text_config, "sliding_window", None)
        self._slice = window // 2 if window and self._shares_prefix else None
        head = model.get_output_embeddings()
        self.label_ids = self._encoder.label_ids
        ids = torch.tensor(self.label_ids, device=self.device)
        self._rows = head.weight[ids].float()
        bias = getattr(head, "bias", None)
        self._bias = None if bias is None else bias[ids].float()
        self.passes = 0

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
        return build_decision(request, prompts, scores, self.temperature).as_dict()

    def prepare(self, request: wire.DecisionRequest) -> Prompts:
        """Render and tokenize a request; needs no device.

        Raises:
            BlinkError: a question is longer than the model's context, naming each one.
        """
        prompts = self._encoder.encode(request)
        lengths = [len(prompts.prefix) + len(tail) for tail in prompts.tails]
        if max(lengths) > self.context:
            name, tokens = next((n, t) for n, t in zip(request.questions, lengths, strict=True) if t > self.context)
            message = f"{tokens} tokens exceed the maximum context length of {self.context} tokens"
            raise wire.violation("max_tokens_exceeded", ["body", "questions", name], message)
        return prompts

    def score(self, batch: Sequence[Prompts]) -> list[Scores | Exception]:
        """Label logits of every request, or the reason why there are none. One thread at a time."""
        outcomes: list[Scores | Exception] = [[[] for _ in prompts.tails] for prompts in batch]
        for row, logits in self._scored(batch):
            scores = outcomes[row.request]
            if isinstance(logits, EngineError):
                outcomes[row.request] = logits
            elif not isinstance(scores, Exception):
                scores[row.question] = logits
        return outcomes

    def warm_up(self) -> bool:
        """Decide a small request twice; true if both answers are the same to the bit."""
        request = wire.validate(
            {
                "state": "The gate was left open overnight.",
                "questions": {
                    "kind": {"type": "choice", "instructions": "What is it about?", "criteria": ["a gate", "a boat"]},
                    "open": {"type": "noul", "instructions": "Was the gate open?"},
                },
            }
        )
        prompts = self.prepare(request)
        (first,), (second,) = self.score([prompts]), self.score([prompts])
        for scores in (first, second):
            if isinstance(scores, Exception):
                raise scores
        return first == second

    def _scored(self, batch: Sequence[Prompts]) -> Iterator[tuple["_Row", list[float] | EngineError]]:
        whole: list[_Row] = []
        for request, prompts in enumerate(batch):
            rows = [_Row(request, i, tail, prompts.counts[i]) for i, tail in enumerate(prompts.tails)]
            if self._shares_prefix and len(rows) > 1:
                yield from self._score_forked(prompts.prefix, rows)
            else:
                whole += [replace(row, ids=prompts.prefix + row.ids) for row in rows]
        yield from self._score_rows(whole)

    def _score_forked(
        self, prefix: list[int], tails: Sequence["_Row"]
    ) -> Iterator[tuple["_Row", list[float] | EngineError]]:
        """Read a shared prefix once and start every tail from its keys and values (attention-only models)."""
        try:
            with torch.inference_mode():
                cache = self._forward([prefix], DynamicCache(config=self._config)).past_key_values
        except torch.OutOfMemoryError:
            _free_memory()
            yield tails[0], EngineError("out of memory")
            return
        yield from self._score_rows(tails, cache)

    def _score_rows(
        self, rows: Sequence["_Row"], prefix: DynamicCache | None = None
    ) -> Iterator[tuple["_Row", list[float] | EngineError]]:
        """Passes over padded groups of rows; a group that does not fit into memory is retried in halves."""
        behind = prefix.get_seq_length() if prefix is not None else 0
        budget = self.token_budget
        waiting = sorted(rows, key=lambda row: len(row.ids), reverse=True)
        while waiting:
            longest = len(waiting[0].ids)
            sliced = self._slice is not None and longest > self._slice
            group = waiting[: 1 if sliced else max(1, budget // (behind + longest))]
            try:
                logits = self._label_logits(group, prefix)
            except torch.OutOfMemoryError:
                _free_memory()
                budget = (behind + longest) * len(group) // 2
                if len(group) > 1:
                    continue
                yield group[0], EngineError("out of memory")
            else:
                for row, values in zip(group, logits, strict=True):
                    offered = values[: row.offered]
                    finite = all(map(math.isfinite, offered))
                    yield row, offered if finite else EngineError("the model gave logits that are not finite")
            waiting = waiting[len(group) :]

    @torch.inference_mode()
    def _label_logits(self, group: Sequence["_Row"], prefix: DynamicCache | None) -> list[list[float]]:
        cache = None if prefix is None else _repeated(prefix, len(group), self._config)
        hidden = self._forward([row.ids for row in group], cache).last_hidden_state
        # Of a sliced row only the last slice is left, whose end is the row's.
        last = torch.tensor([len(row.ids) - 1 if len(group) > 1 else -1 for row in group], device=self.device)
        offered = max(row.offered for row in group)
        return self._read_out(hidden[torch.arange(len(group), device=self.device), last], offered)

    def _read_out(self, hidden: Tensor, offered: int) -> list[list[float]]:
        """FP32 logits of the first `offered` labels from last hidden states [n, hidden]: one product, one copy."""
        bias = None if self._bias is None else self._bias[:offered]
        logits: list[list[float]] = torch.nn.functional.linear(hidden.float(), self._rows[:offered], bias).tolist()
        return logits

    def _forward(self, ids: list[list[int]], cache: DynamicCache | None = None) -> Any:
        """The backbone over right-padded rows; nothing reads what a causal model makes of the padding.

        One long row of a model with sliding windows goes in slices, whose masks and keys are about a window wide
        instead of as wide as the row; the result is that of the last slice.
        """
        self.passes += 1
        width = max(map(len, ids))
        padded: Any = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=self.device)
        if self._slice is None or width <= self._slice or len(ids) > 1:
            return self._body(input_ids=padded, past_key_values=cache, use_cache=cache is not None)
        cache = cache or DynamicCache(config=self._config)
        for part in padded.split(self._slice, dim=1):
            result = self._body(input_ids=part, past_key_values=cache, use_cache=True)
        return result


@dataclass(frozen=True, slots=True)
class _Row:
    """One question's token ids in a pass, whose answer it is, and how many labels it offers."""

    request: int
    question: int
    ids: list[int]
    offered: int


def _repeated(prefix: DynamicCache, n: int, config: Any) -> DynamicCache:
    """A cache of `n` rows that all continue `prefix`; its keys and values are not copied before they grow."""
    cache = DynamicCache(config=config)
    layers: list[tuple[Any, Any]] = list(zip(cache.layers, prefix.layers, strict=True))
    for layer, source in layers:
        vars(layer).update(vars(source))
        layer.keys, layer.values = source.keys.expand(n, -1, -1, -1), source.values.expand(n, -1, -1, -1)
    return cache


def _free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_DELTANET_OPERATORS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)


def _choose_kernels(model: PreTrainedModel, device: torch.device) -> str:
    """Name the DeltaNet kernels a model runs; on the CPU put the reference in place of fla's, which need a GPU."""
    module = sys.modules[type(model).__module__]
    operators = [name for name in _DELTANET_OPERATORS if hasattr(module, name)]
    if not operators:
        return "reference (the model has no DeltaNet layers)"
    if device.type != "cuda":
        for name in operators:
            setattr(module, name, inspect.unwrap(getattr(module, name)))
        return "reference (flash-linear-attention needs CUDA)"
    try:
        import fla
    except ImportError as error:
        return f"reference (flash-linear-attention does not import: {error})"
    return f"flash-linear-attention {fla.__version__}"


# --- many requests, one device ---------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Entry:
    """A request on its way through the queue; the worker fills the outcome and the times, then sets `done`."""

    prompts: Prompts
    queued_at: float
    started_at: float = 0.0
    finished_at: float = 0.0
    outcome: Scores | Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def finish(self, outcome: Scores | Exception) -> None:
        self.outcome = outcome
        self.finished_at = time.monotonic()
        self.done.set()


class Batcher:
    """A bounded queue in front of an engine, and the one thread that owns the device.

    Requests that arrive within `window_s` of the first are decided together, up to `max_requests` and the engine's
    token budget. Without a window whatever is queued when the device is free is decided together; with
    `max_requests=1` requests are decided one at a time in order of arrival.

    Args:
        engine: scores the prompts; only the worker thread calls its `score`.
        window_s: how long the first request of a batch waits for others, in seconds.
        max_requests: most requests of a batch.
        max_queued: most requests that wait; one more is refused with `BlinkBusy`.
        on_batch: told requests, tokens and seconds of every batch, from the worker thread.
        on_death: called once from the worker thread if it ends by a fault.
    """

    def __init__(
        self,
        engine: Engine,
        window_s: float = 0.0,
        max_requests: int = 1,
        *,
        max_queued: int = 64,
        on_batch: Callable[[int, int, float], None] | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        if not (math.isfinite(window_s) and window_s >= 0 and max_requests >= 1 and max_queued >= 1):
            raise ValueError("window_s should be at least 0, max_requests and max_queued at least 1")
        self.window_s = window_s
        self.max_requests = max_requests
        self.max_queued = max_queued
        self._engine = engine
        self._on_batch = on_batch
        self._on_death = on_death
        self._queue: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._dead = False
        self._worker = threading.Thread(target=self._run, name="blink-worker", daemon=True)
        self._worker.start()

    def submit(self, state: Any, questions: Mapping[str, Any]) -> dict[str, Any]:
        """Decide as `TorchEngine.decide` does, in turn with other threads' requests.

        Raises:
            BlinkBusy: the queue is full, or the batcher is closed or dead.
            BlinkError: the request is not valid or too long.
            EngineError: the pass failed.
        """
        return self.decide(wire.validate({"state": state, "questions": questions})).as_dict()

    def decide(
        self,
        request: wire.DecisionRequest,
        *,
        timeout_s: float = math.inf,
        client_left: Callable[[], bool] = lambda: False,
    ) -> Decision:
        """Decide a checked request; rendering and answer building run in the calling thread.

        Args:
            request: what to decide.
            timeout_s: how long to wait for the scores.
            client_left: asked every 50 ms; a request nobody waits for is taken off the queue.

        Raises:
            BlinkBusy: as for `submit`.
            BlinkError: 422 if the request is too long for the model, 504 on a timeout, 499 if the client left.
            EngineError: the pass failed.
        """
        began = time.monotonic()
        if self.queued() >= self.max_queued:
            raise BlinkBusy("the queue is full")  # before tokenizing, which costs more than the refusal
        prompts = self._engine.prepare(request)
        entry = self._admit(prompts)
        self._wait(entry, began + timeout_s, client_left)
        if isinstance(entry.outcome, Exception):
            raise entry.outcome
        assert entry.outcome is not None
        answering = time.monotonic()
        decision = build_decision(request, prompts, entry.outcome, self._engine.temperature)
        decision.seconds = {
            "render": entry.queued_at - began,
            "queue": entry.started_at - entry.queued_at,
            "forward": entry.finished_at - entry.started_at,
            "answer": time.monotonic() - answering,
        }
        return decision

    def alive(self) -> bool:
        """Whether the worker still decides."""
        return not self._dead and self._worker.is_alive()

    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Refuse new requests, decide what waits, end the worker; true if it ended in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join(timeout_s)
        return not self._worker.is_alive()

    def _admit(self, prompts: Prompts) -> _Entry:
        entry = _Entry(prompts, time.monotonic())
        with self._changed:
            if self._dead or self._closing:
                raise BlinkBusy("the server is stopping")
            if len(self._queue) >= self.max_queued:
                raise BlinkBusy("the queue is full")
            self._queue.append(entry)
            self._changed.notify_all()
        return entry

    def _wait(self, entry: _Entry, deadline: float, client_left: Callable[[], bool]) -> None:
        while not entry.done.wait(min(_LEFT_POLL_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                self._withdraw(entry)
                raise wire.refusal(504, "timeout", "the decision was not done in time")
            if client_left():
                self._withdraw(entry)
                raise wire.refusal(499, "client_closed_request", "the client left")

    def _withdraw(self, entry: _Entry) -> None:
        with self._changed:
            if entry in self._queue:
                self._queue.remove(entry)

    def _run(self) -> None:
        batch: list[_Entry] = []
        try:
            while batch := self._next_batch():
                self._decide(batch)
        except BaseException:
            log.exception("the decision worker died")
            with self._changed:
                self._dead = True
                batch += self._queue
                self._queue.clear()
            for entry in batch:
                if not entry.done.is_set():
                    entry.finish(BlinkBusy("the decision worker died"))
            if self._on_death is not None:
                self._on_death()

    def _next_batch(self) -> list[_Entry]:
        """Wait for requests and take those of the next batch; empty once closing and nothing waits."""
        with self._changed:
            while not self._closing:
                if not self._queue:
                    self._changed.wait()
                    continue
                left = self._queue[0].queued_at + self.window_s - time.monotonic()
                if left <= 0 or len(self._queue) >= self.max_requests:
                    break
                self._changed.wait(left)
            batch: list[_Entry] = []
            tokens = 0
            while self._queue and len(batch) < self.max_requests:
                tokens += self._queue[0].prompts.stream_tokens
                if batch and tokens > self._engine.token_budget:
                    break
                batch.append(self._queue.popleft())
            return batch

    def _decide(self, batch: Sequence[_Entry]) -> None:
        started = time.monotonic()
        for entry in batch:
            entry.started_at = started
        for entry, outcome in zip(batch, self._outcomes([entry.prompts for entry in batch]), strict=True):
            entry.finish(outcome)
        if self._on_batch is not None:
            tokens = sum(entry.prompts.stream_tokens for entry in batch)
            self._on_batch(len(batch), tokens, time.monotonic() - started)

    def _outcomes(self, prompts: Sequence[Prompts]) -> Sequence[Scores | Exception]:
        """Scores of a batch; if the pass as a whole fails, each request is tried alone and fails alone."""
        try:
            return self._engine.score(prompts)
        except torch.AcceleratorError:  # the device is lost: nothing after it can be trusted
            raise
        except Exception as error:
            if len(prompts) == 1:
                return [error]
            log.warning("a pass over %d requests failed (%s): each is tried alone", len(prompts), type(error).__name__)
            return [self._outcomes([alone])[0] for alone in prompts]
