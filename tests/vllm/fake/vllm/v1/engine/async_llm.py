"""An engine with processes of its own: a child that ignores SIGTERM, which has one of its own."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print("up", flush=True)
time.sleep(600)
"""


class AsyncLLM:
    """`FAKE_VLLM`: `start_s` to wait once its processes are up, `effective` settings to differ in, `death` a file."""

    def __init__(self, settings: Any) -> None:
        plan = json.loads(os.environ["FAKE_VLLM"])
        self._death = Path(plan["death"])
        self._child = subprocess.Popen([sys.executable, "-c", CHILD, CHILD], stdout=subprocess.PIPE)
        assert self._child.stdout is not None
        for _ in range(2):
            self._child.stdout.readline()
        print("fake engine: processes are up", file=sys.stderr, flush=True)
        time.sleep(plan.get("start_s", 0))
        if "fails" in plan:
            raise RuntimeError(plan["fails"])
        found = vars(settings) | {"head_dtype": "torch.float32"} | plan.get("effective", {})
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(**found),
            cache_config=SimpleNamespace(**found),
            scheduler_config=SimpleNamespace(**found),
            parallel_config=SimpleNamespace(**found),
            device_config=SimpleNamespace(device_type="none"),
        )

    @classmethod
    def from_engine_args(cls, settings: Any) -> "AsyncLLM":
        return cls(settings)

    @property
    def errored(self) -> bool:
        return self._death.exists()

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        labels = sampling_params.allowed_token_ids
        weights = [1 + (sum(prompt["prompt_token_ids"]) + i) % 7 for i in range(len(labels))]
        top = {
            label: SimpleNamespace(logprob=math.log(weight / sum(weights)))
            for label, weight in zip(labels, weights, strict=True)
        }
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(finish_reason="length", logprobs=[top])])

    async def abort(self, request_id: str) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None:
        """Leaves its processes behind, as an engine that crashed would."""
