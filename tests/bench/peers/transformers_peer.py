"""Hugging Face transformers: the eager model, SDPA, a growing cache. An adapter of `cluster/bench/side_process.py`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

LOWEST_TOKEN = 3


def environment(options: argparse.Namespace) -> dict[str, str]:
    return {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


def load(options: argparse.Namespace) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(options.cores))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    peer = Peer(model.eval())
    measures = {"decode": peer.decode, "prefill": peer.prefill}

    @torch.inference_mode()
    def measure(command: dict[str, Any]) -> dict[str, Any]:
        return measures[command.pop("measure")](**command)

    return measure


class Peer:
    def __init__(self, model: Any) -> None:
        self._model = model

    def decode(self, streams: int, context: int, steps: int, warm_up: int, seed: int) -> dict[str, Any]:
        """Steps of a batch whose cache is random numbers: how the KV came to be does not matter to a step."""
        import torch
        from transformers import DynamicCache

        config = self._model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            keys = torch.randn(streams, config.num_key_value_heads, context, head_dim).bfloat16()
            cache.update(keys, keys.clone(), layer)
        tokens = self._random_tokens(streams, 1, seed)
        seconds = []
        for _ in range(warm_up + steps):
            started = time.perf_counter()
            output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.tolist()
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds[warm_up:]}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        """One forward pass over a prompt, and the first token."""
        prompt = self._random_tokens(1, tokens, seed)
        started = time.perf_counter()
        output = self._model(prompt, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].argmax(-1).tolist()
        return {"seconds": [time.perf_counter() - started]}

    def _random_tokens(self, rows: int, columns: int, seed: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(seed)
        return torch.randint(LOWEST_TOKEN, self._model.config.vocab_size, (rows, columns), generator=generator)
