"""Which safetensors files make up a checkpoint, and what their headers promise. No tensor data is read; no torch."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.workers.errors import ModelError
from tandem.workers.models.config_file import JsonFile

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}

_MAX_HEADER_BYTES = 100_000_000
_PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: where it lies and what it is. `start` and `end` are byte offsets in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    stored_name: str | None = None
    """In the file, where it is another one."""


def find_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint by name. Raises `ModelError` for missing, torn, pickled or contradictory files."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.exists():
        return read_header(single)
    if index.exists():
        return _read_shards(folder, JsonFile(index))
    pickled = sorted(path.name for pattern in _PICKLED_PATTERNS for path in folder.glob(pattern))
    if pickled:
        raise ModelError(f"{folder / pickled[0]} holds pickled weights, which can run code: convert it to safetensors")
    raise ModelError(f"{folder} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there")


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, checked against its size."""
    size, header_end, header = _read_header_object(path)
    tensors: dict[str, TensorEntry] = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = value["dtype"], tuple(map(int, value["shape"])), value["data_offsets"]
            entry = TensorEntry(path, str(dtype), shape, header_end + int(start), header_end + int(end))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: the header's entry for {name} is malformed") from error
        _check_entry(name, entry, header_end)
        tensors[name] = entry
    promised = max((entry.end for entry in tensors.values()), default=header_end)
    if promised > size:
        raise ModelError(f"{path} is truncated: its header promises {promised} bytes, but it has {size}")
    if promised < size:
        raise ModelError(f"{path} is damaged: it has {size} bytes, but its header promises {promised}")
    return tensors


def _read_header_object(path: Path) -> tuple[int, int, dict[str, Any]]:
    """(bytes in the file, offset of the first tensor byte, the header)."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ModelError(f"{path} is truncated: {size} bytes do not hold its header")
            if length > _MAX_HEADER_BYTES:
                raise ModelError(f"{path} is not a safetensors file: its header would have {length} bytes")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is not an object")
    return size, 8 + length, header


def _check_entry(name: str, entry: TensorEntry, header_end: int) -> None:
    if entry.dtype not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise ModelError(f"{entry.file}: {name} has dtype {entry.dtype}, which is not supported (supported: {known})")
    num_bytes = math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype]
    if entry.start < header_end or entry.end - entry.start != num_bytes:
        raise ModelError(f"{entry.file}: {name} of shape {list(entry.shape)} does not fit its {entry.dtype} data")


def _read_shards(folder: Path, index: JsonFile) -> dict[str, TensorEntry]:
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise index.fail("weight_map is missing or empty")
    tensors: dict[str, TensorEntry] = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise index.fail(f"{shard!r} is not the name of a safetensors file in this folder")
        if not (folder / shard).exists():
            raise ModelError(f"{folder / shard} is missing: {index.path.name} names it as a shard")
        for name, entry in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise index.fail(f"it does not place {name} in {shard}, where it is")
            tensors[name] = entry
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise index.fail(f"it places {missing[0]} in {weight_map[missing[0]]}, where it is not")
    return tensors
