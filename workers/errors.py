"""Every error that Tandem's workers raise on purpose, as one tree.

TandemError
├── UserError                 somebody outside can mend it: one line, exit code 2 or a 4xx
│   ├── ModelError            a model folder or file that cannot be served (names the file and the reason)
│   └── RequestError          a request that can never be served (too long, id out of vocabulary)
├── TransferError             a pull that did not deliver; `reason` is the label of kv_transfer_failures_total
├── PairingError              two workers that must not exchange KV (names the field and both values)
├── ProtocolError             a peer that broke the wire contract: the connection is closed
│   └── AuthenticationError   a peer without the cluster key
├── DeviceLost                the device computes nothing any more for this process, which must end
└── WorkerUnavailable         the worker is gone or going; another one may do
"""

from __future__ import annotations

from typing import Literal

TransferFailure = Literal["digest", "generation", "lease", "timeout", "disconnect", "refused", "error"]


class TandemError(Exception):
    """Base of all errors that Tandem raises on purpose."""


class UserError(TandemError):
    """A mistake that the person who reads the message can mend."""


class ModelError(UserError):
    """A model that cannot be served: the message names the file and the reason."""


class RequestError(UserError):
    """A request that no worker of this cluster can ever serve. `param` names the field, where there is one."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class TransferError(TandemError):
    """KV that did not arrive as promised. Always recoverable: the blocks are computed again."""

    def __init__(self, message: str, *, reason: TransferFailure) -> None:
        super().__init__(message)
        self.reason: TransferFailure = reason


class PairingError(TandemError):
    """Two workers that differ in something that KV depends on."""


class ProtocolError(TandemError):
    """A frame that is too large, malformed, or out of turn."""


class AuthenticationError(ProtocolError):
    """The peer could not prove that it holds the cluster key."""


class DeviceLost(TandemError):
    """A step failed, and every one after it would: the worker ends, and the next incarnation gets a fresh device."""


class WorkerUnavailable(TandemError):
    """The worker died, is draining, or cannot be reached."""
