"""Each op on the device: beside the reference on the CPU, and bit for bit at other batch sizes and chunkings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch
from report import Context, close, equal, short
from rows import Row
from torch import Tensor

from tandem.kernels.ops import Constraints, Penalties, QKNorm, SamplingInputs, StepLayout

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.inference_mode()
def norms_and_embedding(context: Context) -> Iterator[Row]:
    ops, reference, device = context.ops, context.reference, context.device
    width = 96 if context.is_tiny else 4096
    for dtype in context.dtypes:
        x, weight = random(17, width, dtype=dtype), random(width, dtype=dtype, seed=1)
        actual = ops.rms_norm(x.to(device), weight.to(device), 1e-5)
        yield close("rms_norm", short(dtype), actual, reference.rms_norm(x, weight, 1e-5), TOLERANCE[dtype])
        ours, theirs = random(17, width, dtype=dtype, seed=2).to(device), random(17, width, dtype=dtype, seed=2)
        actual = ops.add_rms_norm(x.to(device), ours, weight.to(device), 1e-5)
        expected = reference.add_rms_norm(x, theirs, weight, 1e-5)
        yield close("add_rms_norm", short(dtype), actual, expected, TOLERANCE[dtype])
        yield equal("add_rms_norm", f"{short(dtype)} residual", [(ours.cpu(), theirs)])
        parts = [(ops.rms_norm(x[i : i + 1].to(device), weight.to(device), 1e-5), i) for i in (0, 16)]
        whole = ops.rms_norm(x.to(device), weight.to(device), 1e-5)
        yield equal("rms_norm", f"{short(dtype)} batch-invariance", [(part, whole[i : i + 1]) for part, i in parts])
        ids = torch.arange(17) % 5
        yield equal("embedding", short(dtype), [(ops.embedding(ids.to(device), x.to(device)).cpu(), x[ids])])


@torch.inference_mode()
def products(context: Context) -> Iterator[Row]:
    """Few rows (splits over the grid), many rows, and every row count in between that changes tiles."""
    ops, reference, device = context.ops, context.reference, context.device
    shapes = [(600, 70)] if context.is_tiny else [(576, 960), (4096, 4096), (3072, 1024), (896, 151_936), (100, 72)]
    most = 70 if context.is_tiny else 700
    for dtype in context.dtypes[::-1]:
        for in_features, out_features in shapes if dtype == torch.bfloat16 else shapes[:2]:
            case = f"{short(dtype)} {in_features}x{out_features}"
            weight = random(out_features, in_features, dtype=dtype) * in_features**-0.5
            x, bias = random(most, in_features, dtype=dtype, seed=1), random(out_features, dtype=dtype, seed=2)
            packed, rows = ops.pack_linear(weight.to(device), bias.to(device)), x.to(device)
            whole = ops.linear(rows, packed)
            few = torch.linspace(0, most - 1, 64).long()  # the reference takes its time
            expected = reference.linear(x[few], reference.pack_linear(weight, bias))
            yield close("linear", case, whole[few.to(device)], expected, TOLERANCE[dtype])
            cuts = [(0, 1), (most - 1, most), (3, 20), (2, 66), (1, most)]
            pairs = [(ops.linear(rows[a:b].clone(), packed), whole[a:b]) for a, b in cuts]
            yield equal("linear", f"{case} batch-invariance", pairs)
            if out_features % 2 == 0 and out_features < 10_000:
                gate_up = ops.pack_gate_up(weight.to(device), bias.to(device))
                whole = ops.gate_up_silu(rows, gate_up)
                expected = reference.gate_up_silu(x[few], reference.pack_gate_up(weight, bias))
                yield close("gate_up_silu", case, whole[few.to(device)], expected, TOLERANCE[dtype])
                pairs = [(ops.gate_up_silu(rows[a:b].clone(), gate_up), whole[a:b]) for a, b in cuts]
                yield equal("gate_up_silu", f"{case} batch-invariance", pairs)


def make_layout(sequences: Sequence[tuple[int, int]], block_size: int) -> StepLayout:
    """Sequences by (tokens in the step, context length), each with blocks of its own, in no particular order."""
    counts = [-(-context // block_size) for _, context in sequences]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7)).tolist()
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int64)
    starts, positions, slots = [0], [], []
    for row, (num_tokens, context) in enumerate(sequences):
        mine = [order.pop() for _ in range(counts[row])]
        tables[row, : len(mine)] = torch.tensor(mine)
        starts.append(starts[-1] + num_tokens)
        positions += range(context - num_tokens, context)
        slots += [mine[at // block_size] * block_size + at % block_size for at in range(context - num_tokens, context)]
    contexts = torch.tensor([context for _, context in sequences])
    return StepLayout(torch.tensor(positions), torch.tensor(slots), torch.tensor(starts), contexts, tables)


def moved(layout: StepLayout, device: torch.device) -> StepLayout:
    return StepLayout(**{each.name: getattr(layout, each.name).to(device) for each in fields(StepLayout)})


_Variants = tuple[tuple[int | None, float | None], ...]
"""Windows and caps."""


@torch.inference_mode()
def attention(context: Context) -> Iterator[Row]:
    """Rotation with KV write, then attention: decode steps, chunks, windows, caps; then bits at other cuts."""
    variants: _Variants = ((None, None), (64, None), (None, 30.0), (700, 30.0))
    if context.is_tiny:
        yield from _attentions(context, torch.float16, (32,), variants)
        return
    yield from _attentions(context, torch.bfloat16, (128,), variants)
    yield from _attentions(context, torch.float16, (64,), variants[:1])
    yield from _attentions(context, torch.float32, (64,), variants[:1])


@torch.inference_mode()
def attention_heads(context: Context) -> Iterator[Row]:
    """The same for other sizes of heads."""
    if context.is_tiny:
        yield from _attentions(context, torch.float16, (48,), ((None, None),))
        return
    yield from _attentions(context, torch.bfloat16, (64, 80, 256, 96, 32), ((None, None), (64, 30.0)))


def _attentions(context: Context, dtype: torch.dtype, head_dims: tuple[int, ...], variants: _Variants) -> Iterator[Row]:
    sequences = [(3, 70), (5, 40)] if context.is_tiny else [(40, 1500), (1, 70), (200, 200), (17, 513)]
    decode = [(1, total) for _, total in sequences]
    for head_dim in head_dims:
        for window, softcap in variants:
            case = f"{short(dtype)} D={head_dim} window={window} softcap={softcap}"
            for kind, wanted in (("chunks", sequences), ("decode", decode)):
                yield from _attention(context, f"{case} {kind}", wanted, head_dim, dtype, window, softcap)


def _attention(
    context: Context,
    case: str,
    sequences: Sequence[tuple[int, int]],
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> Iterator[Row]:
    num_heads, num_kv_heads, num_layers, block_size = 12, 3, 2, 32
    layout = make_layout(sequences, block_size)
    num_tokens = layout.slots.shape[0]
    shape = (int(layout.block_tables.max()) + 1, num_kv_heads, num_layers, 2, block_size, head_dim)
    cache = random(*shape, dtype=dtype)
    ours = cache.to(context.device, copy=True)
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, seed=1)
    cos, sin = (random(num_tokens, head_dim // 2, seed=seed).cos() for seed in (2, 3))
    norm = QKNorm(random(head_dim, dtype=dtype, seed=4), random(head_dim, dtype=dtype, seed=5), 1e-6)
    scale = head_dim**-0.5
    plan = context.reference.plan_step(layout, cache, num_heads)
    query = context.reference.rope_and_write_kv(qkv, cos, sin, norm, cache, 1, plan)
    expected = context.reference.paged_attention(query, cache, 1, plan, scale, window, softcap)

    device, ops = context.device, context.ops
    there = moved(layout, device)
    norm = QKNorm(norm.q_weight.to(device), norm.k_weight.to(device), norm.eps)
    plan = ops.plan_step(there, ours, num_heads)
    query = ops.rope_and_write_kv(qkv.to(device), cos.to(device), sin.to(device), norm, ours, 1, plan)
    whole = ops.paged_attention(query, ours, 1, plan, scale, window, softcap)
    yield close("rope, attention", case, whole, expected, 2 * TOLERANCE[dtype])
    pairs = []
    starts = layout.query_starts.tolist()
    for seq, (num_new, total) in enumerate(sequences):
        for first, last in {(0, 1), (num_new - 1, num_new), (num_new // 2, num_new)}:
            rows = slice(starts[seq] + first, starts[seq] + last)
            part = replace(
                there,
                positions=there.positions[rows],
                slots=there.slots[rows],
                query_starts=torch.tensor([0, last - first], device=device),
                context_lens=torch.tensor([total - num_new + last], device=device),
                block_tables=there.block_tables[seq : seq + 1],
            )
            step = ops.plan_step(part, ours, num_heads)
            alone = ops.paged_attention(query[rows].clone(), ours, 1, step, scale, window, softcap)
            pairs.append((alone, whole[rows]))
    yield equal("attention", f"{case} batch-invariance", pairs)


@torch.inference_mode()
def sampling(context: Context) -> Iterator[Row]:
    """Against the reference, tokens may differ where the device's exponentials round otherwise: one in a hundred."""
    num_rows, vocab_size = (4, 1100) if context.is_tiny else (200, 151_936)
    logits = (random(num_rows, vocab_size) * 4).to(torch.bfloat16)
    row = torch.arange(num_rows)
    lens = row % 30
    penalties = Penalties(
        token_ids=(row[:, None] * 37 + torch.arange(30) // 2 * 11) % vocab_size,
        prompt_lens=lens // 2,
        lens=lens,
        presence=(row % 2) * 0.5,
        frequency=(row % 3) * 0.2,
        repetition=1.0 + (row % 4) * 0.1,
    )
    words = -(-vocab_size // 32)
    generator = torch.Generator().manual_seed(3)
    constraints = Constraints(
        bias_token_ids=(row[:, None] * 37 + torch.arange(4) * 11) % vocab_size,  # tokens of the histories, too
        biases=random(num_rows, 4) * 5,
        bias_lens=row % 5,
        mask_rows=torch.where(row % 3 == 0, row % 7, -1),
        masks=torch.randint(-(1 << 31), 1 << 31, (7, words), generator=generator).to(torch.int32),
    )
    inputs = SamplingInputs(
        temperature=(row % 5) * 0.4,
        top_k=torch.tensor([0, 50, 3000])[row % 3],
        top_p=torch.tensor([1.0, 0.9])[row // 3 % 2],
        min_p=torch.tensor([0.0, 0.05])[row // 6 % 2],
        seed=row * -7919,
        choice=row % 3,
        position=row * 1_000_003,
        penalties=penalties,
        constraints=constraints,
        logprob_rows=row,
        num_top_logprobs=5,
    )
    expected = context.reference.sample(logits, inputs)
    device = context.device
    there = _moved_inputs(inputs, device)
    whole = context.ops.sample(logits.to(device), there)
    wrong = int((whole.token_ids.cpu() != expected.token_ids).sum())
    outcome = Row("sample", "tokens", "ok" if wrong * 100 <= num_rows else "FAILED", f"{wrong} of {num_rows} differ")
    yield outcome
    assert whole.top_logprobs is not None
    assert expected.top_logprobs is not None
    yield close("sample", "alternatives", whole.top_logprobs, expected.top_logprobs, 1e-5)
    pairs = []
    for index in range(0, num_rows, max(1, num_rows // 8)):
        rows = slice(index, index + 1)
        part = context.ops.sample(logits[rows].to(device), _rows(there, rows))
        pairs += [(getattr(part, each.name), getattr(whole, each.name)[rows]) for each in fields(whole)]
    yield equal("sample", "batch-invariance", pairs)
    scored = context.ops.score(logits.to(device), whole.token_ids, 5)
    yield equal(
        "score", "as sampled", [(getattr(scored, each.name), getattr(whole, each.name)) for each in fields(whole)]
    )


def _moved_inputs(inputs: SamplingInputs, device: torch.device) -> SamplingInputs:
    assert inputs.penalties is not None
    assert inputs.constraints is not None
    penalties = Penalties(*(getattr(inputs.penalties, each.name).to(device) for each in fields(Penalties)))
    constraints = Constraints(*(getattr(inputs.constraints, each.name).to(device) for each in fields(Constraints)))
    changes = {
        each.name: value.to(device)
        for each in fields(SamplingInputs)
        if isinstance(value := getattr(inputs, each.name), Tensor)
    }
    return replace(inputs, penalties=penalties, constraints=constraints, **changes)


def _rows(inputs: SamplingInputs, rows: slice) -> SamplingInputs:
    assert inputs.penalties is not None
    assert inputs.constraints is not None
    penalties = Penalties(*(getattr(inputs.penalties, each.name)[rows] for each in fields(Penalties)))
    names = ("bias_token_ids", "biases", "bias_lens", "mask_rows")
    constraints = replace(inputs.constraints, **{name: getattr(inputs.constraints, name)[rows] for name in names})
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
    first = torch.zeros(1, dtype=torch.int64, device=inputs.seed.device)
    changes = {name: getattr(inputs, name)[rows] for name in names}
    return replace(inputs, penalties=penalties, constraints=constraints, logprob_rows=first, **changes)
