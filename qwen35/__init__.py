"""The fast pass for Qwen3.5 decoders: packed, forked, fused."""

from .engine import Job, Qwen35Engine, unsupported
from .pack import Forked

__all__ = ["Forked", "Job", "Qwen35Engine", "unsupported"]
