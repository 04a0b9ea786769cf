"""What the user calls MODEL, as a folder in Hugging Face format that has passed every check that needs no tensor data.

a folder                used where it is
a .gguf file            converted once, kept in the cache
smollm2-135m-instruct   the demo model: downloaded once, then as above
owner/name              a model hub id: safetensors, JSON and tokenizer files only
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.cluster.demo_model import DEMO_FILE, DEMO_NAME, DEMO_SHA256, download_demo, sha256_of
from tandem.cluster.model_cache import Progress, cache_folder, cached, ignore_progress
from tandem.workers.errors import ModelError
from tandem.workers.models.checkpoint import DtypeName, check_model, default_dtype, revision_of
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.gguf_check import check_gguf, default_gguf_dtype
from tandem.workers.models.gguf_file import CONVERTER_VERSION

DtypeChoice = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["cpu", "cuda"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
]
_HASHED_BYTES = 256 << 20
"""GGUF files up to this size are keyed by content (0.2 s); larger ones by header, size and time of change."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is ready to be served. `name` is what the API calls it; `dtype` is never "auto"."""

    folder: Path
    name: str
    dtype: DtypeName
    config: ModelConfig
    revision: str


def resolve_model(
    model: str, *, dtype: DtypeChoice = "auto", device: Device = "cpu", progress: Progress = ignore_progress
) -> ResolvedModel:
    """Find, fetch and convert MODEL as needed, and check it. Raises `ModelError`: one line naming file and reason."""
    path = Path(model).expanduser()
    if model == DEMO_NAME:
        return _finish(_demo_folder(dtype, progress), DEMO_NAME, dtype, device)
    if model and path.is_dir():
        return _finish(path.resolve(), path.resolve().name, dtype, device)
    if path.is_file() or path.suffix == ".gguf":
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a folder nor a .gguf file")
        return _finish(_converted(path.resolve(), dtype, progress), path.stem, dtype, device)
    if _HUB_ID.fullmatch(model):
        return _finish(_from_hub(model, progress), model, dtype, device)
    raise ModelError(f"{model!r} does not exist; give a folder, a .gguf file, a hub id (owner/name), or {DEMO_NAME}")


def _finish(folder: Path, name: str, dtype: DtypeChoice, device: Device) -> ResolvedModel:
    config = check_model(folder)
    resolved = default_dtype(folder, device=device) if dtype == "auto" else dtype
    return ResolvedModel(folder=folder, name=name, dtype=resolved, config=config, revision=revision_of(folder))


def _demo_folder(dtype: DtypeChoice, progress: Progress) -> Path:
    # The content is pinned, so a folder that was converted from it needs neither the file nor its digest again.
    resolved: DtypeName = "bfloat16" if dtype == "auto" else dtype
    entry = _converted_entry(DEMO_SHA256, resolved)

    def make(folder: Path) -> None:
        file = cache_folder() / "downloads" / DEMO_FILE
        if file.exists() and sha256_of(file) != DEMO_SHA256:
            file.unlink()  # damaged on disk: fetch it again
        cached(file, lambda target: download_demo(target, progress=progress), progress=progress)
        _convert(file, folder, resolved, progress)

    return cached(entry, make, progress=progress)


def _converted(path: Path, dtype: DtypeChoice, progress: Progress) -> Path:
    """The folder made from a GGUF file, now or earlier."""
    file = check_gguf(path)
    resolved = default_gguf_dtype(file) if dtype == "auto" else dtype
    entry = _converted_entry(_content_key(path, file.header_bytes), resolved)
    return cached(entry, lambda folder: _convert(path, folder, resolved, progress), progress=progress)


def _convert(path: Path, folder: Path, dtype: DtypeName, progress: Progress) -> None:
    from tandem.workers.models.gguf_convert import convert_gguf  # here: it imports torch

    file = check_gguf(path)
    folder.mkdir()
    convert_gguf(file, folder, dtype, lambda done, total: progress(f"converting {path.name} to {dtype}", done, total))


def _converted_entry(key: str, dtype: DtypeName) -> Path:
    return cache_folder() / "converted" / f"{key[:24]}-{dtype}-v{CONVERTER_VERSION}"


def _content_key(path: Path, header_bytes: int) -> str:
    status = path.stat()
    if status.st_size <= _HASHED_BYTES:
        return sha256_of(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(header_bytes))
    digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _from_hub(model: str, progress: Progress) -> Path:
    """The snapshot of a hub model, from the hub's own cache or the network."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"fetching {model} from the model hub", None, None)
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{model} is not on this machine, and the model hub cannot be reached") from error
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{model} cannot be fetched from the model hub: {reason}") from error
