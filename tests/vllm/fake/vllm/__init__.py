"""Stands in for vLLM where a test is about the process around it; `FAKE_VLLM` holds what it does, as JSON."""

from types import SimpleNamespace
from typing import Any

__version__ = "0.0.fake"


def AsyncEngineArgs(**settings: Any) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(**settings)


def SamplingParams(**settings: Any) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(**settings)
