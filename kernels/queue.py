"""The order in which a device works: what one thread hands it is done one after the other, while the thread goes on.

    tensor = queue.send(host)           inputs on their way there
    queue.submit(step.replay)           behind them
    host = queue.fetch(tensor)          results on their way back
    done = queue.mark()
    ...                                 the host does something else
    done.wait()                         now `host` may be read

Nobody waits but in `Mark.wait`. Host memory of one's own that the device reads or writes (`submit` with a copy) must
not be touched before a mark behind it was waited for; what `send` and `fetch` need they keep themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Mark(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Return when all that was handed over before is done."""


class Queue(Protocol):
    """Of one device. Work is handed over by one thread at a time."""

    shares_memory: bool
    """Whether host tensors are the device's own."""

    def send(self, host: Tensor) -> Tensor:
        """The same on the device. The host's tensor must not be changed any more."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """What the tensor holds when its turn comes, in host memory; to be read behind a mark."""

    def submit(self, work: Callable[[], object]) -> None:
        """Work on tensors that exist already."""

    def run(self, work: Callable[[], T]) -> T:
        """Work that makes new tensors, which are full when their turn comes."""

    def mark(self) -> Mark:
        """Behind all that was handed over so far."""

    def is_alive(self) -> bool:
        """Whether the device still computes. May wait for what was handed over: to be asked after something failed."""


class _Past:
    def wait(self) -> None:
        """Everything was done at once."""


class HostQueue:
    """The CPU: done when handed over."""

    shares_memory = True

    def send(self, host: Tensor) -> Tensor:
        return host

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def mark(self) -> Mark:
        return _Past()

    def is_alive(self) -> bool:
        return True


class _Event:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaQueue:
    """The current stream. Copies go through page-locked memory, which torch keeps until they are made."""

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, host: Tensor) -> Tensor:
        return host.pin_memory().to(self._device, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def mark(self) -> Mark:
        return _Event()

    def is_alive(self) -> bool:
        """After some errors (a kernel's illegal address, say) every call of this process fails for ever."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True


def queue_of(device: torch.device) -> Queue:
    """For work on tensors of this device."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
