"""What to compile ahead of time: each op's launcher, called with tensors that have shapes but no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.kernels.ops import Constraints, Penalties, QKNorm, SamplingInputs, StepLayout
from tandem.kernels.triton import activation, attention, embedding, linear, norm, rope, sampling
from tandem.kernels.triton.device import Architecture
from tandem.kernels.triton.launch import Launch
from tandem.kernels.tuning import Candidate

_BLOCK_SIZE = 32
_HALF = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Job:
    """One op with one candidate."""

    name: str
    candidate: str
    launch: Callable[[Launch], None]
    has_matrix_product: bool
    capabilities: frozenset[int] | None = None  # of the chips that this candidate is offered to; None: all

    def fits(self, architecture: Architecture) -> bool:
        return self.capabilities is None or architecture.capability in self.capabilities


def _empty(*shape: int, dtype: torch.dtype = _HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _index(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int64)


def jobs(chips: Sequence[Architecture], *, quick: bool) -> Iterator[Job]:
    """All ops in the shapes of an 8-billion model (and other head sizes), with all candidates of these chips."""
    yield from _simple_jobs()
    for dtype in (_HALF,) if quick else (_HALF, torch.float16, torch.float32):
        yield from _matrix_jobs(chips, dtype, quick=quick)
    for head_dim in (128,) if quick else (32, 64, 80, 128, 256):
        yield from _attention_jobs(chips, head_dim, _HALF, quick=quick)
    if not quick:
        yield from _attention_jobs(chips, 128, torch.float16, quick=True)
        yield from _attention_jobs(chips, 128, torch.float32, quick=True)


def _simple_jobs() -> Iterator[Job]:
    def norm_job(launch: Launch, width: int, *, has_residual: bool) -> None:
        x = _empty(8, width)
        norm.rms_norm(launch, x, _empty(8, width) if has_residual else None, _empty(width), 1e-5, _empty(8, width))

    for width in (576, 4096, 16384):
        for has_residual in (False, True):
            name = f"{'add_' if has_residual else ''}rms_norm {width}"
            yield Job(name, "-", partial(norm_job, width=width, has_residual=has_residual), False)
    yield Job(
        "embedding", "-", lambda one: embedding.embedding(one, _index(8), _empty(99, 4096), _empty(8, 4096)), False
    )
    for head_dim in (64, 80, 128, 256):
        yield Job(f"rope {head_dim}", "-", partial(_rope, head_dim=head_dim, has_norm=False), False)
        yield Job(f"rope with norm {head_dim}", "-", partial(_rope, head_dim=head_dim, has_norm=True), False)
    yield Job("sample", "-", partial(_sample, has_penalties=False), False)
    yield Job("sample with penalties", "-", partial(_sample, has_penalties=True), False)
    yield Job("sample with constraints", "-", partial(_sample, has_penalties=True, has_constraints=True), False)
    yield Job("logprobs", "-", partial(_sample, has_penalties=False, has_logprobs=True), False)


def _layout(num_tokens: int, num_seqs: int, num_blocks: int = 256) -> StepLayout:
    return StepLayout(
        _index(num_tokens), _index(num_tokens), _index(num_seqs + 1), _index(num_seqs), _index(num_seqs, num_blocks)
    )


def _cache(head_dim: int, dtype: torch.dtype = _HALF) -> Tensor:
    return _empty(64, 8, 32, 2, _BLOCK_SIZE, head_dim, dtype=dtype)


def _rope(launch: Launch, head_dim: int, *, has_norm: bool) -> None:
    angle = _empty(8, head_dim // 2, dtype=torch.float32)
    qk_norm = QKNorm(_empty(head_dim), _empty(head_dim), 1e-6) if has_norm else None
    qkv, out = _empty(8, 48 * head_dim), _empty(8, 32, head_dim)
    rope.rope_and_write_kv(launch, qkv, angle, angle, qk_norm, _cache(head_dim), 1, _layout(8, 8), out)


def _sample(launch: Launch, *, has_penalties: bool, has_constraints: bool = False, has_logprobs: bool = False) -> None:
    num_rows, vocab_size = 8, 128_256
    real = _empty(num_rows, dtype=torch.float32)
    whole = _index(num_rows)
    penalties = Penalties(_index(num_rows, 100), whole, whole, real, real, real) if has_penalties else None
    masks = _empty(num_rows, vocab_size // 32, dtype=torch.int32)
    biases = _empty(num_rows, 100, dtype=torch.float32)
    constraints = Constraints(_index(num_rows, 100), biases, whole, whole, masks) if has_constraints else None
    inputs = SamplingInputs(
        *(real, whole, real, real, whole, whole, whole),
        penalties=penalties,
        constraints=constraints,
        logprob_rows=_index(2) if has_logprobs else None,
        num_top_logprobs=20,
    )
    logits = _empty(num_rows, vocab_size)
    counts = _empty(num_rows, vocab_size, dtype=torch.int32)
    sampling.sample(launch, logits, inputs, _empty(num_rows, vocab_size, dtype=torch.float32), counts)


def _offered(
    chips: Sequence[Architecture], candidates_of: Callable[[Architecture], tuple[Candidate, ...]], *, quick: bool
) -> dict[Candidate, frozenset[int]]:
    """Each candidate, and the chips it is offered to."""
    offered: dict[Candidate, set[int]] = {}
    for chip in chips:
        candidates = candidates_of(chip)
        for candidate in candidates[:1] if quick else candidates:
            offered.setdefault(candidate, set()).add(chip.capability)
    return {candidate: frozenset(capabilities) for candidate, capabilities in offered.items()}


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _matrix_jobs(chips: Sequence[Architecture], dtype: torch.dtype, *, quick: bool) -> Iterator[Job]:
    """Few rows, whose splits are spread over the grid; and many, which one program walks through."""
    is_half = dtype != torch.float32
    for num_rows in (8, 64, 4096):
        for out_features, kind in ((4096, "split"), (128_256, "whole")):
            splits = 2 if kind == "split" else 1
            offered = _offered(
                chips,
                lambda chip, rows=num_rows, splits=splits: linear.candidates(rows, splits, dtype, chip),  # type: ignore[misc]
                quick=quick,
            )
            for candidate, capabilities in offered.items():
                run = partial(_linear, num_rows=num_rows, out_features=out_features, dtype=dtype, candidate=candidate)
                name = f"linear {_short(dtype)} {kind} {num_rows} rows"
                yield Job(name, candidate.name, run, is_half, capabilities)
        offered = _offered(chips, lambda chip, rows=num_rows: activation.candidates(rows, dtype, chip), quick=quick)  # type: ignore[misc]
        for candidate, capabilities in offered.items():
            run = partial(_gate_up, num_rows=num_rows, dtype=dtype, candidate=candidate)
            yield Job(f"gate_up_silu {_short(dtype)} {num_rows} rows", candidate.name, run, is_half, capabilities)


def _linear(launch: Launch, num_rows: int, out_features: int, dtype: torch.dtype, candidate: Candidate) -> None:
    packed = linear.pack_linear(_empty(out_features, 4096, dtype=dtype), None)
    workspace = linear.Workspace(_empty(16, dtype=torch.float32), _empty(16, dtype=torch.int32))
    x, out = _empty(num_rows, 4096, dtype=dtype), _empty(num_rows, out_features, dtype=dtype)
    linear.linear(launch, x, packed, out, workspace, candidate)


def _gate_up(launch: Launch, num_rows: int, dtype: torch.dtype, candidate: Candidate) -> None:
    packed = activation.pack_gate_up(_empty(28672, 4096, dtype=dtype), None)
    x, out = _empty(num_rows, 4096, dtype=dtype), _empty(num_rows, 14336, dtype=dtype)
    activation.gate_up_silu(launch, x, packed, out, candidate)


def _attention_jobs(chips: Sequence[Architecture], head_dim: int, dtype: torch.dtype, *, quick: bool) -> Iterator[Job]:
    """Decode steps of few tokens, whose splits are spread over programs, and of many; and a prefill chunk."""
    heads = attention.Heads(32, 8, head_dim, dtype)
    decode, prefill = attention.decode_candidates, attention.prefill_candidates
    for kind, num_tokens, candidates_of in (("decode", 8, decode), ("decode", 64, decode), ("prefill", 512, prefill)):
        for chip in chips:
            candidates = candidates_of(heads, chip)
            for candidate in candidates[:1] if quick else candidates:
                run = partial(_attention, heads=heads, num_tokens=num_tokens, candidate=candidate, chip=chip)
                name = f"attention {kind} {head_dim} {_short(dtype)} {num_tokens} tokens"
                yield Job(name, candidate.name, run, dtype != torch.float32, frozenset({chip.capability}))


def _attention(
    launch: Launch, heads: attention.Heads, num_tokens: int, candidate: Candidate, chip: Architecture
) -> None:
    """With softcap and window, which need the most registers."""
    query = _empty(num_tokens, heads.num_heads, heads.head_dim, dtype=heads.dtype)
    out = _empty(num_tokens, heads.num_heads * heads.head_dim, dtype=heads.dtype)
    workspace = attention.SplitWorkspace(_empty(16, dtype=torch.float32), _empty(16, dtype=torch.int32))
    cache = _cache(heads.head_dim, heads.dtype)
    layout = _layout(num_tokens, 8 if num_tokens == 512 else num_tokens)
    attention.paged_attention(launch, query, cache, 1, layout, 0.1, 4096, 50.0, out, workspace, candidate, chip)
