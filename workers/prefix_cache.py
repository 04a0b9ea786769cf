"""Which blocks hold which content: a tree of full blocks by key, and the order in which idle ones are given up.

The pool counts owners and asks here; nothing else touches the tree's idle marks. A node is *idle* when no sequence owns
its block. A sequence owns all blocks of its path, so below an idle node everything is idle; therefore every idle block
can be evicted, leaves first, and "free + cached" is exactly what can be allocated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

CacheEvent = Callable[[Literal["stored", "removed"], bytes], None]
DEFAULT_PRIORITY = 35


class OnEvict(Protocol):
    """Told of a block that was just forgotten. Its content stays in place until this returns."""

    def __call__(
        self, key: bytes, parent_key: bytes | None, token_ids: tuple[int, ...], block_id: int, priority: int
    ) -> None: ...


@dataclass(slots=True, eq=False)
class Node:
    """One full block with known content. `last_used` is the tick of its last release while it is idle, else None."""

    key: bytes
    parent: Node | None
    token_ids: tuple[int, ...]
    block_id: int
    num_children: int = 0
    last_used: int | None = None


class PrefixCache:
    """All costs are per block: dict look-ups, and O(log n) for the eviction heap."""

    def __init__(self, block_size: int, on_event: CacheEvent | None = None, on_evict: OnEvict | None = None) -> None:
        self.block_size = block_size
        self.on_evict = on_evict
        self._on_event = on_event
        self._by_key: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._idle_leaves: list[tuple[int, int]] = []
        """Heap of (last_used, block id). An entry is stale when its node was used again since; checked on pop. (An idle
        node gets no children: whoever adds one owns the parent.)"""
        self._tick = 0
        self.num_idle = 0

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def __len__(self) -> int:
        return len(self._by_key)

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

    def add(self, key: bytes, parent_block: int | None, token_ids: Sequence[int], block_id: int) -> int | None:
        """Name the content of a block that a sequence owns, behind `parent_block` (None: a first block).

        Returns the block to own from now on: `block_id`, or the one that holds this content already. Returns None,
        and names nothing, when the key stands for other content (a collision of keys).
        """
        parent = None if parent_block is None else self._by_block[parent_block]
        node = self._by_key.get(key)
        if node is not None:
            is_same = node.parent is parent and node.token_ids == tuple(token_ids)
            return node.block_id if is_same else None
        node = Node(key, parent, tuple(token_ids), block_id)
        self._by_key[key] = self._by_block[block_id] = node
        if parent is not None:
            parent.num_children += 1
        if self._on_event is not None:
            self._on_event("stored", key)
        return block_id

    def mark_idle(self, block_ids: Sequence[int]) -> None:
        """Nobody owns these blocks any more. All of one call count as used at the same moment."""
        self._tick += 1
        for block_id in block_ids:
            node = self._by_block[block_id]
            assert node.last_used is None, f"block {block_id} is idle already"
            node.last_used = self._tick
            self.num_idle += 1
            if node.num_children == 0:
                self._push(node)

    def mark_busy(self, block_id: int) -> None:
        """Somebody owns this block again."""
        node = self._by_block[block_id]
        assert node.last_used is not None, f"block {block_id} is not idle"
        node.last_used = None
        self.num_idle -= 1

    def evict(self) -> int:
        """Forget the least recently used idle leaf and return its block. There must be an idle block."""
        while True:
            last_used, block_id = heapq.heappop(self._idle_leaves)
            node = self._by_block.get(block_id)
            if node is not None and node.last_used == last_used:
                break
        del self._by_key[node.key], self._by_block[block_id]
        self.num_idle -= 1
        if node.parent is not None:
            node.parent.num_children -= 1
            if node.parent.num_children == 0 and node.parent.last_used is not None:
                self._push(node.parent)
        if self._on_event is not None:
            self._on_event("removed", node.key)
        if self.on_evict is not None:
            parent_key = None if node.parent is None else node.parent.key
            self.on_evict(node.key, parent_key, node.token_ids, block_id, DEFAULT_PRIORITY)
        return block_id

    def keys(self) -> list[bytes]:
        """Keys of everything held, parents before their children (what a worker publishes after a reconnect)."""
        return list(self._by_key)

    def check(self) -> None:
        """Raises AssertionError when the tree is not what this file promises. O(number of nodes)."""
        num_children: dict[int, int] = {}
        for block_id, node in self._by_block.items():
            assert node.block_id == block_id, f"block {block_id} is filed under another number"
            assert self._by_key.get(node.key) is node, f"block {block_id} is not found by its key"
            if node.parent is not None:
                parent_id = node.parent.block_id
                assert self._by_block.get(parent_id) is node.parent, f"block {block_id} outlived its parent {parent_id}"
                num_children[parent_id] = num_children.get(parent_id, 0) + 1
                assert node.last_used is not None or node.parent.last_used is None, f"busy {block_id} below an idle one"
        assert len(self._by_key) == len(self._by_block), "two keys for one block"
        leaves = set(self._idle_leaves)
        for block_id, node in self._by_block.items():
            assert node.num_children == num_children.get(block_id, 0), f"block {block_id} miscounts its children"
            if node.last_used is not None and node.num_children == 0:
                assert (node.last_used, block_id) in leaves, f"idle leaf {block_id} can never be evicted"
        assert self.num_idle == sum(node.last_used is not None for node in self._by_block.values()), "num_idle is off"

    def _push(self, node: Node) -> None:
        assert node.last_used is not None
        heapq.heappush(self._idle_leaves, (node.last_used, node.block_id))
        if len(self._idle_leaves) > 2 * len(self._by_block) + 64:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Rebuild the heap from the nodes: once per as many pushes as there are nodes, so O(1) per push."""
        idle = (node for node in self._by_block.values() if node.num_children == 0)
        self._idle_leaves = [(node.last_used, node.block_id) for node in idle if node.last_used is not None]
        heapq.heapify(self._idle_leaves)
