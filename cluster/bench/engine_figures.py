"""What a step must read and compute, and what follows from how long it took. Pure functions; no clock, no torch.

decode:  bytes = weights, each matrix once + KV of every sequence's context;  share = bytes / step time / bandwidth
prefill: operations = 2 x weights of the layers x tokens + attention + one row of the head;
         share = operations / time / matrix rate
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.workers.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Decode:
    """A step of `streams` sequences, one token each, whose contexts are `context` tokens when the timing begins."""

    streams: int
    context: int

    @property
    def label(self) -> str:
        return f"decode, {self.streams} x {self.context}"


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt of `tokens` tokens, none of it cached, and the first token of its answer."""

    tokens: int

    @property
    def label(self) -> str:
        return f"prefill, {self.tokens}"


Workload = Decode | Prefill


def layer_weights(config: ModelConfig) -> int:
    """Elements of one layer's four matrices."""
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    return hidden * (qkv + query) + 3 * hidden * config.intermediate_size


def layer_vectors(config: ModelConfig) -> int:
    """Elements of one layer's norms and biases."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        2 * config.hidden_size
        + (2 * config.head_dim if config.qk_norm else 0)
        + (query + 2 * key if config.attention_bias else 0)
        + (config.hidden_size if config.output_bias else 0)
        + (2 * config.intermediate_size + config.hidden_size if config.mlp_bias else 0)
    )


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """What one step reads of the weights: every matrix and vector once. The embedding counts as the head only: its
    rows for the step's few tokens are nothing beside it."""
    layers = config.num_layers * (layer_weights(config) + layer_vectors(config))
    return itemsize * (layers + config.hidden_size + config.vocab_size * config.hidden_size)


def decode_bytes(config: ModelConfig, itemsize: int, workload: Decode, num_steps: int, warm_up: int) -> float:
    """Mean bytes that one of the timed steps reads: weights, and K and V of every position it attends to."""
    # Step i (from 0, the warm-up's included) attends to context + i + 1 tokens.
    context = workload.context + warm_up + (num_steps + 1) / 2
    return weight_bytes(config, itemsize) + itemsize * config.kv_elements_per_token * context * workload.streams


def prefill_operations(config: ModelConfig, tokens: int) -> float:
    """Multiplications and additions: the matrices for every token, causal attention, the head for the last token."""
    matrices = 2 * config.num_layers * layer_weights(config) * tokens
    pairs = tokens * (tokens + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return matrices + attention + 2 * config.vocab_size * config.hidden_size


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do on the same cores, measured in the same run: each kernel's median, per second."""

    bandwidth: dict[str, float]
    """Bytes read per second, by kernel."""
    matrix: dict[str, float]
    """bfloat16 operations per second, by kernel."""

    @property
    def best_bandwidth(self) -> float:
        return max(self.bandwidth.values())

    @property
    def best_matrix(self) -> float:
        return max(self.matrix.values())


@dataclass(frozen=True, slots=True)
class Row:
    """One workload on one side. `seconds` has the median of each round: of a decode step, or of a whole prompt."""

    workload: Workload
    side: str
    seconds: tuple[float, ...]
    others: float
    """Cores that everybody else used meanwhile, mean over the rounds."""
    bytes_or_operations: float | None = None
    """What a step reads or a prompt computes; None for a side whose weights have another format."""
    error: str | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        per_step = self.workload.tokens if isinstance(self.workload, Prefill) else self.workload.streams
        return per_step / self.median_s

    def share(self, limits: Limits) -> float | None:
        """Of the read bandwidth (decode) or of the matrix rate (prefill). None where it makes no sense."""
        if self.error is not None or self.bytes_or_operations is None:
            return None
        limit = limits.best_matrix if isinstance(self.workload, Prefill) else limits.best_bandwidth
        return self.bytes_or_operations / self.median_s / limit


def ratio(ours: Row, theirs: Row) -> float | None:
    """How many times faster we are, as the median over rounds of the ratio within a round: what slows a whole round
    down, slows both. None if either failed."""
    if ours.error is not None or theirs.error is not None:
        return None
    pairs = zip(ours.seconds, theirs.seconds, strict=True)
    return statistics.median(their_s / our_s for our_s, their_s in pairs)


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """Where the time of a decode step of the whole engine goes; seconds, medians."""

    streams: int
    step: float
    """From one step's outputs to the next one's."""
    schedule: float
    host: float
    """What the runner does in Python: tensors from lists, records from tensors."""
    apply: float
    execute: float
    """The runner, `host` included."""

    @property
    def overhead(self) -> float:
        """Share of the step that is not the model's computation: scheduling, tensors, accounting, the event loop."""
        return (self.step - self.execute + self.host) / self.step


def median_by_kernel(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The rounds' medians, kernel by kernel."""
    return {kernel: statistics.median(one[kernel] for one in rounds) for kernel in rounds[0]}
