"""What a worker does before it serves: it tunes once, and the next one of its kind reads what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


async def test_a_worker_tunes_once(bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tuning.json"
    caplog.set_level("INFO")
    await bench.worker("aggregated", "a0", tuning_file=path, tuning_deadline_s=120.0)
    (first,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("warm-up: ")]
    for phase in ("preparing kernels", "loading weights", "tuning kernels", "recording steps"):
        assert phase in first
    written = path.read_bytes()
    assert b"paged_attention" in written
    await bench.worker("aggregated", "a1", tuning_file=path, tuning_deadline_s=120.0)
    assert path.read_bytes() == written
