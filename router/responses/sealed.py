"""What is kept of responses outside our processes: encrypted, and bound to its name and owner.

Whoever reads Redis learns how long a conversation is, and nothing of what was said; what somebody else wrote there, or
moved to another name, cannot be opened and counts as absent.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from pydantic import TypeAdapter, ValidationError

from tandem.router.openai.messages import Message

NONCE_BYTES = 12
Kind = Literal["stored", "running", "deleted", "cancel"]
"""`running`: somebody writes it. `cancel`: somebody wants it ended."""

_messages = TypeAdapter(list[Message])


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One response as it is shown, the conversation up to and including it, and when it is to be forgotten (Unix time
    in seconds)."""

    kind: Kind
    response: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    expires: float = 0.0

    def conversation(self) -> Sequence[Message]:
        """Raises `ValueError`."""
        return _messages.validate_python(self.messages)


def record(kind: Kind, response: Any, messages: Sequence[Message], expires: float) -> Record:
    return Record(kind, dict(response), [message.model_dump(exclude_none=True) for message in messages], expires)


class Sealer:
    """`cluster_key`: who does not hold it cannot read, write or find anything."""

    def __init__(self, cluster_key: bytes) -> None:
        self._key = cluster_key[:64]
        self._cipher = ChaCha20Poly1305(self._digest(b"seal", b"", 32))

    def name(self, response_id: str, caller: str) -> str:
        """Under which a caller's response is kept: another caller's is another name."""
        # the length first: no pair of the two may be read as another pair
        body = len(caller).to_bytes(4, "big") + caller.encode() + response_id.encode()
        return self._digest(b"name", body, 16).hex()

    def seal(self, name: str, content: Record) -> bytes:
        """Raises `ValueError` for text that is not Unicode, and `TypeError`."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, msgspec.msgpack.encode(content), name.encode())

    def open(self, name: str, value: Any) -> Record | None:
        """None: there is nothing, or nothing of ours."""
        if not isinstance(value, bytes):
            return None
        try:
            content = self._cipher.decrypt(value[:NONCE_BYTES], value[NONCE_BYTES:], name.encode())
            return msgspec.msgpack.decode(content, type=Record)
        except (InvalidTag, ValueError, msgspec.MsgspecError, ValidationError):
            return None

    def _digest(self, purpose: bytes, body: bytes, size: int) -> bytes:
        return blake2b(body, key=self._key, digest_size=size, person=b"tandem-resp-" + purpose).digest()
