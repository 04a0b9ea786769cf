"""Counting what a decoded token costs in operations: one `TorchDispatchMode` for whoever computes with torch.

A view is an op that hands out its input's memory without writing to it, by its schema; views are not counted.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.cluster.bench.random_models import Shape

_PROMPT_LEN = 8
_NUM_NEW = 4


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops that reach a backend while it is active. `counts` by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._is_inside_one = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._is_inside_one and not _is_view(func):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def as_one(self, name: str) -> Iterator[None]:
        """Whatever runs inside counts as one op: a fused kernel of the same formula."""
        assert not self._is_inside_one
        self.counts[name] += 1
        self._is_inside_one = True
        try:
            yield
        finally:
            self._is_inside_one = False

    @property
    def total(self) -> int:
        return self.counts.total()


def _is_view(func: Any) -> bool:
    """A result shares an argument's memory and no argument is written."""
    arguments, results = func._schema.arguments, func._schema.returns
    is_written = any(one.alias_info is not None and one.alias_info.is_write for one in arguments)
    return not is_written and any(one.alias_info is not None for one in results)


def count_transformers(shape: Shape, *, attention: str, dtype: torch.dtype, fused: bool) -> int:
    """Ops that one more token of `generate()` costs Hugging Face's model: greedy, one stream, a growing cache.

    `fused`: RMSNorm, and SiLU times the other half, as one op each.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=True,
    )
    config._attn_implementation = attention
    model: Any = Qwen2ForCausalLM(config)
    model = model.to(dtype).eval()
    counter = OpCounter()
    if fused:
        _fuse(model, counter)
    prompt = torch.arange(1, 1 + _PROMPT_LEN)[None]  # without the padding token, which would bring a mask along

    def ops_of(num_new: int) -> int:
        before = counter.total
        # Not inference_mode: it would hide what ops such as `linear` are made of.
        with torch.no_grad(), counter, warnings.catch_warnings(action="ignore", category=FutureWarning):
            model.generate(prompt, max_new_tokens=num_new, do_sample=False, pad_token_id=0)
        return counter.total - before

    return ops_of(_NUM_NEW + 1) - ops_of(_NUM_NEW)


def _fuse(model: Any, counter: OpCounter) -> None:
    for layer in model.model.layers:
        layer.input_layernorm = _AsOne(layer.input_layernorm, counter)
        layer.post_attention_layernorm = _AsOne(layer.post_attention_layernorm, counter)
        layer.mlp = _FusedMLP(layer.mlp, counter)
    model.model.norm = _AsOne(model.model.norm, counter)


class _AsOne(nn.Module):
    def __init__(self, inner: nn.Module, counter: OpCounter) -> None:
        super().__init__()
        self._inner, self._counter = inner, counter

    def forward(self, x: Tensor) -> Any:
        with self._counter.as_one("fused rms_norm"):
            return self._inner(x)


class _FusedMLP(nn.Module):
    def __init__(self, inner: nn.Module, counter: OpCounter) -> None:
        super().__init__()
        self._inner, self._counter = inner, counter

    def forward(self, x: Tensor) -> Any:
        inner: Any = self._inner
        gate, up = inner.gate_proj(x), inner.up_proj(x)
        with self._counter.as_one("fused silu_mul"):
            activated = inner.act_fn(gate) * up
        return inner.down_proj(activated)


def count_while(action: Callable[[], object]) -> Counter[str]:
    """The torch ops of `action`, by name."""
    counter = OpCounter()
    with counter:
        action()
    return counter.counts
