"""Weights straight from safetensors onto the device, projections that share an input stacked into one matrix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a Qwen3.5 decoder, from its config.json."""

    hidden: int
    middle: int
    vocabulary: int
    layers: tuple[str, ...]
    query_heads: int
    key_value_heads: int
    head: int
    rotary: int
    theta: float
    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int
    epsilon: float
    tied: bool
    positions: int

    @property
    def channels(self) -> int:
        """Width of the convolution: keys twice (query and key), then values."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def deltas(self) -> int:
        return self.layers.count("linear_attention")

    @property
    def attentions(self) -> int:
        return self.layers.count("full_attention")

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.query_heads // self.key_value_heads

    @staticmethod
    def of(folder: Path) -> Geometry:
        """Read a folder's config.json. Raises ValueError when it describes another architecture."""
        config: Any = AutoConfig.from_pretrained(folder)
        config = getattr(config, "text_config", None) or config
        if config.model_type != "qwen3_5_text":
            raise ValueError(f"architecture {config.model_type} is not qwen3_5_text")
        rope = config.rope_parameters
        odd = [
            what
            for what, wrong in (
                ("rope type", rope["rope_type"] != "default"),
                ("activation", config.hidden_act != "silu"),
                ("attention bias", config.attention_bias),
                ("last layer", config.layer_types[-1] != "full_attention"),
                ("convolution kernel", config.linear_conv_kernel_dim != 4),
            )
            if wrong
        ]
        if odd:
            raise ValueError(f"geometry not handled: {', '.join(odd)}")
        return Geometry(
            hidden=config.hidden_size,
            middle=config.intermediate_size,
            vocabulary=config.vocab_size,
            layers=tuple(config.layer_types),
            query_heads=config.num_attention_heads,
            key_value_heads=config.num_key_value_heads,
            head=config.head_dim,
            rotary=int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
            theta=float(rope["rope_theta"]),
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key=config.linear_key_head_dim,
            value=config.linear_value_head_dim,
            kernel=config.linear_conv_kernel_dim,
            epsilon=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            positions=config.max_position_embeddings,
        )


@dataclass(slots=True, eq=False)
class Mixer:
    """What both kinds of layer share. Norm weights are stored as w and applied as 1 + w.

    project: rows of all products of the normed input; out: [hidden, inner]; gate_up: [2 * middle, hidden].
    """

    norm: Tensor
    project: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True, eq=False)
class DeltaLayer(Mixer):
    """Rows of project: convolution channels (queries, keys, values), gate z, beta, decay."""

    conv: Tensor  # [4, channels], the newest input's tap last
    decay_rate: Tensor  # [value heads] float32, -exp(A_log)
    decay_bias: Tensor  # [value heads] float32
    out_norm: Tensor  # [value size], applied as it is


@dataclass(slots=True, eq=False)
class AttentionLayer(Mixer):
    """Rows of project: per query head its query then its gate, keys, values."""

    query_norm: Tensor
    key_norm: Tensor


@dataclass(slots=True, eq=False)
class Weights:
    """The decoder on its device. embedding: [vocabulary, hidden]; head is the same tensor when tied."""

    geometry: Geometry
    embedding: Tensor
    head: Tensor
    layers: list[DeltaLayer | AttentionLayer]
    norm: Tensor
    frequencies: Tensor  # [rotary / 2] float32


def load(
    folder: Path, device: torch.device, dtype: torch.dtype, progress: Callable[[float], None] | None = None
) -> Weights:
    """Read a model folder's safetensors onto `device` as `dtype`.

    `progress` gets the share of the file bytes read so far, 0 to 1. Raises ValueError for another architecture and
    KeyError for a missing tensor.
    """
    geometry = Geometry.of(folder)
    stock = _Stock(folder, device, dtype, progress)
    layers: list[DeltaLayer | AttentionLayer] = []
    for number, kind in enumerate(geometry.layers):
        one = f"layers.{number}."
        common = {
            "norm": stock.take(one + "input_layernorm.weight"),
            "post_norm": stock.take(one + "post_attention_layernorm.weight"),
            "gate_up": stock.stack(one + "mlp.gate_proj.weight", one + "mlp.up_proj.weight"),
            "down": stock.take(one + "mlp.down_proj.weight"),
        }
        if kind == "linear_attention":
            mixer = one + "linear_attn."
            project = stock.stack(*(f"{mixer}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")))
            layers.append(
                DeltaLayer(
                    project=project,
                    out=stock.take(mixer + "out_proj.weight"),
                    conv=stock.take(mixer + "conv1d.weight").squeeze(1).T.contiguous(),
                    decay_rate=-stock.take(mixer + "A_log").float().exp(),
                    decay_bias=stock.take(mixer + "dt_bias").float(),
                    out_norm=stock.take(mixer + "norm.weight"),
                    **common,
                )
            )
        else:
            mixer = one + "self_attn."
            layers.append(
                AttentionLayer(
                    project=stock.stack(*(f"{mixer}{name}_proj.weight" for name in "qkv")),
                    out=stock.take(mixer + "o_proj.weight"),
                    query_norm=stock.take(mixer + "q_norm.weight"),
                    key_norm=stock.take(mixer + "k_norm.weight"),
                    **common,
                )
            )
    embedding = stock.take("embed_tokens.weight")
    steps = torch.arange(0, geometry.rotary, 2, dtype=torch.float32) / geometry.rotary
    return Weights(
        geometry=geometry,
        embedding=embedding,
        head=embedding if geometry.tied else stock.take("lm_head.weight"),
        layers=layers,
        norm=stock.take("norm.weight"),
        frequencies=(1.0 / geometry.theta**steps).to(device),
    )


class _Stock:
    """The folder's tensors by their name inside the decoder; each is read once, when asked for."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, progress: Callable[[float], None] | None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.progress = progress
        self.files: dict[str, tuple[Any, str]] = {}
        self.size = sum(path.stat().st_size for path in _shards(folder))
        self.read = 0
        for path in _shards(folder):
            file: Any = safe_open(path, framework="pt", device=str(device))
            names = file.keys()
            self.files |= {_short(name): (file, name) for name in names}

    def take(self, name: str) -> Tensor:
        file, full = self.files[name]
        tensor: Tensor = file.get_tensor(full)
        self.read += tensor.nbytes
        if self.progress is not None:
            self.progress(min(1.0, self.read / self.size))
        return tensor.to(self.dtype)

    def stack(self, *names: str) -> Tensor:
        heights = [self.files[name][0].get_slice(self.files[name][1]).get_shape() for name in names]
        whole = torch.empty(sum(rows for rows, _ in heights), heights[0][1], dtype=self.dtype, device=self.device)
        start = 0
        for name, (rows, _) in zip(names, heights, strict=True):
            whole[start : start + rows] = self.take(name)
            start += rows
        return whole


def _shards(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        yield from (folder / name for name in names)
    else:
        yield folder / "model.safetensors"


def _short(name: str) -> str:
    """`model.language_model.layers.0.x` and `model.layers.0.x` both become `layers.0.x`."""
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
