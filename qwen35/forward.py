"""The pass: a packed stream through all layers, to the hidden states that are read.

The last layer computes queries, output and MLP only for the rows that are read; all others end as its key-values.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from .pack import WINDOW, Carry, Plan, Tables
from .weights import AttentionLayer, DeltaLayer, Weights


@dataclass(slots=True, eq=False)
class Luggage:
    """The carries of one eager pass: what it starts from and what it leaves, matched to state slots."""

    weights: Weights
    plan: Plan
    borders: list[int]
    saved: list[Carry]

    @property
    def loaded(self) -> list[Carry]:
        return [_held(share.part.carry) for _, share in self.plan.loads]

    @staticmethod
    def of(weights: Weights, plan: Plan, borders: list[int]) -> Luggage:
        """Prepare room for what the pass will leave; borders: where segments start, on the host.

        A pass that fails leaves every part's carry as it was.
        """
        saved = []
        g, like = weights.geometry, weights.embedding
        for _, _, share in plan.saves:
            old = share.part.carry
            room = (g.attentions, len(share.part.trunk), g.key_value_heads, g.head)
            saved.append(
                Carry(
                    keys=old.keys if old else like.new_empty(room),
                    values=old.values if old else like.new_empty(room),
                    inputs=like.new_empty(g.deltas, WINDOW, g.channels),
                    state=like.new_empty(g.deltas, g.value_heads, g.key, g.value, dtype=torch.float32),
                )
            )
        return Luggage(weights, plan, borders, saved)

    def inputs(self) -> Tensor:
        """The carried convolution inputs, [DeltaNet layers, WINDOW * carries, channels]."""
        g = self.weights.geometry
        if not self.plan.loads:
            return self.weights.embedding.new_empty(g.deltas, 0, g.channels)
        return torch.cat([carry.inputs for carry in self.loaded], dim=1)

    def enter(self, layer: int, states: Tensor) -> None:
        for (slot, _), carry in zip(self.plan.loads, self.loaded, strict=True):
            states[slot] = carry.state[layer]

    def leave(self, layer: int, states: Tensor, projected: Tensor) -> None:
        for (segment, slot, share), carry in zip(self.plan.saves, self.saved, strict=True):
            carry.state[layer] = states[slot]
            own = projected[self.borders[segment] : self.borders[segment + 1], : carry.inputs.shape[-1]]
            before = carry.inputs.new_zeros(carry.inputs.shape[1:])
            if share.part.carry is not None:
                before = share.part.carry.inputs[layer]
            carry.inputs[layer] = torch.cat([before, own[-WINDOW:]])[-WINDOW:]

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for (segment, _, share), carry in zip(self.plan.saves, self.saved, strict=True):
            rows = slice(self.borders[segment], self.borders[segment + 1])
            carry.keys[layer, share.start : share.stop] = keys[rows]
            carry.values[layer, share.start : share.stop] = values[rows]

    def commit(self) -> None:
        """Hand the new carries to their parts, once the pass is through."""
        for (_, _, share), carry in zip(self.plan.saves, self.saved, strict=True):
            share.part.carry = carry


def run(weights: Weights, tables: Tables, states: Tensor, pieces: ModuleType, luggage: Luggage | None = None) -> Tensor:
    """One pass. tables: on the device; states: [slots, value heads, key, value] float32, working memory.

    pieces: `kernels` or `reference`. Returns [reads, hidden], the final norm's output at `tables.reads`.
    """
    g = weights.geometry
    angles = tables.positions[:, None].float() * weights.frequencies
    cos, sin = angles.cos(), angles.sin()
    residual = F.embedding(tables.ids, weights.embedding)
    x = pieces.add_norm(residual, None, weights.layers[0].norm, g.epsilon)
    inputs = luggage.inputs() if luggage else residual.new_empty(g.deltas, 0, g.channels)
    deltas = attentions = 0
    for number, layer in enumerate(weights.layers):
        last = number == len(weights.layers) - 1
        if isinstance(layer, DeltaLayer):
            projected = F.linear(x, layer.project)
            if luggage:
                luggage.enter(deltas, states)
            mixed = pieces.delta_net(projected, inputs[deltas], tables, layer, states, g)
            if luggage:
                luggage.leave(deltas, states, projected)
            deltas += 1
        else:
            mixed = _attention(x, layer, cos, sin, tables, pieces, weights, luggage, attentions, last)
            attentions += 1
            if last:
                residual = residual[tables.reads]
        x = pieces.add_norm(residual, F.linear(mixed, layer.out), layer.post_norm, g.epsilon)
        x = F.linear(pieces.swiglu(F.linear(x, layer.gate_up)), layer.down)
        following = weights.norm if last else weights.layers[number + 1].norm
        x = pieces.add_norm(residual, x, following, g.epsilon)
    return x


def _attention(
    x: Tensor,
    layer: AttentionLayer,
    cos: Tensor,
    sin: Tensor,
    tables: Tables,
    pieces: ModuleType,
    weights: Weights,
    luggage: Luggage | None,
    number: int,
    last: bool,
) -> Tensor:
    g = weights.geometry
    width = 2 * g.query_heads * g.head
    tiles, query_cos, query_sin = tables.tiles, cos, sin
    if last:
        reads = tables.reads
        tiles, query_cos, query_sin = tables.last_tiles, cos[reads], sin[reads]
        query_gate, key_value = F.linear(x[reads], layer.project[:width]), F.linear(x, layer.project[width:])
    else:
        query_gate, key_value = F.linear(x, layer.project).split([width, 2 * g.key_value_heads * g.head], dim=-1)
    both = query_gate.unflatten(-1, (g.query_heads, 2 * g.head))
    key, values = key_value.unflatten(-1, (2 * g.key_value_heads, g.head)).chunk(2, dim=1)
    queries = pieces.rotate(both[..., : g.head], layer.query_norm, query_cos, query_sin, g.epsilon)
    keys = pieces.rotate(key, layer.key_norm, cos, sin, g.epsilon)
    if luggage:
        luggage.keep(number, keys, values)
    loaded = luggage.loaded if luggage else []
    return pieces.attend(queries, keys, values, both[..., g.head :], tiles, loaded, number)


def _held(carry: Carry | None) -> Carry:
    assert carry is not None, "a share that starts inside its trunk has a carry"
    return carry
