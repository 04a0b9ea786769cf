"""llama.cpp through llama-cpp-python's C bindings. An adapter of `cluster/bench/side_process.py`.

Variants: bf16 (the default: the same weights), q8_0, q4_1.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import gguf_writer
import llama_cpp
import numpy as np

LOWEST_TOKEN = 3
MAX_BATCH = 2048


def load(options: argparse.Namespace) -> Callable[[dict[str, Any]], dict[str, Any]]:
    kind = options.variant or "bf16"
    path = options.scratch / f"{options.model.name}-{kind}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        gguf_writer.write_gguf(options.model, unfinished, kind)
        unfinished.rename(path)
    peer = Peer(str(path), len(options.cores), options.max_len, options.max_seqs)
    measures = {"decode": peer.decode, "prefill": peer.prefill}
    label = "bfloat16" if kind == "bf16" else kind

    def measure(command: dict[str, Any]) -> dict[str, Any]:
        return measures[command.pop("measure")](**command) | {"format": label}

    return measure


class Peer:
    def __init__(self, path: str, num_threads: int, max_len: int, max_seqs: int) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"{path} cannot be loaded")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = max_len * max_seqs, max_seqs
        params.n_batch = MAX_BATCH
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = False  # a context of its own for each sequence
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("no context for these sizes")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)

    def decode(self, streams: int, context: int, steps: int, warm_up: int, seed: int) -> dict[str, Any]:
        """Steps of a batch whose contexts are copies of one that was computed: each in memory of its own."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._prefill(self._random_tokens(context, seed))
        for index in range(1, streams):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, index, -1, -1)
        tokens = self._random_tokens(streams, seed + 1)
        seconds = []
        for number in range(warm_up + steps):
            started = time.perf_counter()
            self._run(tokens, [context + number] * streams, range(streams), [True] * streams)
            tokens = [self._best(index) for index in range(streams)]
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds[warm_up:]}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        """A fresh prompt in an empty context, and the first token."""
        llama_cpp.llama_memory_clear(self._memory, True)
        prompt = self._random_tokens(tokens, seed)
        started = time.perf_counter()
        self._prefill(prompt)
        return {"seconds": [time.perf_counter() - started]}

    def _prefill(self, prompt: Sequence[int]) -> int:
        """Compute a prompt as sequence 0; its next token."""
        for start in range(0, len(prompt), MAX_BATCH):
            part = prompt[start : start + MAX_BATCH]
            wanted = [start + index + 1 == len(prompt) for index in range(len(part))]
            self._run(part, range(start, start + len(part)), [0] * len(part), wanted)
        return self._best(-1)

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wants_logits: Sequence[bool]
    ) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        rows = zip(tokens, positions, sequences, wants_logits, strict=True)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, row: int) -> int:
        """The most likely token after one row of the last batch."""
        address = llama_cpp.llama_get_logits_ith(self._context, row)
        logits = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))
        return int(logits.argmax())

    def _random_tokens(self, count: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(LOWEST_TOKEN, self._vocab_size), k=count)
