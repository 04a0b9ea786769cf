"""What the runtime needs to know of a decoder-only transformer: Llama, Mistral, Qwen2 and Qwen3 in one description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; the scaling parameters as in the checkpoint's `rope_scaling` or `rope_parameters`."""

    theta: float
    scaling: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and variants. Lengths in tokens, sizes in elements."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    """Per layer: how many of the last tokens (itself included) a token attends to; None or an empty tuple: all."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    attention_bias: bool = False
    """The q, k and v projections add a bias."""
    output_bias: bool = False
    """The attention's output projection adds a bias."""
    mlp_bias: bool = False
    """The gate, up and down projections add a bias."""
    generates: bool = True
    """False: the checkpoint has no language-model head, and serves for embeddings alone."""

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token adds, over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim
