"""Tasks beside everything else, for which nobody waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def in_background(work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """`work` as a task. An error that ends it is logged: nobody else would hear of it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_error)
    return task


def _tell_error(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("%s: this goes on no longer", task.get_name(), exc_info=error)
