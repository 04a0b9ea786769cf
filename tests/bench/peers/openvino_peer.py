"""OpenVINO GenAI, continuous batching, int8 weights. An adapter of `cluster/bench/side_process.py`.

Weights are converted once with `optimum-cli` of the same environment, which takes some minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOWEST_TOKEN = 3


def load(options: argparse.Namespace) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import openvino_genai

    kind = options.variant or "int8"
    folder = options.scratch / f"{options.model.name}-openvino-{kind}"
    if not folder.exists():
        _convert(options.model, folder, kind)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = options.max_seqs
    scheduler.max_num_batched_tokens = max(options.max_len, 2048)
    scheduler.enable_prefix_caching = True
    settings = {"INFERENCE_NUM_THREADS": len(options.cores)}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", settings)
    peer = Peer(pipeline, json.loads((options.model / "config.json").read_text())["vocab_size"])
    measures = {"decode": peer.decode, "prefill": peer.prefill}

    def measure(command: dict[str, Any]) -> dict[str, Any]:
        return measures[command.pop("measure")](**command) | {"format": kind}

    return measure


def _convert(model: Path, folder: Path, kind: str) -> None:
    unfinished = folder.with_suffix(".unfinished")
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", "--weight-format", kind, str(unfinished)]
    subprocess.run(command, check=True)
    unfinished.rename(folder)


class Peer:
    def __init__(self, pipeline: Any, vocab_size: int) -> None:
        self._pipeline = pipeline
        self._vocab_size = vocab_size
        self._numbers = itertools.count()

    def decode(self, streams: int, context: int, steps: int, warm_up: int, seed: int) -> dict[str, Any]:
        """Steps in which every stream gets a token; prompts are those of earlier rounds, so mostly cached."""
        handles = [self._add(context, seed + index, warm_up + steps + 8) for index in range(streams)]
        waiting = set(range(streams))
        while waiting:
            self._pipeline.step()
            waiting -= {index for index in waiting if _read(handles[index])}
        seconds = []
        for _ in range(warm_up + steps):
            started = time.perf_counter()
            self._pipeline.step()
            seconds.append(time.perf_counter() - started)
        self._end(handles)
        return {"seconds": seconds[warm_up:]}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        """From handing in a fresh prompt to its first token."""
        handle = self._add(tokens, seed, 4)
        started = time.perf_counter()
        while not _read(handle):
            self._pipeline.step()
        elapsed = time.perf_counter() - started
        self._end([handle])
        return {"seconds": [elapsed]}

    def _add(self, tokens: int, seed: int, max_new_tokens: int) -> Any:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True, do_sample=False)
        prompt = random.Random(seed).choices(range(LOWEST_TOKEN, self._vocab_size), k=tokens)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(next(self._numbers), ids, config)

    def _end(self, handles: list[Any]) -> None:
        for handle in handles:
            handle.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def _read(handle: Any) -> bool:
    """Whether tokens had come, which are taken away."""
    if not handle.can_read():
        return False
    handle.read()
    return True
