"""Checks of a GGUF file that read no tensor data and need no torch, for the command line."""

from __future__ import annotations

from pathlib import Path

from tandem.workers.models.checkpoint import DtypeName
from tandem.workers.models.gguf_config import config_of
from tandem.workers.models.gguf_file import GgufFile, read_gguf
from tandem.workers.models.gguf_tokenizer import check_tokenizer


def check_gguf(path: Path) -> GgufFile:
    """Everything that can be known without reading tensor data. Raises `ModelError`; takes well under a second."""
    file = read_gguf(path)
    config_of(file, "float32")
    check_tokenizer(file)
    return file


def default_gguf_dtype(file: GgufFile) -> DtypeName:
    """What `--dtype auto` means: float32 if all matrices are stored so, else bfloat16."""
    is_float32 = all(tensor.type.name == "F32" for tensor in file.tensors.values() if len(tensor.shape) > 1)
    return "float32" if is_float32 else "bfloat16"
