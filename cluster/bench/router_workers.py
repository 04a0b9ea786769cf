"""Workers for `tandem bench router`: accounts with snapshots and nobody behind them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

from tandem.router.accounts import WorkerAccount
from tandem.router.mailbox import Mailbox
from tandem.router.workers import WorkerLink, WorkerSet
from tandem.workers.protocol import PROTOCOL_VERSION, Message
from tandem.workers.types import BlockCounts, ModelIdentity, Role, WorkerAddress, WorkerSnapshot, WorkerSpeeds

NUM_POOL_BLOCKS = 20_000
IDENTITY = ModelIdentity(
    protocol_version=PROTOCOL_VERSION,
    model="bench",
    revision="0",
    dtype="bfloat16",
    numerics="any",
    layout_version=1,
    block_size=32,
    block_bytes=4 << 20,
    max_model_len=1 << 20,
)


class StandingLink:
    """As much of a `WorkerLink` as a decision touches."""

    def __init__(self, address: WorkerAddress, workers: StandingWorkers) -> None:
        self.address = address
        self.worker_id = address.worker_id
        self.account = WorkerAccount(address, workers.fleet, workers.on_change)

    def open(self, request_id: str) -> Mailbox:
        return Mailbox()

    def close(self, request_id: str) -> None:
        """Nothing was kept."""

    def try_send(self, message: Message) -> None:
        """Nobody listens."""


class StandingWorkers(WorkerSet):
    """Half of them prefill, half decode; a single one is aggregated. They stay as they are but for their snapshots."""

    def __init__(self, num_workers: int, source: random.Random) -> None:
        super().__init__(key=b"", peer="bench")
        self._random = source
        self._next = 0
        roles: list[Role] = ["aggregated"] if num_workers == 1 else ["prefill", "decode"]
        addresses = [
            WorkerAddress(
                worker_id=f"worker-{number:04}", epoch=1, role=roles[number % len(roles)], host="127.0.0.1", port=1
            )
            for number in range(num_workers)
        ]
        self._standing = {address.worker_id: StandingLink(address, self) for address in addresses}
        self._list = list(self._standing.values())
        self._holders = [(link.worker_id, link.address.epoch) for link in self._list]
        for link in self._list:
            self._hear(link)
        prefill = [address.worker_id for address in addresses if address.role == "prefill"]
        for link in self._list:
            if link.address.role == "decode":
                link.account.take_pairs(frozenset(), dict.fromkeys(prefill, 10e9))

    def ready(self) -> Sequence[WorkerLink]:
        return cast(Sequence[WorkerLink], self._list)

    def holders(self) -> Sequence[tuple[str, int]]:
        return self._holders

    def get(self, worker_id: str) -> WorkerLink | None:
        return cast(WorkerLink | None, self._standing.get(worker_id))

    def identity(self) -> ModelIdentity:
        return IDENTITY

    def hear_some(self, rate: float) -> None:
        """As many snapshots as come, at one per worker and second, between two of `rate` requests per second."""
        num_due = len(self._list) / rate
        for _ in range(int(num_due) + (self._random.random() < num_due % 1)):
            self._hear(self._list[self._next % len(self._list)])
            self._next += 1

    def _hear(self, link: StandingLink) -> None:
        used = self._random.randrange(NUM_POOL_BLOCKS // 2)
        speed = self._random.uniform(0.9, 1.1)
        link.account.take_snapshot(
            WorkerSnapshot(
                worker_id=link.worker_id,
                epoch=link.address.epoch,
                role=link.address.role,
                pid=1,
                blocks=BlockCounts(
                    total=NUM_POOL_BLOCKS, free=0, cached=NUM_POOL_BLOCKS - used, used=used, incoming=0, quarantined=0
                ),
                num_running=self._random.randrange(32),
                num_waiting=0,
                num_waiting_tokens=self._random.randrange(8) * 512,
                max_model_len=IDENTITY.max_model_len,
                max_num_batched_tokens=8192,
                max_num_seqs=256,
                speeds=WorkerSpeeds(
                    prefill_token_s=3e-5 * speed,
                    prefill_attended_s=1e-10 * speed,
                    decode_step_s=0.01 * speed,
                    decode_sequence_s=0.0002 * speed,
                ),
            )
        )
