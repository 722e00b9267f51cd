"""Model folders for tests, built on first use and cached under `.cache/` of the checkout.

They are real folders that load offline with `AutoModelForCausalLM` and `AutoTokenizer`; only the weights are random.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench import tokenizer

CACHE = Path(__file__).parents[1] / ".cache"

SEED = 3


def tiny_qwen35(head_dim: int = 32, linear_head_dim: int = 16, sharpness: float = 6.0) -> Path:
    """Return a folder like blink-4b's, with the real vocabulary and 4 small random layers (16 MB).

    Args:
        head_dim: of the attention layers, a multiple of 32.
        linear_head_dim: of the DeltaNet layers' keys and values.
        sharpness: mean of the final norm's weights, to which the label logits are proportional.
    """
    sources = (Path(__file__), Path(tokenizer.__file__))
    recipe = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    target = CACHE / f"tiny-qwen35-{head_dim}-{linear_head_dim}-{sharpness:g}-{recipe}"
    if target.is_dir():
        return target
    CACHE.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".tiny-", dir=CACHE))
    try:
        made = work / "model"
        made.mkdir()
        tokenizer.write_tokenizer(made)
        _write_weights(made, head_dim, linear_head_dim, sharpness)
        _write_digests(made)
        if not target.is_dir():
            os.rename(made, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _write_weights(folder: Path, head_dim: int, linear_head_dim: int, sharpness: float) -> None:
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rotary_pairs = head_dim // 8
    config = Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        dtype="bfloat16",
        vocab_size=248_320,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=linear_head_dim,
        linear_value_head_dim=linear_head_dim,
        max_position_embeddings=262_144,
        tie_word_embeddings=True,
        eos_token_id=248_044,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [rotary_pairs // 2, rotary_pairs // 4, rotary_pairs // 4],
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3_5ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter, sharpness)
    model.to(torch.bfloat16)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    _save_shards(dict(model.named_parameters()), folder)


def _save_shards(parameters: dict[str, Any], folder: Path) -> None:
    """Write two shards and their index under the names of the published weights, which the library maps on loading."""
    from safetensors.torch import save_file

    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in parameters.items()}
    in_first = [name for name in named if "embed_tokens" in name or ".layers.0." in name or ".layers.1." in name]
    shards = {
        "model-00001-of-00002.safetensors": in_first,
        "model-00002-of-00002.safetensors": [name for name in named if name not in in_first],
    }
    for file, names in shards.items():
        save_file({name: named[name].detach() for name in names}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in named.values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _draw(name: str, parameter: Any, sharpness: float) -> None:
    """Random values that make answers depend on the whole prompt: long memory, peaked attention, layers that count."""
    if "embed_tokens" in name:
        parameter.normal_(std=0.05)
    elif name.endswith("A_log"):
        parameter.uniform_(-6, -2)
    elif name.endswith("dt_bias"):
        parameter.uniform_(-1, 1)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        parameter.normal_(mean=0.7, std=0.1)
    elif name == "model.norm.weight":
        parameter.normal_(mean=sharpness, std=sharpness / 12)
    elif "norm" in name:
        parameter.add_(parameter.clone().normal_(std=0.1))
    else:
        parameter.normal_(std=0.3)


def _write_digests(folder: Path) -> None:
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "weights.sha256").write_text("".join(lines))
