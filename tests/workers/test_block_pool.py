"""The pool and its prefix cache against a twin that is too simple to be wrong, over random operations."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tandem.workers.block_pool import BlockPool, BlockState
from tandem.workers.prefix_cache import PrefixCache

Path = tuple[int, ...]
"""Content of a block and all before it: one letter (token id) per block."""


@dataclass
class Holder:
    """What a sequence is to the pool: `blocks`, of which the first `num_named` have names."""

    path: Path
    blocks: list[int]
    num_named: int
    is_incoming: bool = False


@dataclass
class Twin:
    """Everything by scanning. `named` maps content to [block, time of last release]."""

    num_blocks: int
    holders: list[Holder] = field(default_factory=list)
    named: dict[Path, list[int]] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)
    time: int = 0

    def owned(self) -> list[int]:
        return [block for holder in self.holders for block in holder.blocks]

    def incoming(self) -> set[int]:
        return {block for h in self.holders if h.is_incoming for block in h.blocks[h.num_named :]}

    def cached(self) -> set[int]:
        owned = set(self.owned())
        return {block for block, _ in self.named.values() if block not in owned}

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - set(self.owned()) - self.cached() - self.quarantined

    def match(self, path: Path) -> list[int]:
        blocks: list[int] = []
        for end in range(1, len(path) + 1):
            if path[:end] not in self.named:
                break
            blocks.append(self.named[path[:end]][0])
        return blocks

    def expect_taken(self, block: int) -> Path | None:
        """Check that handing out `block` is right, and forget its content. Returns the content that was evicted."""
        free = self.free()
        if free:
            assert block in free
            return None
        cached = self.cached()
        leaves = [
            path
            for path, (owner, _) in self.named.items()
            if owner in cached and not any(p[:-1] == path for p in self.named)
        ]
        victim = min(leaves, key=lambda path: self.named[path][1])
        assert self.named[victim][0] == block
        del self.named[victim]
        return victim

    def released(self, blocks: list[int]) -> None:
        self.time += 1
        for content in self.named.values():
            if content[0] in blocks:
                content[1] = self.time


class Machine:
    """Performs each operation on the pool and on the twin, and compares them."""

    def __init__(self, rng: random.Random, num_blocks: int) -> None:
        self.rng = rng
        self.events: list[tuple[str, bytes]] = []
        self.cache = PrefixCache(1, lambda kind, key: self.events.append((kind, key)))
        self.pool = BlockPool(num_blocks, self.cache)
        self.twin = Twin(num_blocks)
        self.generations = [0] * num_blocks

    def take(self, num: int) -> list[int]:
        self.events.clear()
        blocks = self.pool.allocate(num)
        removed: list[tuple[str, bytes]] = []
        for index, block in enumerate(blocks):
            self.twin.holders.append(Holder((), blocks[:index], 0))  # taken so far: neither free nor cached
            victim = self.twin.expect_taken(block)
            self.twin.holders.pop()
            removed += [("removed", bytes(victim))] if victim is not None else []
            self.generations[block] += 1
        assert self.events == removed
        return blocks

    def start(self) -> None:
        """A newcomer: whatever is cached of its content, and new blocks for the rest."""
        path = tuple(self.rng.choices(range(3), k=self.rng.randrange(1, 7)))
        matched = self.cache.match([bytes(path[:end]) for end in range(1, len(path) + 1)], path)
        assert matched == self.twin.match(path)
        num_idle = self.pool.count_idle(matched)
        assert num_idle == len(self.twin.cached() & set(matched))
        if len(path) - len(matched) > self.pool.num_available - num_idle:
            return
        self.pool.share(matched)
        holder = Holder(path, matched, len(matched))
        self.twin.holders.append(holder)
        holder.blocks = matched + self.take(len(path) - len(matched))

    def name(self) -> None:
        """A block is complete. If its content is known already, own the known block instead."""
        holder = self.pick(lambda h: h.num_named < len(h.blocks) and not h.is_incoming)
        if holder is None:
            return
        index = holder.num_named
        path, mine = holder.path[: index + 1], holder.blocks[index]
        self.events.clear()
        kept = self.cache.add(bytes(path), holder.blocks[index - 1] if index else None, path[index:], mine)
        assert self.events == ([] if path in self.twin.named else [("stored", bytes(path))])
        assert kept == self.twin.named.setdefault(path, [mine, 0])[0]
        if kept != mine:
            self.pool.share([kept])
            self.pool.release([mine])
            self.twin.time += 1
        holder.blocks[index] = kept
        holder.num_named += 1

    def end(self) -> None:
        holder = self.pick(lambda _: True)
        if holder is not None:
            self.pool.release(holder.blocks)
            self.twin.holders.remove(holder)
            self.twin.released(holder.blocks)

    def grow(self) -> None:
        holder = self.pick(lambda h: not h.is_incoming)
        if holder is not None and self.pool.num_available:
            new = self.take(1)
            holder.path += (self.rng.randrange(3),)
            holder.blocks += new

    def expect(self) -> None:
        holder = self.pick(lambda h: not h.is_incoming)
        if holder is not None:
            self.pool.expect(holder.blocks[holder.num_named :])
            holder.is_incoming = True

    def arrive(self) -> None:
        holder = self.pick(lambda h: h.is_incoming)
        if holder is not None:
            self.pool.arrived(holder.blocks[holder.num_named :])
            holder.is_incoming = False

    def quarantine(self) -> None:
        holder = self.pick(lambda h: h.is_incoming)
        if holder is not None:
            late = [block for block in holder.blocks[holder.num_named :] if self.rng.random() < 0.5]
            self.pool.quarantine(late)
            holder.blocks = [block for block in holder.blocks if block not in late]
            self.twin.quarantined |= set(late)

    def end_quarantine(self) -> None:
        done = [block for block in self.twin.quarantined if self.rng.random() < 0.5]
        self.pool.end_quarantine(done)
        self.twin.quarantined -= set(done)

    def pick(self, is_fit: object) -> Holder | None:
        fit = [holder for holder in self.twin.holders if is_fit(holder)]  # type: ignore[operator]
        return self.rng.choice(fit) if fit else None

    def compare(self) -> None:
        self.pool.check()
        counts, twin = self.pool.counts(), self.twin
        incoming, owned = twin.incoming(), twin.owned()
        assert counts.is_consistent()
        assert counts.free == len(twin.free())
        assert counts.cached == len(twin.cached()) == self.cache.num_idle
        assert counts.used == len(set(owned) - incoming)
        assert counts.incoming == len(incoming)
        assert counts.quarantined == len(twin.quarantined)
        assert self.pool.num_available == counts.free + counts.cached
        for block in range(twin.num_blocks):
            assert self.pool.num_owners(block) == owned.count(block)
            assert self.pool.generation(block) == self.generations[block]
        assert sorted(self.cache.keys()) == sorted(bytes(path) for path in twin.named)


@pytest.mark.parametrize("seed", range(8))
def test_pool_equals_its_twin(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(rng, num_blocks=rng.choice([1, 5, 12, 24]))
    operations = [machine.start] * 3 + [machine.name] * 6 + [machine.end] * 2
    operations += [machine.grow, machine.expect, machine.arrive, machine.quarantine, machine.end_quarantine]
    for _ in range(5000):
        rng.choice(operations)()
        machine.compare()


def test_shared_block_stays_until_its_last_owner_goes() -> None:
    cache = PrefixCache(1)
    pool = BlockPool(2, cache)
    [block] = pool.allocate(1)
    cache.add(b"a", None, [1], block)
    pool.share([block])
    pool.release([block])
    assert pool.state(block) is BlockState.USED
    pool.release([block])
    assert pool.state(block) is BlockState.CACHED
    assert pool.generation(block) == 1, "being shared is not new content"


def test_double_release_and_other_misuse_are_caught() -> None:
    pool = BlockPool(2, PrefixCache(1))
    [block] = pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks asked for, 1 available"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match=f"block {block} is USED with 1 owners"):
        pool.arrived([block])
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block} is FREE with 0 owners"):
        pool.release([block])
    with pytest.raises(AssertionError, match="is FREE"):
        pool.share([block])


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(3, PrefixCache(1))
    pool.allocate(1)
    pool._free.pop()
    with pytest.raises(AssertionError, match="free list"):
        pool.check()
