"""What the autotuner may choose for the GPU ops, what it chose, and how one candidate is run."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from tandem.kernels.compiler import fingerprint
from tandem.kernels.ops import StepLayout
from tandem.kernels.triton import activation, attention, linear
from tandem.kernels.triton.buffers import Buffers
from tandem.kernels.triton.device import architecture_of
from tandem.kernels.triton.launch import Launch, ceil_div
from tandem.kernels.tuning import (
    Candidate,
    CandidateUnavailable,
    Choices,
    DeviceKey,
    Tunable,
    TuningKey,
    TuningWorkload,
    bucket_of,
)

_OPS_PER_CALL = 16
_CONTEXT_LEN = 2048
"""Tokens of context at which attention is tuned: the host does not know the contexts of a step."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def linear_key(num_rows: int, packed: linear.TritonLinear) -> TuningKey:
    shape = f"{packed.in_features}x{packed.out_features}"
    return TuningKey("linear", shape, bucket_of(num_rows), name_of(packed.weight.dtype))


def gate_up_key(num_rows: int, packed: activation.TritonGateUp) -> TuningKey:
    shape = f"{packed.in_features}x{packed.out_features}"
    return TuningKey("gate_up_silu", shape, bucket_of(num_rows), name_of(packed.weight.dtype))


def attention_key(num_tokens: int, heads: attention.Heads, block_size: int, window: int | None, kind: str) -> TuningKey:
    shape = f"{heads.num_heads}/{heads.num_kv_heads}x{heads.head_dim} block {block_size} window {window or 'none'}"
    return TuningKey(f"attention_{kind}", shape, bucket_of(num_tokens), name_of(heads.dtype))


class Tuning:
    """The candidate of each op for each shape: the tuner's choice where there is one, else the first."""

    def __init__(self) -> None:
        self._choices = Choices({})
        self._known: dict[TuningKey, Candidate] = {}

    def use(self, choices: Choices) -> None:
        self._choices = choices
        self._known.clear()

    def linear(self, num_rows: int, packed: linear.TritonLinear) -> Candidate:
        return self._get(linear_key(num_rows, packed), lambda key: _linear_candidates(key, packed))

    def gate_up(self, num_rows: int, packed: activation.TritonGateUp) -> Candidate:
        return self._get(gate_up_key(num_rows, packed), lambda key: _gate_up_candidates(key, packed))

    def attention(self, query: Tensor, kv_cache: Tensor, layout: StepLayout, window: int | None) -> Candidate:
        heads = attention.Heads(query.shape[1], kv_cache.shape[1], kv_cache.shape[5], query.dtype)
        is_decode = attention.is_decode(layout)
        key = attention_key(query.shape[0], heads, kv_cache.shape[4], window, "decode" if is_decode else "prefill")
        make = attention.decode_candidates if is_decode else attention.prefill_candidates
        return self._get(key, lambda _: make(heads, architecture_of(query.device)))

    def _get(self, key: TuningKey, offered: Callable[[TuningKey], tuple[Candidate, ...]]) -> Candidate:
        candidate = self._known.get(key)
        if candidate is None:
            choice = self._choices.get(key)
            candidates = offered(key)
            candidate = choice if choice in candidates else candidates[0]
            self._known[key] = candidate
        return candidate


def _linear_candidates(key: TuningKey, packed: linear.TritonLinear) -> tuple[Candidate, ...]:
    architecture = architecture_of(packed.weight.device)
    return linear.candidates(key.bucket, packed.num_splits, packed.weight.dtype, architecture)


def _gate_up_candidates(key: TuningKey, packed: activation.TritonGateUp) -> tuple[Candidate, ...]:
    return activation.candidates(key.bucket, packed.weight.dtype, architecture_of(packed.weight.device))


def device_key(device: torch.device) -> DeviceKey:
    """What times on this device depend on."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source.update(path.read_bytes())
    versions["kernels"] = source.hexdigest()[:16]
    if device.type != "cuda":
        return DeviceKey("interpreter", 1, versions)
    versions["driver"] = _driver_version()
    return DeviceKey(torch.cuda.get_device_name(device), 1, versions)


def _driver_version() -> str:
    """Torch has no public name for it, and the private one comes and goes."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return str(version.value)


@cache
def numerics(device: torch.device) -> str:
    """See `ops.Ops`. Chips of one capability multiply alike; what is made of a kernel for them is up to Triton."""
    chip = "interpreter"
    if device.type == "cuda":
        chip = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return f"triton/{chip}/{fingerprint([triton.__version__], sorted(Path(__file__).parent.glob('*.py')))}"


class Workbench:
    """Makes tunables for a workload: operands of its shapes, and graphs that run an op many times."""

    def __init__(self, launch: Launch, buffers: Buffers, workload: TuningWorkload) -> None:
        self._launch = launch
        self._buffers = buffers
        self._workload = workload
        self._device = next(one.weight.device for one in workload.linears if isinstance(one, _WEIGHTS))
        self._dtype: torch.dtype = getattr(torch, workload.dtype)

    def tunables(self) -> Sequence[Tunable]:
        """Products in the order of how much they read, then attention."""
        gate_ups = [one for one in self._workload.linears if isinstance(one, activation.TritonGateUp)]
        others = [one for one in self._workload.linears if isinstance(one, linear.TritonLinear)]
        products = [*self._gate_ups(gate_ups), *self._linears(others)]
        products.sort(key=lambda one: -one[0])
        return [*(tunable for _, tunable in products), *self._attentions()]

    def _gate_ups(self, weights: list[activation.TritonGateUp]) -> Iterator[tuple[int, Tunable]]:
        for num_rows in self._workload.row_buckets if weights else ():
            key = gate_up_key(num_rows, weights[0])
            runs = self._gate_up_runs(num_rows, weights)
            yield _bytes(weights), self._tunable(key, _gate_up_candidates(key, weights[0]), runs)

    def _gate_up_runs(self, num_rows: int, weights: list[activation.TritonGateUp]) -> _Runs:
        def make() -> Callable[[Candidate, int], None]:
            x = self._random(num_rows, weights[0].in_features)
            out = self._random(num_rows, weights[0].out_features)
            return lambda candidate, index: activation.gate_up_silu(
                self._launch, x, weights[index % len(weights)], out, candidate
            )

        return make

    def _linears(self, all_weights: list[linear.TritonLinear]) -> Iterator[tuple[int, Tunable]]:
        by_shape: dict[tuple[int, int], list[linear.TritonLinear]] = {}
        for one in all_weights:
            by_shape.setdefault((one.in_features, one.out_features), []).append(one)
        for weights in by_shape.values():
            for num_rows in self._workload.row_buckets:
                key = linear_key(num_rows, weights[0])
                runs = self._linear_runs(num_rows, weights)
                yield _bytes(weights), self._tunable(key, _linear_candidates(key, weights[0]), runs)

    def _linear_runs(self, num_rows: int, weights: list[linear.TritonLinear]) -> _Runs:
        def make() -> Callable[[Candidate, int], None]:
            x = self._random(num_rows, weights[0].in_features)
            out = self._random(num_rows, weights[0].out_features)
            workspace = linear.workspace_for(weights[0], self._buffers)
            return lambda candidate, index: linear.linear(
                self._launch, x, weights[index % len(weights)], out, workspace, candidate
            )

        return make

    def _attentions(self) -> Iterator[Tunable]:
        workload, architecture = self._workload, architecture_of(self._device)
        heads = attention.Heads(workload.num_heads, workload.num_kv_heads, workload.head_dim, self._dtype)
        for window in sorted(workload.windows, key=lambda one: one or 0):
            for num_tokens in workload.row_buckets:
                if num_tokens <= workload.max_seqs:
                    key = attention_key(num_tokens, heads, workload.block_size, window, "decode")
                    candidates = attention.decode_candidates(heads, architecture)
                    yield self._tunable(key, candidates, self._attention_runs(num_tokens, num_tokens, heads, window))
                if num_tokens > 1:
                    key = attention_key(num_tokens, heads, workload.block_size, window, "prefill")
                    candidates = attention.prefill_candidates(heads, architecture)
                    yield self._tunable(key, candidates, self._attention_runs(num_tokens, 1, heads, window))

    def _attention_runs(self, num_tokens: int, num_seqs: int, heads: attention.Heads, window: int | None) -> _Runs:
        def make() -> Callable[[Candidate, int], None]:
            block_size = self._workload.block_size
            context = max(min(_CONTEXT_LEN, self._workload.max_context), num_tokens // num_seqs)
            num_blocks = ceil_div(context, block_size)
            cache = self._random(num_seqs * num_blocks, heads.num_kv_heads, 1, 2, block_size, heads.head_dim)
            layout = _layout(num_tokens, num_seqs, context, num_blocks, self._device)
            query = self._random(num_tokens, heads.num_heads, heads.head_dim)
            out = self._random(num_tokens, heads.num_heads * heads.head_dim)
            workspace = attention.workspace_for(layout, heads, block_size, self._buffers)
            scale = heads.head_dim**-0.5
            return lambda candidate, _: attention.paged_attention(
                *(self._launch, query, cache, 0, layout, scale, window, None, out),
                *(workspace, candidate, architecture_of(self._device)),
            )

        return make

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)

    def _tunable(self, key: TuningKey, candidates: tuple[Candidate, ...], make: _Runs) -> Tunable:
        operands: list[Callable[[Candidate, int], None]] = []  # made for the first candidate, shared by all

        def prepare(candidate: Candidate) -> Callable[[], None]:
            if not operands:
                operands.append(make())
            return _record(operands[0], candidate)

        return Tunable(key, candidates, prepare, _OPS_PER_CALL, release=operands.clear)


_WEIGHTS = (linear.TritonLinear, activation.TritonGateUp)


def _bytes(weights: Sequence[linear.TritonLinear | activation.TritonGateUp]) -> int:
    return sum(one.weight.numel() for one in weights)


_Runs = Callable[[], Callable[[Candidate, int], None]]
"""Makes the operands, and returns what runs a candidate on the i-th of them."""


def _record(run: Callable[[Candidate, int], None], candidate: Candidate) -> Callable[[], None]:
    """A graph of many runs: started one by one, the host would be timed. Raises `CandidateUnavailable`."""
    try:
        run(candidate, 0)
    except (TritonError, RuntimeError) as error:  # of either kind, the compiler's too: the others may do
        raise CandidateUnavailable(str(error)) from error
    finally:
        torch.cuda.synchronize()  # a device that has failed says so here
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(_OPS_PER_CALL):
            run(candidate, index)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def _layout(num_tokens: int, num_seqs: int, context: int, num_blocks: int, device: torch.device) -> StepLayout:
    """Sequences of equal length, the last tokens of each in the step."""
    per_seq = num_tokens // num_seqs
    positions = torch.arange(context - per_seq, context, device=device).repeat(num_seqs)
    return StepLayout(
        positions=positions,
        slots=positions,
        query_starts=torch.arange(num_seqs + 1, device=device) * per_seq,
        context_lens=torch.full((num_seqs,), context, device=device),
        block_tables=torch.arange(num_seqs * num_blocks, device=device).view(num_seqs, num_blocks),
    )
