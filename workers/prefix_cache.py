"""Which blocks hold which content: a tree of full blocks by key, and the order in which idle ones are given up.

The pool counts owners and asks here; nothing else touches the tree's idle marks. A node is *idle* when no sequence owns
its block. A sequence owns all blocks of its path, so below an idle node everything is idle; therefore every idle block
can be evicted, leaves first, and "free + cached" is exactly what can be allocated.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tandem.workers.retention import Grants, grant, joined, next_end, priority, used
from tandem.workers.types import Retention

CacheEvent = Callable[[Literal["stored", "removed"], bytes], None]
DEFAULT_RETENTION = Retention()
MAX_ENDS_PER_EVICTION = 64
"""50,000 grants that end in the same moment would otherwise stop the worker for 0.2 s."""


class OnEvict(Protocol):
    """Told of a block that was just forgotten. Its content stays in place until this returns."""

    def __call__(
        self, key: bytes, parent_key: bytes | None, token_ids: tuple[int, ...], block_id: int, priority: int
    ) -> None: ...


@dataclass(slots=True, eq=False)
class Node:
    """One full block with known content."""

    key: bytes
    root: bytes
    """What the keys of its path start from."""
    parent: Node | None
    siblings: list[Node]
    """All children of its parent, or first blocks of its root, itself included, in order of their token ids."""
    token_ids: tuple[int, ...]
    block_id: int
    grants: Grants
    children: list[Node] = field(default_factory=list)
    last_used: int | None = None
    """The tick of its last release while it is idle, else None."""
    idle_since: float = 0.0
    queued_priority: int = 0
    """The one with which it waits for eviction, while it is an idle leaf."""


def _token_ids(node: Node) -> tuple[int, ...]:
    return node.token_ids


class PrefixCache:
    """Costs per block: dict look-ups, O(log n) for eviction, and a bisection among its siblings."""

    def __init__(
        self,
        block_size: int,
        on_event: CacheEvent | None = None,
        on_evict: OnEvict | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`clock` gives seconds, never less than before; without one, no retention runs out."""
        self.block_size = block_size
        self.on_evict = on_evict
        self._on_event = on_event
        self._clock = clock
        self._by_key: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._first_blocks: dict[bytes, list[Node]] = {}
        """By root: those without a parent, in order of their token ids."""
        self._leaves: list[tuple[int, int, int]] = []
        """Heap of (priority, last_used, block id). An entry is stale if its node was used since, or queued with another
        priority; checked on pop. (An idle node gets no children: whoever adds one owns the parent.)"""
        self._ends: list[tuple[float, int, int]] = []
        """Heap of (when a grant of an idle leaf runs out, last_used, block id); stale in the same way."""
        self._tick = 0
        self.num_idle = 0

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def __len__(self) -> int:
        return len(self._by_key)

    # Content

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """Blocks that hold the longest prefix of `keys`, in order. The token ids are compared too, so that not even
        colliding keys could give anybody the KV of other tokens. Changes nothing."""
        size = self.block_size
        found: list[int] = []
        parent: Node | None = None
        for index, key in enumerate(keys):
            node = self._by_key.get(key)
            if node is None or node.parent is not parent:
                break
            if node.token_ids != tuple(token_ids[index * size : (index + 1) * size]):
                break
            found.append(node.block_id)
            parent = node
        return found

    def match_inside(self, parent_block: int | None, root: bytes, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """The block behind `parent_block` (None: a first block of `root`) that begins with most of `token_ids`, and how
        many these are; None if none begins with the first of them. Changes nothing.

        O(log n) comparisons: in the order of token ids, nobody shares more with a text than its two neighbours.
        """
        siblings = self._first_blocks.get(root, []) if parent_block is None else self._by_block[parent_block].children
        wanted = tuple(token_ids)
        place = bisect_left(siblings, wanted, key=_token_ids)
        neighbours = siblings[max(0, place - 1) : place + 1]
        num_common, block_id = max(
            ((_num_common(node.token_ids, wanted), node.block_id) for node in neighbours), default=(0, 0)
        )
        return (block_id, num_common) if num_common else None

    def add(
        self,
        key: bytes,
        parent_block: int | None,
        token_ids: Sequence[int],
        block_id: int,
        *,
        root: bytes = b"",
        retention: Retention = DEFAULT_RETENTION,
    ) -> int | None:
        """Name the content of a block that a sequence owns, behind `parent_block` (None: a first block of `root`).

        Returns the block to own from now on: `block_id`, or the one that holds this content already (which keeps its
        own retention until `retain`). Returns None, and names nothing, when the key stands for other content (a
        collision of keys).
        """
        parent = None if parent_block is None else self._by_block[parent_block]
        node = self._by_key.get(key)
        if node is not None:
            is_same = node.parent is parent and node.token_ids == tuple(token_ids)
            return node.block_id if is_same else None
        siblings = self._first_blocks.setdefault(root, []) if parent is None else parent.children
        node = Node(key, root, parent, siblings, tuple(token_ids), block_id, (grant(retention),))
        self._by_key[key] = self._by_block[block_id] = node
        insort(siblings, node, key=_token_ids)
        if self._on_event is not None:
            self._on_event("stored", key)
        return block_id

    def keys(self) -> list[bytes]:
        """Keys of everything held, parents before their children (what a worker publishes after a reconnect)."""
        return list(self._by_key)

    # Use and eviction

    def retain(self, block_ids: Sequence[int], retention: Retention) -> None:
        """Whoever owns these blocks asks that they be kept like this afterwards, too."""
        new = grant(retention)
        for block_id in block_ids:
            node = self._by_block[block_id]
            assert node.last_used is None, f"block {block_id} is idle"
            node.grants = joined(node.grants, new)

    def mark_idle(self, block_ids: Sequence[int]) -> None:
        """Nobody owns these blocks any more. All of one call count as used at the same moment."""
        self._tick += 1
        now = self._clock()
        for block_id in block_ids:
            node = self._by_block[block_id]
            assert node.last_used is None, f"block {block_id} is idle already"
            node.last_used, node.idle_since = self._tick, now
            self.num_idle += 1
            if not node.children:
                self._queue(node, now)

    def mark_busy(self, block_id: int) -> None:
        """Somebody owns this block again."""
        node = self._by_block[block_id]
        assert node.last_used is not None, f"block {block_id} is not idle"
        node.grants = used(node.grants, node.idle_since, self._clock())
        node.last_used = None
        self.num_idle -= 1

    def evict(self) -> int:
        """Forget the idle leaf of the lowest priority, of these the least recently used, and return its block. There
        must be an idle block."""
        now = self._clock()
        self._apply_ends(now)
        node = self._pop_leaf()
        self._forget(node)
        parent = node.parent
        if parent is not None and not parent.children and parent.last_used is not None:
            self._queue(parent, now)
        if self._on_event is not None:
            self._on_event("removed", node.key)
        if self.on_evict is not None:
            parent_key = None if parent is None else parent.key
            self.on_evict(node.key, parent_key, node.token_ids, node.block_id, node.queued_priority)
        return node.block_id

    def _pop_leaf(self) -> Node:
        while True:
            queued_priority, last_used, block_id = heapq.heappop(self._leaves)
            node = self._by_block.get(block_id)
            if node is not None and (node.queued_priority, node.last_used) == (queued_priority, last_used):
                return node

    def _forget(self, node: Node) -> None:
        del self._by_key[node.key], self._by_block[node.block_id]
        self.num_idle -= 1
        place = bisect_left(node.siblings, node.token_ids, key=_token_ids)
        while node.siblings[place] is not node:  # colliding keys: two children with the same tokens
            place += 1
        del node.siblings[place]
        if node.parent is None and not node.siblings:
            del self._first_blocks[node.root]

    def _queue(self, node: Node, now: float) -> None:
        """An idle leaf waits for its eviction, and for the end of its next grant."""
        assert node.last_used is not None
        node.queued_priority = priority(node.grants, node.idle_since, now)
        heapq.heappush(self._leaves, (node.queued_priority, node.last_used, node.block_id))
        end = next_end(node.grants, node.idle_since, now)
        if end is not None:
            heapq.heappush(self._ends, (end, node.last_used, node.block_id))
        if max(len(self._leaves), len(self._ends)) > 2 * len(self._by_block) + 64:
            self._drop_stale()

    def _apply_ends(self, now: float) -> None:
        """Queue those again whose grants have run out: each grant ends once, so O(log n) per release. When very many
        end at once, the rest keep their priority until the next evictions."""
        for _ in range(MAX_ENDS_PER_EVICTION):
            if not self._ends or self._ends[0][0] > now:
                break
            _, last_used, block_id = heapq.heappop(self._ends)
            node = self._by_block.get(block_id)
            if node is not None and node.last_used == last_used and not node.children:
                self._queue(node, now)

    def _drop_stale(self) -> None:
        """Rebuild the heaps: once per as many pushes as there are nodes, so O(1) per push."""
        self._leaves = [entry for entry in set(self._leaves) if self._is_queued(entry)]
        live = {(last_used, block_id) for _, last_used, block_id in self._leaves}
        self._ends = [entry for entry in set(self._ends) if entry[1:] in live]
        heapq.heapify(self._leaves)
        heapq.heapify(self._ends)

    def _is_queued(self, entry: tuple[int, int, int]) -> bool:
        node = self._by_block.get(entry[2])
        return node is not None and (node.queued_priority, node.last_used) == entry[:2]

    def check(self) -> None:
        """Raises AssertionError when the tree is not what this file promises. O(number of nodes)."""
        for block_id, node in self._by_block.items():
            assert node.block_id == block_id, f"block {block_id} is filed under another number"
            assert self._by_key.get(node.key) is node, f"block {block_id} is not found by its key"
            assert node in node.siblings, f"block {block_id} is not among its siblings"
            if node.parent is not None:
                parent_id = node.parent.block_id
                assert self._by_block.get(parent_id) is node.parent, f"block {block_id} outlived its parent {parent_id}"
                assert node.siblings is node.parent.children, f"block {block_id} has other siblings"
                assert node.last_used is not None or node.parent.last_used is None, f"busy {block_id} below an idle one"
        assert len(self._by_key) == len(self._by_block), "two keys for one block"
        families = [*self._first_blocks.values(), *(node.children for node in self._by_block.values())]
        assert sum(map(len, families)) == len(self._by_block), "a list of children holds others"
        assert all(self._first_blocks.values()), "a root without blocks"
        for family in families:
            assert family == sorted(family, key=_token_ids), "children are out of order"
        leaves, ends = set(self._leaves), {end[1:] for end in self._ends}
        for block_id, node in self._by_block.items():
            if node.last_used is not None and not node.children:
                entry = (node.queued_priority, node.last_used, block_id)
                assert entry in leaves, f"idle leaf {block_id} can never be evicted"
                is_current = node.queued_priority == priority(node.grants, node.idle_since, self._clock())
                assert is_current or entry[1:] in ends, f"idle leaf {block_id} never falls back"
        assert self.num_idle == sum(node.last_used is not None for node in self._by_block.values()), "num_idle is off"


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first elements two texts share."""
    num = 0
    for mine, yours in zip(one, other):
        if mine != yours:
            break
        num += 1
    return num
