"""A real cluster with two workers of each role, for tests that kill them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from cluster_client import Cluster


@pytest.fixture(scope="session")
def four_workers(start_serving: Callable[..., Any]) -> Any:
    """Shared by all of this folder; each test leaves it whole."""
    return start_serving("smollm2-135m-instruct", "--prefill", "2", "--decode", "2", "--max-model-len", "2048")


@pytest.fixture
async def cluster(four_workers: Any) -> Any:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        cluster = Cluster(four_workers, http, num_workers=4)
        await cluster.until(cluster.is_whole, 60)
        yield cluster
        await cluster.until(cluster.is_whole, 60)
        await cluster.until(cluster.is_at_rest, 4)
