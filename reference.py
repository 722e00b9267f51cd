"""The reference body: any causal LM of `transformers`, over right-padded rows.

It decides what the right hidden states are; the fast pass is measured against it.
"""

import ctypes
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from prompts import Prompts
from wire import BlinkError

_DELTANET_OPERATORS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
_TRIM_S = 10.0


class EngineError(BlinkError):
    """One request's pass failed through no fault of the request (500); its neighbours are not touched."""

    def __init__(self, message: str) -> None:
        super().__init__(message, {"error_type": "api_error", "message": message}, status=500)


@dataclass(slots=True, eq=False)
class ReferenceJob:
    """A request on its way; one step reads all of it."""

    prompts: Prompts

    @property
    def left(self) -> int:
        """Tokens still to be read."""
        return self.prompts.stream_tokens


class ReferenceBody:
    """The layers of a causal LM, up to and with the final norm.

    Where all layers are attention, the questions of a request share one reading of their common prefix.

    Args:
        root: a model folder.
        device: where to run.
        dtype: of the weights.
        token_budget: most tokens of a padded pass.
    """

    name = "reference"

    def __init__(self, root: Path, device: torch.device, dtype: torch.dtype, *, token_budget: int) -> None:
        self.token_budget = token_budget
        self.passes = 0
        self._device = device
        self._trimmed_at = time.monotonic()
        model: Any = AutoModelForCausalLM.from_pretrained(root, dtype=dtype, device_map={"": device})
        if device.type == "cpu":
            _leave_files(model)
        self._operators = _deltanet_operators(model)
        self.kernels = self._choose_kernels()
        self._layers = model.base_model
        self._head = model.get_output_embeddings()
        self._config = model.config.get_text_config()
        # Recurrent layers can be neither repeated for many tails nor cut where the questions part.
        cache_layers = DynamicCache(config=self._config).layers
        self._shares_prefix = all(isinstance(layer, DynamicLayer) for layer in cache_layers)
        window = getattr(self._config, "sliding_window", None)
        self._slice = window // 4 if window and self._shares_prefix else None

    @contextmanager
    def published_operators(self) -> Iterator[None]:
        """Meanwhile run DeltaNet layers by transformers' own operators, in place of a library's faster ones.

        They need no compilation, which takes the library a minute on a machine that it has not seen.
        """
        module, operators = self._operators
        try:
            for name, operator in operators.items():
                setattr(module, name, inspect.unwrap(operator))
            yield
        finally:
            for name, operator in operators.items():
                setattr(module, name, operator)

    def head_rows(self, ids: Sequence[int]) -> Tensor:
        """Rows of the output head for these token ids, [n, hidden] float32.

        Raises:
            ValueError: the head adds a bias, which no decoder in use does.
        """
        if getattr(self._head, "bias", None) is not None:
            raise ValueError("the output head has a bias")
        rows: Tensor = self._head.weight[torch.tensor(ids, device=self._device)]
        return rows.detach().float()

    def _choose_kernels(self) -> str:
        """Name the DeltaNet kernels; on the CPU put the published operators in place of fla's, which need a GPU."""
        module, operators = self._operators
        if not operators:
            return "reference (the model has no DeltaNet layers)"
        if self._device.type != "cuda":
            for name, operator in operators.items():
                setattr(module, name, inspect.unwrap(operator))
            return "reference (flash-linear-attention needs CUDA)"
        try:
            import fla
        except ImportError as error:
            return f"reference (flash-linear-attention does not import: {error})"
        return f"flash-linear-attention {fla.__version__}"

    def open(self, prompts: Prompts) -> ReferenceJob:
        return ReferenceJob(prompts)

    def step(self, jobs: Sequence[ReferenceJob]) -> list[tuple[ReferenceJob, Tensor | EngineError]]:
        """Read all jobs to their end, in as many passes as the token budget asks for.

        Returns:
            Every job with its questions' last hidden states [questions, hidden], or with what became of it.
        """
        rows: dict[tuple[int, int], Tensor] = {}
        failed: dict[int, EngineError] = {}
        for row, hidden in self._read(jobs):
            if isinstance(hidden, EngineError):
                failed[row.job] = hidden
            else:
                rows[row.job, row.question] = hidden
        if self._device.type == "cpu" and time.monotonic() - self._trimmed_at > _TRIM_S:
            free_memory()  # passes of ever other shapes leave holes in the heap, by the hundred megabytes under load
            self._trimmed_at = time.monotonic()
        return [
            (job, failed[i] if i in failed else torch.stack([rows[i, q] for q in range(len(job.prompts.tails))]))
            for i, job in enumerate(jobs)
        ]

    @torch.inference_mode()
    def _read(self, jobs: Iterable[ReferenceJob]) -> "Iterator[tuple[_Row, Tensor | EngineError]]":
        whole: list[_Row] = []
        for i, job in enumerate(jobs):
            rows = [_Row(i, question, tail) for question, tail in enumerate(job.prompts.tails)]
            if self._shares_prefix and len(rows) > 1:
                yield from self._read_forked(job.prompts.prefix, rows)
            else:
                whole += [replace(row, ids=job.prompts.prefix + row.ids) for row in rows]
        yield from self._read_rows(whole)

    def _read_forked(self, prefix: list[int], tails: "Sequence[_Row]") -> "Iterator[tuple[_Row, Tensor | EngineError]]":
        """Read a shared prefix once and start every tail from its keys and values."""
        try:
            cache = self._forward([prefix], DynamicCache(config=self._config)).past_key_values
        except torch.OutOfMemoryError:
            free_memory()
            yield tails[0], EngineError("out of memory")
            return
        yield from self._read_rows(tails, cache)

    def _read_rows(
        self, rows: "Sequence[_Row]", prefix: DynamicCache | None = None
    ) -> "Iterator[tuple[_Row, Tensor | EngineError]]":
        """Passes over padded groups of rows; a group that does not fit into memory is retried in halves."""
        behind = prefix.get_seq_length() if prefix is not None else 0
        budget = self.token_budget
        waiting = sorted(rows, key=lambda row: len(row.ids), reverse=True)
        while waiting:
            longest = len(waiting[0].ids)
            sliced = self._slice is not None and longest > self._slice
            group = waiting[: 1 if sliced else max(1, budget // (behind + longest))]
            cache = None if prefix is None else _repeated(prefix, len(group), self._config)
            try:
                hidden = self._forward([row.ids for row in group], cache).last_hidden_state
            except torch.OutOfMemoryError:
                free_memory()
                budget = (behind + longest) * len(group) // 2
                if len(group) > 1:
                    continue
                yield group[0], EngineError("out of memory")
            else:
                for i, row in enumerate(group):
                    # Of a sliced row only the last slice is left, whose end is the row's.
                    yield row, hidden[i, len(row.ids) - 1 if len(group) > 1 else -1]
            waiting = waiting[len(group) :]

    def _forward(self, ids: list[list[int]], cache: DynamicCache | None = None) -> Any:
        """The layers over right-padded rows; nothing reads what a causal model makes of the padding.

        One long row of a model with sliding windows goes in slices, whose masks and keys are little more than a
        window wide instead of as wide as the row; the result is that of the last slice.
        """
        self.passes += 1
        width = max(map(len, ids))
        padded: Any = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=self._device)
        if self._slice is None or width <= self._slice or len(ids) > 1:
            return self._layers(input_ids=padded, past_key_values=cache, use_cache=cache is not None)
        cache = cache or DynamicCache(config=self._config)
        for part in padded.split(self._slice, dim=1):
            result = self._layers(input_ids=part, past_key_values=cache, use_cache=True)
        return result


@dataclass(frozen=True, slots=True)
class _Row:
    """Token ids of one question, and whose question it is."""

    job: int
    question: int
    ids: list[int]


def _repeated(prefix: DynamicCache, n: int, config: Any) -> DynamicCache:
    """A cache of `n` rows that all continue `prefix`; its keys and values are not copied before they grow."""
    cache = DynamicCache(config=config)
    layers: list[tuple[Any, Any]] = list(zip(cache.layers, prefix.layers, strict=True))
    for layer, source in layers:
        vars(layer).update(vars(source))
        layer.keys, layer.values = source.keys.expand(n, -1, -1, -1), source.values.expand(n, -1, -1, -1)
    return cache


def _leave_files(model: PreTrainedModel) -> None:
    """Copy the weights into memory: they may still be pages of the files.

    Then a file that changes would change the answers, and one that is cut short end the process.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def free_memory() -> None:
    """Give back what the allocators of the device and of the host hold but do not use."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)


def _deltanet_operators(model: PreTrainedModel) -> tuple[ModuleType, dict[str, Callable[..., Any]]]:
    """The module of a model, and the functions in it that its DeltaNet layers call."""
    module = sys.modules[type(model).__module__]
    return module, {name: getattr(module, name) for name in _DELTANET_OPERATORS if hasattr(module, name)}
