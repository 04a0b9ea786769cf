"""Paged attention of the reference backend: fixed tiles, online softmax, in a form where no neighbour matters.

Queries are cut into tiles of a fixed number of positions, KV into tiles of a fixed number of positions, both at
absolute positions of the sequence: token p is always in the same row of the same query tile, however the prompt was
chunked. Each (query tile, KV head) meets its KV tiles in order:

    s = q k^T + bias;  m' = max(m, max s);  p = exp(s - m');  a = exp(m - m');  l = a l + sum p;  o = a o + p v

Both products are batched GEMMs whose items have one fixed shape, and an item's bits depend on nothing but the item.
A position that is masked has s = -inf, so p = 0, and contributes exactly nothing: a tile that is masked as a whole
leaves m, l and o as they were. Slots behind the context are zeroed when they are read, so what they hold is harmless.

Sequences with one query tile (decode) are computed together, as items of one batch; the others one after another,
because their query tiles share K and V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.kernels.ops import StepLayout

_QUERY_ROWS = 32
"""Rows of one query tile at most: positions times the query heads that share a KV head."""
_KV_TILE = 128
"""Positions of one KV tile, or one block if that is longer."""
_NO_MAXIMUM = -1e30
"""Below every score, yet finite: exp(-inf - _NO_MAXIMUM) is 0 where exp(-inf - -inf) would be NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """One KV tile against the query tiles that can see some of it."""

    seqs: slice
    tiles: slice
    block_rows: Tensor
    """[num_seqs * num_kv_heads * blocks]: rows of the cache as [rows, 2 * block_size * D], for layer 0."""
    keep: Tensor | None
    """int32 [num_seqs, 1, blocks, 1, block_size, 1]: -1 in the context, 0 behind it; None: all are in it."""
    bias: Tensor | None
    """[num_seqs, 1, tiles, rows, kv_tile]: 0 or -inf; None: all are visible."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences that are computed together: several with one query tile each, or one with several."""

    num_seqs: int
    num_tiles: int
    first_tiles: Tensor  # [num_seqs]: absolute index of the first query tile
    context_lens: list[int]  # descending
    gather: Tensor  # [num_seqs * num_tiles * positions]: token for each place in a tile; any for a place without one
    tokens: Tensor  # [n]: the group's tokens ...
    places: Tensor  # [n]: ... and where each sits among num_seqs * num_tiles * positions
    blocks: Tensor  # [num_seqs, num_kv_tiles * blocks_per_tile]
    visits: dict[int | None, list[_Visit]] = field(default_factory=dict)  # by window


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """A step cut into tiles: once, for all layers."""

    groups: list[_Group]
    tile_len: int  # positions in a query tile
    kv_tile: int  # positions in a KV tile
    scratch: dict[str, Tensor] = field(default_factory=dict)  # buffers that all layers share, by use

    def buffer(self, use: str, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised float32 tensor, valid until the next call with the same `use`.

        Fresh tensors of this size would come from new pages each time, which costs more than the maths on them.
        """
        size = math.prod(shape)
        if use not in self.scratch or self.scratch[use].numel() < size:
            self.scratch[use] = torch.empty(size)
        return self.scratch[use][:size].view(shape)


def plan_attention(layout: StepLayout, kv_cache: Tensor, num_heads: int) -> AttentionPlan:
    """Cut the step into tiles. Reads the layout's values: it must be on the CPU."""
    num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[4]
    heads_per_group = num_heads // num_kv_heads
    tile_len = 1
    while 2 * tile_len * heads_per_group <= _QUERY_ROWS:
        tile_len *= 2
    plan = AttentionPlan([], tile_len, max(_KV_TILE, block_size))
    starts, contexts = layout.query_starts.tolist(), layout.context_lens.tolist()
    alone: list[int] = []
    for seq, context in enumerate(contexts):
        first_position = context - (starts[seq + 1] - starts[seq])
        if (context - 1) // tile_len > first_position // tile_len:
            plan.groups.append(_make_group(plan, layout, starts, contexts, [seq], block_size))
        else:
            alone.append(seq)
    if alone:
        alone.sort(key=lambda seq: -contexts[seq])
        plan.groups.append(_make_group(plan, layout, starts, contexts, alone, block_size))
    return plan


def _make_group(
    plan: AttentionPlan, layout: StepLayout, starts: list[int], contexts: list[int], seqs: list[int], block_size: int
) -> _Group:
    tile_len = plan.tile_len
    first_tiles: list[int] = []
    tokens: list[int] = []
    places: list[int] = []
    num_tiles = 1
    for index, seq in enumerate(seqs):
        num_tokens = starts[seq + 1] - starts[seq]
        first_position = contexts[seq] - num_tokens
        first_tile = first_position // tile_len
        num_tiles = (contexts[seq] - 1) // tile_len - first_tile + 1
        place = index * num_tiles * tile_len + first_position - first_tile * tile_len
        first_tiles.append(first_tile)
        tokens += range(starts[seq], starts[seq + 1])
        places += range(place, place + num_tokens)
    token_index, place_index = torch.tensor(tokens), torch.tensor(places)
    gather = torch.full((len(seqs) * num_tiles * tile_len,), tokens[0])
    gather[place_index] = token_index
    context_lens = [contexts[seq] for seq in seqs]
    num_blocks = -(-max(context_lens) // plan.kv_tile) * (plan.kv_tile // block_size)
    blocks = layout.block_tables[seqs][:, :num_blocks]
    if blocks.shape[1] < num_blocks:
        blocks = torch.nn.functional.pad(blocks, (0, num_blocks - blocks.shape[1]))
    return _Group(
        len(seqs), num_tiles, torch.tensor(first_tiles), context_lens, gather, token_index, place_index, blocks
    )


def _plan_visits(plan: AttentionPlan, group: _Group, kv_cache: Tensor, rows: int, window: int | None) -> list[_Visit]:
    """The KV tiles that somebody in the group can see, in order."""
    visits = []
    tile_len, kv_tile = plan.tile_len, plan.kv_tile
    places = torch.arange(group.num_tiles * tile_len).view(group.num_tiles, tile_len)
    positions = group.first_tiles.view(-1, 1, 1) * tile_len + places  # [num_seqs, num_tiles, tile_len]
    for start in range(0, group.context_lens[0], kv_tile):
        seqs = slice(0, sum(context > start for context in group.context_lens))
        visible = positions[seqs, :, -1] >= start
        if window is not None:
            visible &= positions[seqs, :, 0] - window < start + kv_tile - 1
        seen = visible.any(0).nonzero().flatten().tolist()
        if seen:
            tiles = slice(seen[0], seen[-1] + 1)
            visits.append(_plan_visit(plan, group, kv_cache, rows, window, start, seqs, tiles, positions[seqs, tiles]))
    return visits


def _plan_visit(
    plan: AttentionPlan,
    group: _Group,
    kv_cache: Tensor,
    rows: int,
    window: int | None,
    start: int,
    seqs: slice,
    tiles: slice,
    positions: Tensor,
) -> _Visit:
    _, num_kv_heads, num_layers, _, block_size, _ = kv_cache.shape
    kv_positions = torch.arange(start, start + plan.kv_tile)
    blocks_per_tile = plan.kv_tile // block_size
    first_block = start // block_size
    blocks = group.blocks[seqs, first_block : first_block + blocks_per_tile].unsqueeze(1)  # [seqs, 1, blocks]
    head = torch.arange(num_kv_heads).view(1, -1, 1)
    block_rows = ((blocks * num_kv_heads + head) * num_layers).flatten()
    contexts = torch.tensor(group.context_lens[seqs])
    keep = None
    if int(contexts.min()) < start + plan.kv_tile:
        inside = kv_positions.view(1, -1) < contexts.view(-1, 1)
        keep = (-inside.to(torch.int32)).view(-1, 1, blocks_per_tile, 1, block_size, 1)
    hidden = kv_positions > positions.unsqueeze(-1)  # [seqs, tiles, tile_len, kv_tile]
    if window is not None:
        hidden |= kv_positions <= positions.unsqueeze(-1) - window
    bias = None
    if bool(hidden.any()):
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        bias = bias.repeat_interleave(rows // plan.tile_len, dim=2).unsqueeze(1)
    return _Visit(seqs, tiles, block_rows, keep, bias)


def attend(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> None:
    """Write the attention of every token into its row of out [T, H * D]. query [T, H, D]."""
    num_kv_heads, head_dim = kv_cache.shape[1], kv_cache.shape[5]
    scaled = query.float().mul_(scale) if query.dtype != torch.float32 else query * scale
    heads_per_group = query.shape[1] // num_kv_heads
    for group in plan.groups:
        shape = (group.num_seqs, group.num_tiles, plan.tile_len, num_kv_heads, heads_per_group, head_dim)
        tiles = scaled[group.gather].view(shape).permute(0, 3, 1, 2, 4, 5)
        tiles = tiles.reshape(group.num_seqs, num_kv_heads, group.num_tiles, -1, head_dim)  # [S, KVH, tiles, rows, D]
        result = _attend_group(tiles, kv_cache, layer, plan, group, window, softcap)
        result = result.view(*shape[:1], num_kv_heads, *shape[1:3], heads_per_group, head_dim).permute(0, 2, 3, 1, 4, 5)
        result = result.reshape(-1, query.shape[1] * head_dim)
        out[group.tokens] = result[group.places].to(out.dtype)


def _attend_group(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    plan: AttentionPlan,
    group: _Group,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of one group's query tiles. query float32 [S, KVH, tiles, rows, D] -> the same shape."""
    num_seqs, num_kv_heads, num_tiles, rows, _ = query.shape
    if window not in group.visits:
        group.visits[window] = _plan_visits(plan, group, kv_cache, rows, window)
    maximum = query.new_full((num_seqs, num_kv_heads, num_tiles, rows, 1), _NO_MAXIMUM)
    total = torch.zeros_like(maximum)
    result = torch.zeros_like(query)
    for visit in group.visits[window]:
        keys, values = _read_tile(kv_cache, layer, plan, visit, num_kv_heads)
        part = (visit.seqs, slice(None), visit.tiles)
        scores = _multiply(query[part], keys.transpose(-1, -2), plan, "scores")
        if softcap is not None:
            _cap(scores, softcap)
        if visit.bias is not None:
            scores += visit.bias
        new_maximum = torch.maximum(maximum[part], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_maximum).exp_()
        decay = torch.exp(maximum[part] - new_maximum)
        maximum[part] = new_maximum
        total[part] = (total[part] * decay).add_(weights.sum(-1, keepdim=True))
        result[part] = (result[part] * decay).add_(_multiply(weights, values, plan, "product"))
    return result.div_(total)


def _cap(scores: Tensor, softcap: float) -> None:
    """softcap * tanh(scores / softcap), in place. By `exp`, whose bits do not depend on an element's place."""
    scores.mul_(2.0 / softcap).exp_().add_(1.0).reciprocal_().mul_(-2.0 * softcap).add_(softcap)


def _read_tile(
    kv_cache: Tensor, layer: int, plan: AttentionPlan, visit: _Visit, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """K and V of one KV tile as float32 [num_seqs, num_kv_heads, kv_tile, D]; zero behind the context."""
    block_size, head_dim = kv_cache.shape[4:]
    num_seqs = visit.seqs.stop
    rows = torch.index_select(kv_cache.view(torch.int32).view(-1, _row_words(kv_cache)), 0, visit.block_rows + layer)
    words = rows.view(num_seqs, num_kv_heads, -1, 2, block_size, _row_words(kv_cache) // (2 * block_size))
    if visit.keep is not None:
        words &= visit.keep
    both = words.view(kv_cache.dtype)  # [S, KVH, blocks, 2, block_size, D]
    keys = plan.buffer("keys", (num_seqs, num_kv_heads, plan.kv_tile, head_dim))
    values = plan.buffer("values", keys.shape)
    keys.view(both[:, :, :, 0].shape).copy_(both[:, :, :, 0])
    values.view(both[:, :, :, 1].shape).copy_(both[:, :, :, 1])
    return keys, values


def _row_words(kv_cache: Tensor) -> int:
    """int32 words in K and V of one (block, head, layer)."""
    return 2 * kv_cache.shape[4] * kv_cache.shape[5] * kv_cache.element_size() // 4


def _multiply(left: Tensor, right: Tensor, plan: AttentionPlan, use: str) -> Tensor:
    """left [S, KVH, tiles, rows, X] times right [S, KVH, X, Y], shared by the tiles -> [S, KVH, tiles, rows, Y].

    The result is `plan`'s buffer of that use.
    """
    num_seqs, num_kv_heads, num_tiles, rows, _ = left.shape
    inner, columns = right.shape[-2:]
    product = plan.buffer(use, (num_seqs, num_kv_heads, num_tiles, rows, columns))
    if num_tiles == 1:
        torch.bmm(left.flatten(0, 2), right.flatten(0, 1), out=product.flatten(0, 2))
        return product
    for seq in range(num_seqs):
        for head in range(num_kv_heads):
            shared = right[seq, head].expand(num_tiles, inner, columns)  # no copy: the batch stride is 0
            torch.bmm(left[seq, head], shared, out=product[seq, head])
    return product
