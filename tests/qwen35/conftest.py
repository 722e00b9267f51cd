from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from qwen35 import Forked

VOCABULARY = 512
LABELS = 300


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny random model: its folder and the transformers model in float32."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="session")
def whole(published: tuple[Path, Any]) -> Callable[[Forked], torch.Tensor]:
    """Label probabilities of every question read as one whole prompt by transformers, [tails, LABELS] float32."""
    model = published[1]

    @torch.inference_mode()
    def read(request: Forked) -> torch.Tensor:
        states = torch.empty(len(request.tails), model.config.hidden_size)
        for length in {len(tail) for tail in request.tails}:
            rows = [i for i, tail in enumerate(request.tails) if len(tail) == length]
            prompts = torch.tensor([[*request.prefix, *request.tails[i]] for i in rows])
            states[rows] = model.model(prompts, use_cache=False).last_hidden_state[:, -1]
        return (states @ model.lm_head.weight[:LABELS].T).softmax(-1)

    return read
