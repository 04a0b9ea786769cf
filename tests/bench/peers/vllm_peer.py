"""vLLM on a CPU: one compiled engine, stepped by hand. An adapter of `cluster/bench/side_process.py`."""

from __future__ import annotations

import argparse
import ctypes.util
import itertools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_SIZE = 128
"""vLLM's own on a CPU. A context is computed once and found in the prefix cache in later rounds."""
LOWEST_TOKEN = 3


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What vLLM's documentation asks for on a CPU: these two libraries preloaded, threads bound to cores."""
    folder = Path(sys.prefix) / "lib"
    libraries = [folder / "libtcmalloc_minimal.so.4", folder / "libiomp5.so"]
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    preloaded = [str(path) for path in libraries if path.exists()]
    if not libraries[0].exists() and allocator is not None:
        preloaded.insert(0, allocator)
    return {
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, options.cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(options.scratch / f"vllm-{len(options.cores)}"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def load(options: argparse.Namespace) -> Callable[[dict[str, Any]], dict[str, Any]]:
    from vllm import LLM

    llm = LLM(
        model=str(options.model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=options.max_len,
        max_num_seqs=options.max_seqs,
        enable_prefix_caching=True,
    )
    peer = Peer(llm.llm_engine, llm.model_config.get_vocab_size())
    measures = {"decode": peer.decode, "prefill": peer.prefill}

    def measure(command: dict[str, Any]) -> dict[str, Any]:
        return measures[command.pop("measure")](**command)

    peer.decode(1, 32, 2, 1, 0)
    peer.prefill(64, 0)
    return measure


class Peer:
    def __init__(self, engine: Any, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._numbers = itertools.count()

    def decode(self, streams: int, context: int, steps: int, warm_up: int, seed: int) -> dict[str, Any]:
        """Steps in which every stream gets a token. Prompts are those of earlier rounds, so mostly cached: how the KV
        came to be does not matter to a decode step."""
        names = [self._add(context, seed + index, warm_up + steps + 8) for index in range(streams)]
        have = dict.fromkeys(names, 0)
        while min(have.values()) < 1:
            self._step(have)
        # A sequence that began earlier than the last one is a few tokens ahead; nobody may end while we measure.
        seconds = []
        for number in range(warm_up + steps):
            started = time.perf_counter()
            gained = self._step(have)
            seconds.append(time.perf_counter() - started)
            if number >= warm_up and gained != streams:
                raise RuntimeError(f"a step gave {gained} tokens to {streams} streams")
        self._end(names)
        return {"seconds": seconds[warm_up:]}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        """From handing in a fresh prompt to its first token."""
        name = self._add(tokens, seed, 4)
        have = {name: 0}
        started = time.perf_counter()
        while have[name] < 1:
            self._step(have)
        elapsed = time.perf_counter() - started
        self._end([name])
        return {"seconds": [elapsed]}

    def _add(self, tokens: int, seed: int, max_tokens: int) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        name = str(next(self._numbers))
        prompt = random.Random(seed).choices(range(LOWEST_TOKEN, self._vocab_size), k=tokens)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _step(self, have: dict[str, int]) -> int:
        """One step; tokens that it gave to all of `have` together."""
        before = sum(have.values())
        for output in self._engine.step():
            if output.request_id in have:
                have[output.request_id] = len(output.outputs[0].token_ids)
        return sum(have.values()) - before

    def _end(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
