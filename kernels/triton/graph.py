"""Recording a step as a CUDA graph. All graphs of one recorder share one memory pool: only one replays at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.kernels.capture import Captured
from tandem.kernels.triton.launch import CountedLaunch

T = TypeVar("T")


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch ops that do something: views and allocations do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.arguments)
        if not is_view and not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.num_ops += 1
        return func(*args, **(kwargs or {}))


def count_ops(step: Callable[[], T], launch: CountedLaunch) -> tuple[T, int]:
    """What `step` returns, and how many kernels it starts: ours, and torch's."""
    before = launch.num_launches
    with OpCounter() as counter:
        result = step()
    return result, counter.num_ops + launch.num_launches - before


class GraphRecorder:
    """Captures steps on one stream (the allocator shares nothing between streams), into one memory pool."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._anchor: Any = None
        """A graph that is never replayed. It holds the pool while steps are recorded anew: torch takes a pool that no
        graph uses for given up, and fails when it is used again."""

    def capture(self, step: Callable[[], T], launch: CountedLaunch) -> Captured[T]:
        """Run `step` once (which compiles what it needs), then record it."""
        if self._anchor is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._anchor = torch.cuda.CUDAGraph()
            with self._recording(self._anchor):
                torch.zeros(1, device="cuda")
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self._recording(graph, pool=self._anchor.pool()):
            result, num_ops = count_ops(step, launch)
        return Captured(result, graph.replay, num_ops)

    def _recording(self, graph: Any, **more: Any) -> Any:
        """What other threads do with the device meanwhile is none of its business; by default it would be an error."""
        return torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local", **more)
