"""`tandem generate`: a model of its own, with nothing around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster import local
from tandem.cluster.bench.random_models import Shape, write_random_model
from tandem.workers.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local, "KV_MEMORY_BYTES", 1 << 20)
    path = tmp_path / "small"
    path.mkdir()
    write_random_model(Shape(hidden=64, layers=1, heads=1, kv_heads=1, intermediate=64, vocab=64), path)
    return path


def test_prompts_are_continued_in_order_and_what_takes_time_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = local.generate(str(folder), ["a", "b"], max_tokens=3), local.generate(str(folder), ["a"])
    assert len(first) == 2
    assert len(second) == 1
    assert capsys.readouterr().err.splitlines() == ["loading weights"] * 2


def test_a_prompt_that_cannot_be_continued_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match="prompt 2: the prompt has no tokens"):
        local.generate(str(folder), ["a", ""])
