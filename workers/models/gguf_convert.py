"""A GGUF file as a folder in Hugging Face format, so that workers only ever load safetensors.

    read_gguf (header) -> config.json, tokenizer files -> per tensor: dequantise, un-permute, cast -> safetensors

At most one shard of weights is in memory at a time, whatever the size of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from tandem.workers.models.checkpoint import DtypeName, expected_shapes
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.config_file import read_config
from tandem.workers.models.gguf_config import ROPE_FACTORS, config_of, pooling_of
from tandem.workers.models.gguf_file import GgufFile, GgufTensor
from tandem.workers.models.gguf_tokenizer import write_tokenizer
from tandem.workers.models.safetensors_file import INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 2 << 30
_CHUNK_ELEMENTS = 16 << 20
"""Elements dequantised at a time: float32 intermediates stay under a few hundred MiB for the widest embedding."""

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_DTYPES: dict[DtypeName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert_gguf(file: GgufFile, folder: Path, dtype: DtypeName, progress: Progress | None = None) -> None:
    """Write the model into `folder`, which exists and is empty, as `dtype`. Raises `ModelError`, `OSError`."""
    _write_json(folder / "config.json", config_of(file, dtype))
    config = read_config(folder)
    _write_json(folder / "generation_config.json", _generation_config(folder))
    if (pooling := pooling_of(file)) is not None:
        (folder / "1_Pooling").mkdir()
        _write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    sources = _match_tensors(file, config)
    write_tokenizer(file, folder)
    _write_weights(file, folder, sources, config, dtype, progress or (lambda done, total: None))


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, _, layer, *module, kind = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES['.'.join(module)]}.{kind}"


def _generation_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config[name] is not None}


def _match_tensors(file: GgufFile, config: ModelConfig) -> dict[str, GgufTensor | None]:
    """Hugging Face name -> tensor of the file, all names and shapes checked. None: a bias that is to be zero."""
    matched: dict[str, GgufTensor | None] = {}
    for name, shape in expected_shapes(config).items():
        source = gguf_name(name)
        tensor = file.tensors.get(source)
        # Llama's configuration has one switch for all four biases; converted Qwen models have the first three only.
        if tensor is None and not (config.output_bias and source.endswith("attn_output.bias")):
            raise file.fail(f"tensor {source} is missing")
        if tensor is not None and tensor.shape != shape:
            raise file.fail(f"{source} has shape {list(tensor.shape)}, but its metadata demands {list(shape)}")
        matched[name] = tensor
    used = {tensor.name for tensor in matched.values() if tensor is not None}
    surplus = sorted(file.tensors.keys() - used - {ROPE_FACTORS})
    if surplus:
        raise file.fail(f"tensor {surplus[0]} has no place in this model")
    return matched


def _write_weights(
    file: GgufFile,
    folder: Path,
    sources: dict[str, GgufTensor | None],
    config: ModelConfig,
    dtype: DtypeName,
    progress: Progress,
) -> None:
    shapes = expected_shapes(config)
    shards = list(_shards(shapes, _DTYPES[dtype].itemsize))
    weight_map: dict[str, str] = {}
    done = 0
    for number, names in enumerate(shards, start=1):
        shard = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors[name] = _convert(file, name, sources[name], shapes[name], config, _DTYPES[dtype])
            done += 1
            progress(done, len(shapes))
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * _DTYPES[dtype].itemsize
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(shapes: dict[str, tuple[int, ...]], element_bytes: int) -> Iterator[list[str]]:
    """Names in order, cut wherever the next tensor would make a shard larger than `SHARD_BYTES`."""
    names: list[str] = []
    num_bytes = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * element_bytes
        if names and num_bytes + size > SHARD_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    yield names


def _convert(
    file: GgufFile,
    name: str,
    tensor: GgufTensor | None,
    shape: tuple[int, ...],
    config: ModelConfig,
    dtype: torch.dtype,
) -> torch.Tensor:
    if tensor is None:
        return torch.zeros(shape, dtype=dtype)
    values = _dequantise(file, tensor, dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(values).all()):
        raise file.fail(f"{tensor.name} does not fit into float16: serve it as bfloat16")
    if config.architecture == "llama" and ".q_proj." in name:
        values = _unpermute(values, config.num_heads)
    if config.architecture == "llama" and ".k_proj." in name:
        values = _unpermute(values, config.num_kv_heads)
    return values


def _dequantise(file: GgufFile, tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as `dtype`, a bounded number of rows at a time."""
    raw = file.data(tensor)
    out = torch.empty((raw.shape[0], tensor.shape[-1]), dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // max(1, tensor.shape[-1]))
    # A quantised block may hold scales that are no numbers; gguf then warns through numpy, and so would a test run.
    with np.errstate(all="ignore"):
        for start in range(0, raw.shape[0], step):
            values = gguf.dequantize(np.ascontiguousarray(raw[start : start + step]), tensor.type)
            out[start : start + step] = torch.from_numpy(np.array(values, dtype=np.float32))
    return out.reshape(tensor.shape)


def _unpermute(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order for Llama's q and k (weights or biases), [num_heads * head_dim, ...].

    GGUF pairs the two elements that rotate together (0, 1), (2, 3), ...; Hugging Face keeps the halves apart:
    row 2 * i + j of a head goes to row j * head_dim / 2 + i.
    """
    halves = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape).contiguous()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
