"""A Hugging Face folder (Llama or Qwen2, bfloat16 safetensors) as a GGUF file without a tokenizer, for llama.cpp.

Needs `gguf` and numpy. Prompts are token ids, so that no vocabulary is wanted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, target: Path, kind: str) -> None:
    """Matrices as `kind` ("bf16", "q8_0", "q4_1"; embeddings of the latter as Q8_0), vectors as float32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, config["model_type"])
    _write_header(writer, config)
    for name, array in _tensors(folder):
        stem, _, suffix = name.rpartition(".")
        if config["model_type"] == "llama" and stem.endswith(("q_proj", "k_proj")):
            array = _permuted(array, config["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"])
        wanted = _type_of(stem, array, kind)
        writer.add_tensor(f"{_stem(stem)}.{suffix}", gguf.quants.quantize(array, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_header(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """Name and float32 content of every tensor. Read by hand: numpy knows no bfloat16."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] != "BF16":
                    raise ValueError(f"{name} is {entry['dtype']}, not BF16")
                file.seek(8 + size + entry["data_offsets"][0])
                bits = np.frombuffer(file.read(2 * math.prod(entry["shape"])), np.uint16)
                yield name, (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def _permuted(array: Array, num_heads: int) -> Array:
    """llama.cpp rotates pairs of neighbours, Hugging Face the two halves of a head."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _type_of(stem: str, array: Array, kind: str) -> gguf.GGMLQuantizationType:
    if array.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    if kind == "q4_1" and stem in ("model.embed_tokens", "lm_head"):
        kind = "q8_0"
    return gguf.GGMLQuantizationType[kind.upper()]


def _stem(stem: str) -> str:
    if stem in _NAMES:
        return _NAMES[stem]
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}"
