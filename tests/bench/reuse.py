"""What routing by prefix is worth: the same load against `tandem serve` with one router policy after another.

    python tests/bench/reuse.py mooncake --trace mooncake_conversation.jsonl [--policies cost,round-robin] [--rounds 1]
    python tests/bench/reuse.py shared|turns

mooncake: a production trace, scaled down, its repeated contents repeated. shared: prompts that begin with one of many
long system prompts. turns: conversations, each turn of which repeats all before. Two prefill and two decode workers.
One server at a time, rounds alternate which policy begins, every run of a round sends the same prompts to a fresh
server. Prints the share of prompt tokens that came from a cache, beside what an endless cache would give, and
latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.cluster.bench.serve import ServeOptions, ServeReport, bench_serve
from tandem.cluster.bench.server_process import serving

MODEL = "smollm2-135m-instruct"
VOCAB = 49_000


def load(name: str, options: argparse.Namespace, url: str, seed: int) -> ServeOptions:
    common: dict[str, Any] = {"url": url, "num_tokens": VOCAB, "seed": seed, "duration_s": options.duration}
    common |= {"max_requests": options.max_requests, "num_warm_up": 4}
    if name == "mooncake":
        scales = {"length_scale": options.length_scale, "time_scale": options.time_scale}
        return ServeOptions(trace=options.trace, **scales, **common)
    rate = options.rate
    if name == "shared":
        shape = {"input_len": 1_088, "shared_prefix_len": 1_024, "num_shared_prefixes": 40, "output_len": 16}
    else:
        shape = {"input_len": 512, "input_len_spread": 256, "output_len": 32, "num_turns": 4, "turn_input_len": 48}
    return ServeOptions(rate=rate, **shape, **common)


def row(policy: str, report: ServeReport) -> str:
    summary = report.summary
    assert summary.ttft is not None
    assert summary.cached_share is not None
    assert summary.ideal_cached_share is not None
    share = summary.cached_share / summary.ideal_cached_share if summary.ideal_cached_share else float("nan")
    ttft = f"{summary.ttft.p50:.3f} / {summary.ttft.p90:.3f}"
    itl = f"{1e3 * summary.itl_per_request.p50:.0f}" if summary.itl_per_request else "n/a"
    counts = f"{summary.num_ok}, {summary.num_failed} failed" if summary.num_failed else f"{summary.num_ok}"
    recomputed = max((turn.most_recomputed for turn in summary.turns[1:]), default=None)
    cells = (policy, counts, f"{summary.cached_share:.1%}", f"{summary.ideal_cached_share:.1%}", f"{share:.1%}")
    return f"| {' | '.join(cells)} | {ttft} | {itl} | {'' if recomputed is None else recomputed} |"


async def compare(options: argparse.Namespace) -> list[str]:
    head = ("policy", "requests", "cached", "endless cache", "of it", "TTFT p50 / p90, s", "ITL p50, ms")
    lines = [f"| {' | '.join(head)} | most recomputed in a later turn |", "| --- |" + " ---: |" * 7]
    for number in range(options.rounds):
        seed = secrets.randbelow(1 << 30)
        for policy in options.policies if number % 2 == 0 else options.policies[::-1]:
            _note(f"round {number + 1}: {policy}")
            arguments = [MODEL, "--prefill", "2", "--decode", "2", "--router-policy", policy, *options.serve_argument]
            arguments += ["--kv-cache-memory-bytes", str(options.kv_bytes)]
            async with serving(arguments) as server:
                report = await bench_serve(load(options.load, options, server.url, seed))
            lines.append(row(policy, report))
            _note(lines[-1])
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps({"policy": policy, "summary": asdict(report.summary)}) + "\n")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=("mooncake", "shared", "turns"))
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, for that load")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["cost", "round-robin"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2.0, help="requests (conversations) per second")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals")
    parser.add_argument("--max-requests", type=int)
    parser.add_argument("--length-scale", type=float, default=1 / 32)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--kv-bytes", type=int, default=3 << 30, help="KV cache per worker")
    parser.add_argument("--serve-argument", action="append", default=[], help="passed on to tandem serve; repeat")
    parser.add_argument("--json", type=Path, help="append every run's summary to this file")
    options = parser.parse_args()
    if options.load == "mooncake" and options.trace is None:
        parser.error("the mooncake load needs --trace FILE")
    sys.stdout.write("\n".join(asyncio.run(compare(options))) + "\n")


def _note(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


if __name__ == "__main__":
    main()
