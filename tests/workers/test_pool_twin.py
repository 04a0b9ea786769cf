"""Pool, prefix cache and retention against a twin that is too simple to be wrong, over 100,000 random operations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tandem.workers.block_pool import BlockPool
from tandem.workers.prefix_cache import PrefixCache
from tandem.workers.types import Retention

SIZE = 3
Block = tuple[int, ...]
Path = tuple[Block, ...]
"""Content of a block and all before it. The first entry is the root (a tenant), the others have SIZE token ids."""


def key(path: Path) -> bytes:
    return b"|".join(map(bytes, path))


@dataclass
class Holder:
    """What a sequence is to the pool: `blocks`, of which the first `num_named` have names; `pinned` is being copied."""

    path: Path
    blocks: list[int]
    num_named: int
    retention: Retention
    pinned: list[int] = field(default_factory=list)
    is_incoming: bool = False


@dataclass
class Wish:
    """One request's retention, as long as it is in force; then it stands for the default."""

    priority: int
    duration_s: float | None


@dataclass
class Content:
    block: int
    wishes: list[Wish]
    released: int = 0
    idle_since: float = 0.0

    @property
    def priority(self) -> int:
        return max(wish.priority for wish in self.wishes)


@dataclass
class Twin:
    """Everything by scanning."""

    num_blocks: int
    holders: list[Holder] = field(default_factory=list)
    named: dict[Path, Content] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)
    num_releases: int = 0
    now: float = 0.0

    def owned(self) -> list[int]:
        return [block for holder in self.holders for block in [*holder.blocks, *holder.pinned]]

    def incoming(self) -> set[int]:
        return {block for h in self.holders if h.is_incoming for block in h.blocks[h.num_named :]}

    def cached(self) -> set[int]:
        owned = set(self.owned())
        return {content.block for content in self.named.values() if content.block not in owned}

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - set(self.owned()) - self.cached() - self.quarantined

    def match(self, path: Path) -> list[int]:
        blocks: list[int] = []
        for end in range(2, len(path) + 1):
            if path[:end] not in self.named:
                break
            blocks.append(self.named[path[:end]].block)
        return blocks

    def children(self, parent: Path) -> dict[int, Block]:
        return {content.block: path[-1] for path, content in self.named.items() if path[:-1] == parent}

    def next_victim(self) -> Path:
        cached = self.cached()
        leaves = [path for path, content in self.named.items() if content.block in cached and not self.children(path)]

        def order(path: Path) -> tuple[int, int, int]:
            content = self.named[path]
            return content.priority, content.released, content.block

        return min(leaves, key=order)

    def release(self, blocks: list[int]) -> None:
        """One release of the pool: these have one owner less, and are used now."""
        self.num_releases += 1
        for content in self.named.values():
            if content.block in blocks:
                content.released, content.idle_since = self.num_releases, self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        cached = self.cached()
        for content in self.named.values():
            for wish in content.wishes:
                is_over = wish.duration_s is not None and self.now >= content.idle_since + wish.duration_s
                if content.block in cached and is_over:
                    wish.priority, wish.duration_s = 35, None


class Machine:
    """Performs each operation on the pool and on the twin, and compares them."""

    def __init__(self, rng: random.Random, num_blocks: int) -> None:
        self.rng = rng
        self.events: list[tuple[str, bytes]] = []
        self.evicted: list[tuple[bytes, bytes | None, Block, int, int]] = []
        self.twin = Twin(num_blocks)
        self.cache = PrefixCache(
            SIZE,
            on_event=lambda kind, key: self.events.append((kind, key)),
            on_evict=lambda *block: self.evicted.append(block),
            clock=lambda: self.twin.now,
        )
        self.pool = BlockPool(num_blocks, self.cache)
        self.generations = [0] * num_blocks

    def take(self, num: int) -> list[int]:
        """Each block handed out is free, or the one that the twin would evict, which is told first."""
        self.events.clear()
        self.evicted.clear()
        blocks = self.pool.allocate(num)
        taken = Holder((), [], 0, Retention())
        self.twin.holders.append(taken)
        for block in blocks:
            self.generations[block] += 1
            if not self.twin.free():
                path = self.twin.next_victim()
                victim = self.twin.named.pop(path)
                parent = key(path[:-1]) if len(path) > 2 else None
                assert self.events.pop(0) == ("removed", key(path))
                assert self.evicted.pop(0) == (key(path), parent, path[-1], victim.block, victim.priority)
            assert block in self.twin.free()
            taken.blocks.append(block)
        self.twin.holders.remove(taken)
        assert not self.events
        assert not self.evicted
        return blocks

    def some_block(self) -> Block:
        return tuple(self.rng.choices(range(2), k=SIZE))

    def some_retention(self) -> Retention:
        if self.rng.random() < 0.4:
            return Retention()
        duration = self.rng.choice([None, 1.0, 3.0, 10.0])
        return Retention(priority=self.rng.choice([0, 20, 35, 50, 80]), duration_s=duration)

    def start(self) -> None:
        """A newcomer: whatever is cached of its content, part of one more block, and new blocks for the rest."""
        root = (self.rng.randrange(2),)
        path = (root, *(self.some_block() for _ in range(self.rng.randrange(1, 6))))
        keys = [key(path[:end]) for end in range(2, len(path) + 1)]
        matched = self.cache.match(keys, [token for block in path[1:] for token in block])
        assert matched == self.twin.match(path)
        num_matched = len(matched)
        pinned = self.pin(path, matched) if num_matched < len(path) - 1 else []
        num_idle = self.pool.count_idle([*matched, *pinned])
        assert num_idle == len(self.twin.cached() & {*matched, *pinned})
        num_new = len(path) - 1 - num_matched
        if num_new > self.pool.num_available - num_idle:
            return
        self.pool.share(matched)
        self.pool.share(pinned)
        holder = Holder(path, list(matched), num_matched, self.some_retention(), pinned)
        self.twin.holders.append(holder)
        holder.blocks += self.take(num_new)
        self.cache.retain(matched, holder.retention)
        for content in self.twin.named.values():
            if content.block in matched:
                content.wishes.append(Wish(holder.retention.priority, holder.retention.duration_s))

    def pin(self, path: Path, matched: list[int]) -> list[int]:
        """The child of the last matched block that begins with most of what follows."""
        wanted = path[len(matched) + 1][: self.rng.randrange(1, SIZE + 1)]
        children = self.twin.children(path[: len(matched) + 1])
        lengths = {
            block: next((i for i, (a, b) in enumerate(zip(content, wanted)) if a != b), len(wanted))
            for block, content in children.items()
        }
        found = self.cache.match_inside(matched[-1] if matched else None, bytes(path[0]), wanted)
        if found is None:
            assert max(lengths.values(), default=0) == 0
            return []
        block, length = found
        assert lengths[block] == length == max(lengths.values())
        return [block]

    def copied(self) -> None:
        """The step that copied is over."""
        holder = self.pick(lambda h: bool(h.pinned))
        if holder is not None:
            self.pool.release(holder.pinned)
            self.twin.release(holder.pinned)
            holder.pinned = []

    def name(self) -> None:
        """A block is complete. If its content is known already, own the known block instead."""
        holder = self.pick(lambda h: h.num_named < len(h.blocks) and not h.is_incoming)
        if holder is None:
            return
        index = holder.num_named
        path, mine, retention = holder.path[: index + 2], holder.blocks[index], holder.retention
        is_known = path in self.twin.named
        self.events.clear()
        kept = self.cache.add(
            key(path),
            holder.blocks[index - 1] if index else None,
            path[-1],
            mine,
            root=bytes(path[0]),
            retention=retention,
        )
        assert kept is not None
        assert self.events == ([] if is_known else [("stored", key(path))])
        content = self.twin.named.setdefault(path, Content(mine, []))
        assert kept == content.block
        if is_known:
            self.pool.share([kept])
            self.pool.release([mine])
            self.cache.retain([kept], retention)
            self.twin.release([mine])
        content.wishes.append(Wish(retention.priority, retention.duration_s))
        holder.blocks[index] = kept
        holder.num_named += 1

    def end(self) -> None:
        holder = self.pick(lambda _: True)
        if holder is not None:
            self.pool.release([*holder.pinned, *holder.blocks])
            self.twin.holders.remove(holder)
            self.twin.release([*holder.pinned, *holder.blocks])

    def grow(self) -> None:
        holder = self.pick(lambda h: not h.is_incoming)
        if holder is not None and self.pool.num_available:
            holder.blocks += self.take(1)
            holder.path += (self.some_block(),)

    def expect(self) -> None:
        holder = self.pick(lambda h: not h.is_incoming)
        if holder is not None:
            self.pool.expect(holder.blocks[holder.num_named :])
            holder.is_incoming = True

    def arrive(self) -> None:
        """All that is awaited, or its beginning."""
        holder = self.pick(lambda h: h.is_incoming)
        if holder is None:
            return
        awaited = holder.blocks[holder.num_named :]
        if len(awaited) > 1 and self.rng.random() < 0.5:
            self.pool.arrived(awaited[:1])
            holder.is_incoming = False
            self.name_one(holder)
            holder.is_incoming = True
        else:
            self.pool.arrived(awaited)
            holder.is_incoming = False

    def name_one(self, holder: Holder) -> None:
        pick, self.pick = self.pick, lambda _: holder  # type: ignore[method-assign]
        self.name()
        self.pick = pick  # type: ignore[method-assign]

    def quarantine(self) -> None:
        holder = self.pick(lambda h: h.is_incoming)
        if holder is not None:
            late = [block for block in holder.blocks[holder.num_named :] if self.rng.random() < 0.5]
            self.pool.quarantine(late)
            holder.blocks = [block for block in holder.blocks if block not in late]
            self.twin.quarantined |= set(late)

    def end_quarantine(self) -> None:
        done = [block for block in sorted(self.twin.quarantined) if self.rng.random() < 0.5]
        self.pool.end_quarantine(done)
        self.twin.quarantined -= set(done)

    def pass_time(self) -> None:
        self.twin.pass_time(self.rng.choice([0.5, 1.0, 2.0, 7.0]))

    def pick(self, is_fit: Callable[[Holder], bool]) -> Holder | None:
        fit = [holder for holder in self.twin.holders if is_fit(holder)]
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
        assert set(self.cache.keys()) == set(map(key, twin.named))


@pytest.mark.parametrize("seed", range(10))
def test_pool_equals_its_twin(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(rng, num_blocks=rng.choice([1, 5, 12, 24]))
    operations = [machine.start] * 4 + [machine.name] * 7 + [machine.end] * 3 + [machine.copied] * 2
    operations += [machine.grow, machine.expect, machine.arrive, machine.quarantine, machine.end_quarantine]
    operations += [machine.pass_time]
    for number in range(10_000):
        rng.choice(operations)()
        if number % 4 == 0:
            machine.compare()
    machine.compare()
