"""What a model's files say of its embeddings, and the arithmetic of pooling."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.workers.batch import PoolSpec
from tandem.workers.embedding import add_rows, unit_vector
from tandem.workers.pool_rows import pool
from tandem.workers.pooling import Pooling, read_pooling

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


@pytest.fixture
def folder_with(tmp_path: Path) -> Callable[..., Path]:
    def make(*, modules: Any = None, pooling: Any = None, **config: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, **config}))
        if modules is not None:
            (tmp_path / "modules.json").write_text(json.dumps(modules))
        if pooling is not None:
            (tmp_path / "1_Pooling").mkdir()
            (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, "first"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_modes(folder_with: Callable[..., Path], pooling: Any, mode: str) -> None:
    folder = folder_with(modules=[TRANSFORMER, POOLING, NORMALIZE], pooling=pooling, matryoshka_dimensions=[32, 16])
    assert read_pooling(folder) == Pooling(mode, 64, (16, 32))
    (folder / "modules.json").unlink()
    assert read_pooling(folder).mode == mode


def test_a_plain_model_is_pooled_at_its_last_token(folder_with: Callable[..., Path]) -> None:
    assert read_pooling(folder_with()) == Pooling("last", 64)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"pooling": {"pooling_mode_max_tokens": True}}, "'max_tokens'"),
        ({"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}}, "'mean_tokens, cls_token'"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "'weightedmean'"),
        ({"pooling": {}}, "not supported"),
        ({"modules": [TRANSFORMER, {"type": "sentence_transformers.models.Dense", "path": "2"}]}, "module 'Dense'"),
        ({"modules": [TRANSFORMER, {**POOLING, "path": "../../etc"}]}, "cannot be read"),
        ({"modules": {"a": 1}}, "cannot be read"),
        ({"modules": [1]}, "cannot be read"),
        ({"is_causal": False}, "both directions"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"matryoshka_dimensions": ["8"]}, "cannot be read"),
        ({"hidden_size": None}, "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(folder_with: Callable[..., Path], what: Any, words: str) -> None:
    folder = folder_with(**what)
    refusal = read_pooling(folder).refusal
    assert refusal is not None
    assert words in refusal
    assert "\n" not in refusal
    assert str(folder) not in refusal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 48, 100])
def test_a_mean_does_not_depend_on_chunks(num_tokens: int, dtype: torch.dtype) -> None:
    hidden = (torch.randn(num_tokens, 24, generator=torch.Generator().manual_seed(num_tokens)) * 50).to(dtype)
    spec = PoolSpec("mean", 16)
    whole = add_rows(None, pool(hidden, spec).numpy())
    for chunk in (16, 32, 64):
        total = None
        for part in torch.split(hidden, chunk):
            total = add_rows(total, pool(part, spec).numpy())
        assert total is not None
        assert total.tobytes() == whole.tobytes()
    np.testing.assert_allclose(whole[0], hidden.float().sum(0).numpy(), rtol=1e-4, atol=1e-3)


def test_pooled_rows_outlive_the_step() -> None:
    for mode in ("last", "first", "mean"):
        hidden = torch.ones(3, 4)
        rows = pool(hidden, PoolSpec(mode, 2)).numpy()
        before = rows.copy()
        hidden.zero_()
        assert (rows == before).all()


def test_unit_vectors() -> None:
    assert unit_vector(np.array([[3.0, 4.0]], np.float32)) == struct.pack("<2f", 0.6, 0.8)
    for row in ([0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        assert unit_vector(np.array([row], np.float32)) is None
    large = unit_vector(np.array([[3e38, 3e38]], np.float32))
    assert large is not None
    assert struct.unpack("<2f", large) == pytest.approx((0.70710677, 0.70710677))
