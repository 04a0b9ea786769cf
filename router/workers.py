"""The live set: one connection per worker, its heartbeat, its latest snapshot, and the mailboxes of its requests.

The supervisor says who exists (`add`, `remove`); whether they are alive is found out here, by a ping every second and
by the connection itself. A worker that is listed and does not answer is tried again until it is removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.router.accounts import FleetSpeeds, WorkerAccount
from tandem.router.mailbox import Mailbox
from tandem.router.roster import Roster
from tandem.workers import protocol
from tandem.workers.connection import Connection, connect
from tandem.workers.errors import ProtocolError, WorkerUnavailable
from tandem.workers.identity import difference
from tandem.workers.protocol import Embedded, Failed, Message, NeedPrefill, Pair, Paired, Ping, Pong, Started, Tokens
from tandem.workers.types import ModelIdentity, TokenChunk, WorkerAddress, WorkerSnapshot

logger = logging.getLogger(__name__)

State = Literal["connecting", "ready", "refused", "lost"]
"""refused: alive, and given nothing to do, because it computes something else than those that are ready."""
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
MAX_ACQUAINTED = 64
"""Other workers that each one is connected to from the start. A link costs a heartbeat a second."""
TELL_AFTER_RETRIES = 10
"""In a row, of a worker that was never reached: some seconds."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The last thing in the mailbox of a request whose worker is gone."""

    worker_id: str


Event = Started | TokenChunk | Failed | NeedPrefill | Embedded | WorkerLost


class WorkerLink:
    """One incarnation of one worker, from the moment it is listed until it is removed."""

    def __init__(self, address: WorkerAddress, live_set: WorkerSet) -> None:
        self.address = address
        self.state: State = "connecting"
        self.snapshot: WorkerSnapshot | None = None
        self.identity: ModelIdentity | None = None
        self.refusal: str | None = None
        """Why it is refused."""
        self.account = WorkerAccount(address, live_set.fleet, live_set.on_change)
        self.pairs: dict[str, Paired] = {}
        """What a decode worker said of its pairing with each prefill worker, by that worker's id."""
        self._live_set = live_set
        self._connection: Connection | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._num_silent_beats = 0
        self._task = asyncio.create_task(self._run(), name=f"worker {address.worker_id}")

    @property
    def worker_id(self) -> str:
        return self.address.worker_id

    @property
    def can_decode(self) -> bool:
        return self.address.role != "prefill"

    def set_pair(self, prefill_worker: str, paired: Paired | None) -> None:
        """What is known of taking KV from this prefill worker; None: nothing any more."""
        if paired is None:
            self.pairs.pop(prefill_worker, None)
        else:
            self.pairs[prefill_worker] = paired
        self._settle_pairs()

    def _settle_pairs(self) -> None:
        self.account.take_pairs(
            unpaired=frozenset(name for name, paired in self.pairs.items() if paired.error is not None),
            bytes_per_s={
                name: paired.gigabytes_per_s * 1e9 for name, paired in self.pairs.items() if paired.gigabytes_per_s
            },
        )

    def open(self, request_id: str) -> Mailbox:
        """A mailbox for what the worker says of this request. Raises `WorkerUnavailable` if the worker is not ready."""
        if self.state != "ready":
            raise WorkerUnavailable(f"worker {self.worker_id} is {self.state}")
        mailbox = self._mailboxes[request_id] = Mailbox()
        return mailbox

    def close(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)

    def send(self, message: Message) -> None:
        """Raises `WorkerUnavailable` if the worker is gone."""
        if self._connection is None:
            raise WorkerUnavailable(f"worker {self.worker_id} is {self.state}")
        self._connection.send(message)

    def try_send(self, message: Message) -> None:
        """Send where it does not matter whether the worker is still there."""
        try:
            self.send(message)
        except WorkerUnavailable:
            logger.debug("worker %s is gone: no %s sent", self.worker_id, type(message).__name__)

    async def stop(self) -> None:
        """Drop the connection and tell the requests. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # The life of the connection

    async def _run(self) -> None:
        retry_s, num_retries = FIRST_RETRY_S, 0
        while True:
            try:
                self._connection = await connect(self.address, key=self._live_set.key, peer=self._live_set.peer)
                retry_s, num_retries = FIRST_RETRY_S, 0
                await self._converse(self._connection)
            except WorkerUnavailable as error:
                if self.state == "ready":
                    logger.warning("worker %s is lost: %s", self.worker_id, error)
                elif num_retries == TELL_AFTER_RETRIES:
                    logger.warning("worker %s cannot be reached: %s", self.worker_id, error)
            except ProtocolError as error:
                logger.error("worker %s broke the protocol: %s", self.worker_id, error)
                retry_s = LAST_RETRY_S
            except Exception:
                # a bug of ours must not cost the worker: its requests move on, and it is tried again
                logger.exception("the connection to worker %s met a bug", self.worker_id)
                retry_s = LAST_RETRY_S
            finally:
                self._lose()
            await asyncio.sleep(retry_s)
            retry_s, num_retries = min(2 * retry_s, LAST_RETRY_S), num_retries + 1

    async def _converse(self, connection: Connection) -> None:
        """Read until the connection breaks, or the worker has been silent for too long."""
        self.identity = connection.identity
        heartbeat = asyncio.create_task(self._beat(connection), name=f"heartbeat {self.worker_id}")
        try:
            while True:
                message = await connection.receive()
                self._num_silent_beats = 0
                self._deliver(message)
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)

    async def _beat(self, connection: Connection) -> None:
        self._num_silent_beats = 0
        while connection.is_open:
            if self._num_silent_beats >= self._live_set.max_missed_heartbeats:
                logger.warning("worker %s has been silent for %d heartbeats", self.worker_id, self._num_silent_beats)
                connection.abort()
                return
            try:
                connection.send(Ping())
            except WorkerUnavailable:
                return  # the reader finds out, too
            await asyncio.sleep(self._live_set.heartbeat_s)
            self._num_silent_beats += 1

    def _deliver(self, message: protocol.AnyMessage) -> None:
        match message:
            case Tokens(chunks=chunks):
                mailboxes = self._mailboxes
                for chunk in chunks:
                    mailbox = mailboxes.get(chunk.request_id)
                    if mailbox is not None:  # as in `_put`, which is too far away for every token
                        mailbox.put(chunk)
            case Pong(snapshot=snapshot):
                self._take_snapshot(snapshot)
            case Started() | Failed() | NeedPrefill() | Embedded():
                self._put(message.request_id, message)
            case Paired():
                self.set_pair(message.prefill_worker, message)
                self._live_set.on_paired(self, message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for gateways")

    def _put(self, request_id: str, event: Event) -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:  # otherwise it was cancelled, and this was already on its way
            mailbox.put(event)

    def _take_snapshot(self, snapshot: WorkerSnapshot) -> None:
        self.snapshot = snapshot
        self.account.take_snapshot(snapshot)
        self._live_set.on_snapshot(snapshot)
        if self.state == "ready":
            return
        if (reason := self._live_set.reason_to_refuse(self)) is not None:
            self.refuse(reason)
        else:
            self.state, self.refusal = "ready", None
            self._live_set.on_ready(self)

    def refuse(self, reason: str) -> None:
        """Give it nothing to do. Its next snapshots ask again: the others may be gone by then."""
        if self.state == "refused":
            return
        logger.error("worker %s gets no requests, since it would write other tokens: %s", self.worker_id, reason)
        self.state, self.refusal = "refused", reason
        self._live_set.on_lost(self)  # for everybody else it is

    def _lose(self) -> None:
        """Everything that ends with the connection. Requests hear of it last, after all that the worker has said."""
        was_ready, self.state, self.refusal = self.state == "ready", "lost", None
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self.pairs.clear()
        self._settle_pairs()
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.put(WorkerLost(self.worker_id))
        if was_ready:
            self._live_set.on_lost(self)


class WorkerSet:
    """All workers that the supervisor lists. `on_snapshot` is called with every snapshot that arrives."""

    def __init__(
        self,
        *,
        key: bytes,
        peer: str,
        heartbeat_s: float = 1.0,
        max_missed_heartbeats: int = 3,
        on_snapshot: Callable[[WorkerSnapshot], None] = lambda snapshot: None,
    ) -> None:
        self.key = key
        self.peer = peer
        self.heartbeat_s = heartbeat_s
        self.max_missed_heartbeats = max_missed_heartbeats
        self.on_snapshot = on_snapshot
        self.fleet = FleetSpeeds()
        self._links: dict[str, WorkerLink] = {}
        self._ready: list[WorkerLink] | None = None
        """Sorted once, not for every request; None when somebody came or went."""
        self._holders: list[tuple[str, int]] = []
        self._roster: Roster | None = None
        self._changed_accounts: list[WorkerAccount] = []
        """Those that have changed since the roster was last up to date."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def add(self, address: WorkerAddress) -> None:
        """List a worker. A higher epoch replaces the incarnation before; a lower or equal one is old news."""
        known = self._links.get(address.worker_id)
        if known is not None:
            if known.address.epoch >= address.epoch:
                return
            self._drop(known)
            self._forget_ready()
        self._links[address.worker_id] = WorkerLink(address, self)

    def remove(self, worker_id: str, epoch: int) -> None:
        """Forget this incarnation. Its requests continue elsewhere."""
        link = self._links.get(worker_id)
        if link is not None and link.address.epoch == epoch:
            del self._links[worker_id]
            self._forget_ready()
            self._drop(link)

    async def close(self) -> None:
        """Forget all; their requests are told."""
        for link in self._links.values():
            self._drop(link)
        self._links.clear()
        self._forget_ready()
        await asyncio.gather(*self._leaving)

    def links(self) -> list[WorkerLink]:
        """All listed workers, alive or not, by id."""
        return [self._links[worker_id] for worker_id in sorted(self._links)]

    def ready(self) -> Sequence[WorkerLink]:
        """By id."""
        if self._ready is None:
            self._ready = [link for link in self.links() if link.state == "ready"]
            self._holders = [(link.worker_id, link.address.epoch) for link in self._ready]
        return self._ready

    def holders(self) -> Sequence[tuple[str, int]]:
        """(worker id, epoch) of all that are ready, as the prefix index names them. The same object while they are the
        same."""
        self.ready()
        return self._holders

    def roster(self) -> Roster:
        """All that are ready, for the policy. Good until something changes."""
        if self._roster is None:
            self._roster = Roster(link.account.view() for link in self.ready())
        else:
            for account in self._changed_accounts:
                link = self.get(account.address.worker_id)
                if link is not None and link.account is account:  # otherwise of somebody who is gone
                    self._roster.put(account.view())
        self._changed_accounts.clear()
        return self._roster

    def _forget_ready(self) -> None:
        self._ready = self._roster = None

    def get(self, worker_id: str) -> WorkerLink | None:
        """This worker if it is ready."""
        link = self._links.get(worker_id)
        return link if link is not None and link.state == "ready" else None

    def identity(self) -> ModelIdentity | None:
        """The model, as the live workers describe it."""
        link = self._spokesman()
        return None if link is None else link.identity

    def _spokesman(self) -> WorkerLink | None:
        """One of those that are ready; of those that decode, if there is one."""
        ready = self.ready()
        return next((link for link in ready if link.can_decode), ready[0] if ready else None)

    async def wait_changed(self) -> None:
        """Until some worker becomes ready, is lost, or is paired."""
        await self._changed.wait()

    # What links report

    def on_change(self, account: WorkerAccount) -> None:
        self._changed_accounts.append(account)

    def reason_to_refuse(self, link: WorkerLink) -> str | None:
        """None: it computes what those that are ready compute, or none of them decodes, which it does."""
        one = self._spokesman()
        return None if one is None or (link.can_decode and not one.can_decode) else _difference(one, link)

    def on_ready(self, link: WorkerLink) -> None:
        self._forget_ready()
        for other in self.ready():  # all that are ready compute the same: who decodes now decides
            if (reason := _difference(link, other)) is not None:
                other.refuse(reason)
        logger.info("worker %s epoch %d is ready", link.worker_id, link.address.epoch)
        self._acquaint(link)
        if link.address.role == "prefill":
            for decode in self.ready():
                if decode.address.role == "decode":
                    decode.set_pair(link.worker_id, None)  # what is known is about an earlier incarnation
                    decode.try_send(Pair(prefill=(link.address,)))
        elif link.address.role == "decode":
            prefill = tuple(other.address for other in self.ready() if other.address.role == "prefill")
            if prefill:
                link.try_send(Pair(prefill=prefill))
        self._announce()

    def _acquaint(self, link: WorkerLink) -> None:
        """Whoever reads prompts may be told to fetch their beginnings from any other worker, but not from a stranger
        within the time that a short one is worth. Large houses get to know each other as the need arises."""
        others = [other for other in self.ready() if other is not link]
        if 0 < len(others) <= MAX_ACQUAINTED:
            link.try_send(Pair(sources=tuple(other.address for other in others)))
            for other in others:
                other.try_send(Pair(sources=(link.address,)))

    def on_lost(self, link: WorkerLink) -> None:
        self._forget_ready()
        self.fleet.forget(link.worker_id)
        for decode in self.ready():
            decode.set_pair(link.worker_id, None)
        self._announce()

    def on_paired(self, decode: WorkerLink, paired: Paired) -> None:
        if paired.error is not None:
            logger.error("%s cannot take KV from %s: %s", decode.worker_id, paired.prefill_worker, paired.error)
        else:
            logger.info(
                "%s takes KV from %s over %s at %.2f GB/s",
                decode.worker_id,
                paired.prefill_worker,
                paired.transport,
                paired.gigabytes_per_s or 0.0,
            )
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _drop(self, link: WorkerLink) -> None:
        task = asyncio.create_task(link.stop())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _difference(one: WorkerLink, other: WorkerLink) -> str | None:
    assert one.identity is not None, "it has introduced itself"
    assert other.identity is not None, "it has introduced itself"
    return difference(one.identity, other.identity)
