"""How a model's hidden states become one vector of unit length: what the model's own files say.

    modules.json ──> 1_Pooling/config.json ──> "last", "mean" or "first"       a folder of sentence-transformers
    neither                                ──> "last": only the last token of a causal model has read all others

No torch: the gateway reads the same files, to refuse what cannot be done before anybody computes.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.workers.errors import ModelError
from tandem.workers.models.config_file import JsonFile

logger = logging.getLogger(__name__)

PoolingMode = Literal["last", "mean", "first"]

_MODES: dict[str, PoolingMode] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean",  # another length of the same vector
    "cls": "first",
    "cls_token": "first",
}
"""By the names of sentence-transformers."""
_HARMLESS_MODULES = ("Transformer", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """`refusal`: why this model gives no embeddings, in words for a client; None where it does."""

    mode: PoolingMode = "last"
    hidden_size: int = 0
    """Numbers in an embedding."""
    sizes: tuple[int, ...] = ()
    """Shorter embeddings that the model was trained for, where its files name them; empty: it does not say."""
    refusal: str | None = None

    @property
    def reads_whole(self) -> bool:
        """Whether the hidden states of tokens are needed whose KV may be cached already."""
        return self.mode != "last"


def read_pooling(folder: Path) -> Pooling:
    """What the model's files ask for. Never raises: a model that gives no embeddings may serve everything else."""
    try:
        config = JsonFile(folder / "config.json")
        refusal = _refusal_of(config)
        mode = _read_mode(folder)
        sizes = _sizes(config)
        hidden_size = config.size("hidden_size")
    except _CannotPool as error:
        return Pooling(refusal=str(error))
    except ModelError as error:
        logger.warning("no embeddings: %s", error)
        return Pooling(refusal="the files that say how this model makes embeddings cannot be read")
    return Pooling(mode, hidden_size, sizes, refusal)


class _CannotPool(Exception):
    """Said to clients: no paths in it."""


def _refusal_of(config: JsonFile) -> str | None:
    values = config.values
    if values.get("is_causal") is False or values.get("use_bidirectional_attention") is True:
        return "this model's embeddings need attention in both directions, which is not supported"
    return None


def _sizes(config: JsonFile) -> tuple[int, ...]:
    sizes = config.values.get("matryoshka_dimensions") or ()
    if not isinstance(sizes, list | tuple) or any(type(size) is not int or size < 1 for size in sizes):
        raise config.fail(f"matryoshka_dimensions must be a list of positive integers, but is {sizes!r}")
    return tuple(sorted(sizes))


def _read_mode(folder: Path) -> PoolingMode:
    path = folder / "modules.json"
    if path.exists():
        return _mode_of_modules(folder, _read_modules(path))
    path = folder / "1_Pooling" / "config.json"
    return _mode_of(JsonFile(path).values) if path.exists() else "last"


def _read_modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must hold a list of objects")
    return modules


def _mode_of_modules(folder: Path, modules: list[dict[str, Any]]) -> PoolingMode:
    mode: PoolingMode = "last"
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            # never outside the model's folder, whatever the file says
            path = folder / Path(str(module.get("path", ""))).name / "config.json"
            mode = _mode_of(JsonFile(path).values)
        elif kind not in _HARMLESS_MODULES:
            raise _CannotPool(f"this model's embeddings pass through a module '{kind[:40]}', which is not supported")
    return mode


def _mode_of(values: dict[str, Any]) -> PoolingMode:
    """Both spellings: `pooling_mode`, or one flag per mode (before)."""
    named = values.get("pooling_mode")
    if named is None:
        flags = (name for name, value in values.items() if name.startswith("pooling_mode_") and value is True)
        named = [name.removeprefix("pooling_mode_") for name in flags]
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list | tuple) or len(names) != 1 or names[0] not in _MODES:
        shown = ", ".join(str(name)[:40] for name in names) if isinstance(names, list | tuple) else str(names)[:40]
        raise _CannotPool(f"this model's embeddings are pooled by '{shown}', which is not supported")
    return _MODES[names[0]]
