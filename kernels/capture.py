"""Recording a step once and replaying it: one interface, whatever does the recording.

    captured = ops.capture(step)     # runs or records `step`, which calls ops on fixed buffers
    ... write the next inputs into the same buffers ...
    captured.replay()                # one host call; captured.result holds what it computed

On a GPU it is a CUDA graph, on a CPU the list of native calls with their addresses. Both bake in every address and
shape: buffers must outlive the captured step, values are read at each replay. What a step does in between (Python,
allocation, control flow) is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Captured(Generic[T]):
    """A recorded step. `result` is what the step returned: its tensors are overwritten by every replay."""

    result: T
    replay: Callable[[], None]
    num_ops: int
    """Kernels (or native ops) that one replay runs."""
