"""The pass: a packed stream through all layers, to the hidden states that are read.

The last layer computes queries, output and MLP only for the rows that are read; all others end as its key-values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from .pack import WINDOW, Carry, Plan, Tables
from .weights import AttentionLayer, DeltaLayer, Geometry, Weights

ADD_IN_PRODUCT = 2048
"""Rows above which the residual is added inside the product: it saves a reading and a writing of the residual, a
hundredth of a large pass; in a small pass it costs more than it saves."""


@dataclass(slots=True, eq=False)
class Held:
    """The carries that a pass starts from, side by side.

    places: [carries, 3] int64, the addresses of their keys and values and the elements of one layer;
    inputs: [DeltaNet layers, WINDOW * carries, channels];
    states: [DeltaNet layers, carries, heads, key, value] float32.
    """

    carries: Sequence[Carry]
    places: Tensor
    inputs: Tensor
    states: Tensor

    @staticmethod
    def of(weights: Weights, carries: Sequence[Carry]) -> Held:
        g, like = weights.geometry, weights.embedding
        if not carries:
            states = like.new_empty(g.deltas, 0, g.value_heads, g.key, g.value, dtype=torch.float32)
            return Held(
                carries, like.new_empty(0, 3, dtype=torch.int64), like.new_empty(g.deltas, 0, g.channels), states
            )
        places = [(c.keys.data_ptr(), c.values.data_ptr(), c.keys.stride(0)) for c in carries]
        return Held(
            carries,
            torch.tensor(places, dtype=torch.int64, device=like.device),
            torch.cat([carry.inputs for carry in carries], dim=1),
            torch.stack([carry.state for carry in carries], dim=1),
        )


@dataclass(slots=True, eq=False)
class Luggage:
    """What a pass leaves for later ones: the carries that its unfinished trunks will start from."""

    plan: Plan
    borders: list[int]
    saved: list[Carry]

    @staticmethod
    def of(weights: Weights, plan: Plan, borders: list[int]) -> Luggage:
        """Prepare room; borders: where segments start, on the host. A pass that fails leaves every part as it was."""
        saved = []
        g, like = weights.geometry, weights.embedding
        for _, share in plan.saves:
            old, room = share.part.carry, (g.attentions, len(share.part.trunk), g.key_value_heads, g.head)
            if old is None or old.shared:
                keys, values = like.new_empty(room), like.new_empty(room)
                if old is not None:
                    keys[:, : share.start] = old.keys[:, : share.start]
                    values[:, : share.start] = old.values[:, : share.start]
            else:
                keys, values = old.keys, old.values
            saved.append(
                Carry(
                    keys=keys,
                    values=values,
                    inputs=like.new_empty(g.deltas, WINDOW, g.channels),
                    state=like.new_empty(g.deltas, g.value_heads, g.key, g.value, dtype=torch.float32),
                )
            )
        return Luggage(plan, borders, saved)

    def leave(self, layer: int, states: Tensor, projected: Tensor) -> None:
        """Keep a DeltaNet layer's states and last inputs."""
        for (segment, share), carry in zip(self.plan.saves, self.saved, strict=True):
            carry.state[layer] = states[segment]
            own = projected[self.borders[segment] : self.borders[segment + 1], : carry.inputs.shape[-1]]
            old = share.part.carry
            before = carry.inputs.new_zeros(carry.inputs.shape[1:]) if old is None else old.inputs[layer]
            carry.inputs[layer] = torch.cat([before, own[-WINDOW:]])[-WINDOW:]

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep an attention layer's key-values."""
        for (segment, share), carry in zip(self.plan.saves, self.saved, strict=True):
            rows = slice(self.borders[segment], self.borders[segment + 1])
            carry.keys[layer, share.start : share.stop] = keys[rows]
            carry.values[layer, share.start : share.stop] = values[rows]

    def commit(self) -> None:
        """Hand the new carries to their parts, once the pass is through."""
        for (_, share), carry in zip(self.plan.saves, self.saved, strict=True):
            share.part.carry = carry


def run(
    weights: Weights, tables: Tables, states: Tensor, pieces: ModuleType, held: Held, luggage: Luggage | None = None
) -> Tensor:
    """One pass. tables: on the device; states: [slots, value heads, key, value] float32, working memory.

    pieces: `kernels` or `reference`. Returns [reads, hidden], the final norm's output at `tables.reads`.
    """
    g = weights.geometry
    angles = tables.positions[:, None].float() * weights.frequencies
    cos, sin = angles.cos(), angles.sin()
    residual = F.embedding(tables.ids, weights.embedding)
    x: Tensor = pieces.add_norm(residual, None, weights.layers[0].norm, g.epsilon)
    deltas = attentions = 0
    for number, layer in enumerate(weights.layers):
        last = number == len(weights.layers) - 1
        if isinstance(layer, DeltaLayer):
            projected = F.linear(x, layer.project)
            mixed = pieces.delta_net(projected, held.inputs[deltas], held.states[deltas], tables, layer, states, g)
            if luggage:
                luggage.leave(deltas, states, projected)
            deltas += 1
        else:
            rows = tables.reads if last else None
            queries, keys, values, gate = _heads(x, layer, cos, sin, pieces, g, rows)
            if luggage:
                luggage.keep(attentions, keys, values)
            tiles = tables.last_tiles if last else tables.tiles
            mixed = pieces.attend(queries, keys, values, gate, tiles, held, attentions)
            attentions += 1
            if last:
                residual = residual[tables.reads]
        x = _add_norm(residual, mixed, layer.out, layer.post_norm, pieces, g)
        following = weights.norm if last else weights.layers[number + 1].norm
        x = _add_norm(residual, pieces.swiglu(F.linear(x, layer.gate_up)), layer.down, following, pieces, g)
    return x


def _add_norm(residual: Tensor, x: Tensor, matrix: Tensor, norm: Tensor, pieces: ModuleType, g: Geometry) -> Tensor:
    """Add the product x @ matrix.T to the residual in place and return the norm of the sum."""
    normed: Tensor
    if len(residual) > ADD_IN_PRODUCT:
        torch.addmm(residual, x, matrix.T, out=residual)
        normed = pieces.add_norm(residual, None, norm, g.epsilon)
    else:
        normed = pieces.add_norm(residual, F.linear(x, matrix), norm, g.epsilon)
    return normed


def _heads(
    x: Tensor, layer: AttentionLayer, cos: Tensor, sin: Tensor, pieces: ModuleType, g: Geometry, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries (of `rows` only, if given), keys, values and output gate of one attention layer."""
    width = 2 * g.query_heads * g.head
    query_cos, query_sin = cos, sin
    if rows is None:
        projected = F.linear(x, layer.project)
        query_gate, key_value = projected[:, :width], projected[:, width:]
    else:
        query_gate, key_value = F.linear(x[rows], layer.project[:width]), F.linear(x, layer.project[width:])
        query_cos, query_sin = cos[rows], sin[rows]
    both = query_gate.view(-1, g.query_heads, 2 * g.head)
    pair = key_value.view(-1, 2 * g.key_value_heads, g.head)
    queries = pieces.rotate(both[..., : g.head], layer.query_norm, query_cos, query_sin, g.epsilon)
    keys = pieces.rotate(pair[:, : g.key_value_heads], layer.key_norm, cos, sin, g.epsilon)
    return queries, keys, pair[:, g.key_value_heads :], both[..., g.head :]
