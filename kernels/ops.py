"""The only door to the maths: what each op computes, and which backend computes it.

A backend is an object with the methods of `Ops`. All backends compute the same formulas; `reference` (plain torch) is
the definition of right. Rules that hold for every op of every backend:

* Batch invariance: the bits of one token's (row's) result depend on that row and, in attention, on its sequence's KV
  alone; never on the number of rows, the row's place among them, or what the others hold. Reductions therefore run in
  a fixed order that is a function of the model's shape only.
* Arithmetic in float32 whatever the storage dtype, rounded once at the end to the dtype of the output.
* `out`, where there is one, receives the result and is returned; without it a new tensor is made. Shapes depend on the
  arguments' shapes alone, and no op waits for the host, so that a step can be recorded and replayed.
* Weights, activations and the KV cache share one dtype: float32, bfloat16 or float16. Index tensors are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, TypeVar, cast

from torch import Tensor

from tandem.kernels.capture import Captured

T = TypeVar("T")

GREEDY_TEMPERATURE = 1e-5
"""Below it a row gets its most likely token."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight in the form that one backend's `linear` wants. Backends subclass it; only they look inside."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, eq=False)
class QKNorm:
    """Per-head RMSNorm of q and k before the rotation (Qwen3)."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Where the tokens of one step sit. Sequence i owns the rows query_starts[i] to query_starts[i + 1]."""

    positions: Tensor  # [num_tokens]: index of each token in its sequence
    slots: Tensor  # [num_tokens]: block_id * block_size + offset, where its K and V are written
    query_starts: Tensor  # [num_seqs + 1], ascending from 0; rows from the last on belong to nobody (padding)
    context_lens: Tensor  # [num_seqs]: tokens with KV once this step's are written; the step's are the last of them
    block_tables: Tensor  # [num_seqs, max_blocks]: block ids from position 0; what follows is any valid id


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A layout, with whatever a backend derives from it once per step for use in every layer."""

    layout: StepLayout


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Which tokens each row has seen. Rows without penalties have length 0 (and neutral factors)."""

    token_ids: Tensor  # [num_rows, max_len] int64: prompt, then generated tokens; what follows is any valid id
    prompt_lens: Tensor  # [num_rows] int64
    lens: Tensor  # [num_rows] int64: prompt and generated tokens
    presence: Tensor  # [num_rows] float32
    frequency: Tensor  # [num_rows] float32
    repetition: Tensor  # [num_rows] float32


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """What the rows are made to prefer, and what they may not choose. Rows without either have neutral entries."""

    bias_token_ids: Tensor  # [num_rows, max_len] int64: different ones; what follows the row's own is any valid id
    biases: Tensor  # [num_rows, max_len] float32
    bias_lens: Tensor  # [num_rows] int64
    mask_rows: Tensor  # [num_rows] int64: the mask that holds for this row; -1: none does
    masks: Tensor  # [num_masks, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 says whether token t may be chosen


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """How each row is sampled; one entry per row."""

    temperature: Tensor  # float32; below GREEDY_TEMPERATURE: the most likely token
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor  # float32 in (0, 1]
    min_p: Tensor  # float32 in [0, 1]
    seed: Tensor  # int64: the 64 bits of the (unsigned) seed
    choice: Tensor  # int64, 0 <= choice < 2**32
    position: Tensor  # int64, >= 0
    penalties: Penalties | None = None
    constraints: Constraints | None = None
    logprob_rows: Tensor | None = None  # int64, ascending: the rows whose logprobs are wanted
    num_top_logprobs: int = 0  # how many alternatives for each of them


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The chosen tokens, and natural-log probabilities for the rows of `logprob_rows` (None if there are none)."""

    token_ids: Tensor  # [num_rows] int64
    logprobs: Tensor | None  # [num_logprob_rows] float32, of the chosen token
    top_token_ids: Tensor | None  # [num_logprob_rows, num_top_logprobs] int64, most likely first
    top_logprobs: Tensor | None  # [num_logprob_rows, num_top_logprobs] float32


class Ops(Protocol):
    """The ops of one backend. T tokens, H heads, KVH KV heads, D head_dim, R rows, V vocabulary."""

    name: str

    def numerics(self) -> str:
        """What the bits of results depend on beside the arguments: BACKEND/HARDWARE/VERSION. Objects that say the same
        compute the same, wherever they are; those that differ may differ in any bit."""

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        """table[token_ids]. token_ids [T] int64, table [V, hidden] -> [T, hidden]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension. x [T, hidden], weight [hidden] -> [T, hidden].

        As in the Llama family, the normalised x is rounded to its dtype before it is multiplied with the weight.
        """

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        """residual += x, in place; then rms_norm(residual, weight, eps). x, residual [T, hidden] -> [T, hidden]."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Prepare weight [out_features, in_features] and bias [out_features]; once, at load. May keep a reference."""

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias. x [T, in_features] -> [T, out_features]. The language-model head is one, too."""

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Prepare stacked weights [2 * intermediate, in_features], gate rows first, and bias; once, at load.

        The result's `out_features` is the intermediate size.
        """

    def gate_up_silu(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """gate / (1 + exp(-gate)) * up, where (gate, up) = x @ weight.T + bias, rounded to x's dtype.

        x [T, in_features] -> [T, intermediate]. The products never travel through memory: twice the intermediate size
        is the widest thing that a step makes.
        """

    def plan_step(self, layout: StepLayout, kv_cache: Tensor, num_heads: int) -> StepPlan:
        """Derive once per step what `rope_and_write_kv` and `paged_attention` need in every layer.

        Raises `ValueError` if the layout does not fit the cache.
        """

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        qk_norm: QKNorm | None,
        kv_cache: Tensor,
        layer: int,
        plan: StepPlan,
        out: Tensor | None = None,
    ) -> Tensor:
        """Normalise q and k per head (if `qk_norm`), rotate them, write k and v into their slots, return q.

        qkv [T, (H + 2 * KVH) * D]: q heads, k heads, v heads. cos, sin [T, D / 2] float32: the rows of the rotary table
        at the tokens' positions. kv_cache [num_blocks, KVH, num_layers, 2, block_size, D]. Returns q [T, H, D].
        With x1, x2 the halves of a head: (x1 * cos - x2 * sin, x2 * cos + x1 * sin).
        """

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        plan: StepPlan,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """softmax(scale * q k^T) v over the cached tokens at positions p with q_pos - window < p <= q_pos.

        With `softcap` (Gemma 2), softmax(softcap * tanh(scale * q k^T / softcap)).

        query [T, H, D] -> [T, H * D]. K and V of this step's tokens must have been written before. Query head h reads
        KV head h // (H / KVH). Slots behind a sequence's context may hold anything, NaN included.
        """

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        """Choose one token per row. logits [R, V], any dtype, left as they are; NaN counts as the lowest.

        1. Logprobs: log_softmax of the raw logits, so of the model's own distribution, whatever follows does to it.
        2. Biases: each is added to its token's logit.
        3. Penalties. Tokens of prompt and output: logit / repetition if positive, else logit * repetition. Tokens of
           the output: minus frequency * count, minus presence.
        4. Mask: the logit of a token that may not be chosen is the lowest finite number.
        5. Greedy rows: the largest logit; the lowest id among equals. The others: logit / temperature, then
        6. min-p removes tokens with p < min_p * max p; top-k those below the k-th largest logit (equals stay); top-p
           those before which, in descending order (lower id first among equals), p already sums to top_p or more.
           Each step sees the probabilities of what the previous one kept.
        7. u in [0, 1): 53 bits of Philox4x32-10, see `philox.py`. The token is the first in the order of ids at which
           the running float64 sum of exp(logit - max logit) over the kept tokens exceeds u * (the whole sum).
        8. Should that still be a token that may not be chosen, as in a row that the model or a bias spoilt, it is the
           lowest id that may; 0 where none may.
        """

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Sampled:
        """What `sample` says of these tokens had it chosen them: their logprobs, and the `num_top` most likely ones.

        logits [R, V] as above; token_ids [R] int64, which the result repeats.
        """

    def capture(self, step: Callable[[], T]) -> Captured[T] | None:
        """Record what `step` computes, see `capture.py`. None: this backend cannot, call `step` each time instead."""

    def run(self, step: Callable[[], T]) -> T:
        """Compute `step` once, now. A backend may gather its ops and run them together at the end."""


_BACKENDS = {
    "reference": "tandem.kernels.reference:ReferenceOps",
    "cpu": "tandem.kernels.cpu.backend:CpuOps",
    "triton": "tandem.kernels.triton.backend:TritonOps",
}
"""Backend name -> "module:class", imported when asked for: a missing compiler or library concerns only its users."""


def load_ops(name: str) -> Ops:
    """The ops of the backend `name`. Raises `ValueError` if there is none of that name."""
    if name not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(sorted(_BACKENDS))}, but is {name!r}")
    module, _, attribute = _BACKENDS[name].partition(":")
    make = cast(Callable[[], Ops], getattr(import_module(module), attribute))
    return make()
