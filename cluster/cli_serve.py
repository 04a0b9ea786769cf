"""The command `tandem serve`: every setting of a cluster as a flag. The same flags are taken by `tandem config` and
`tandem gateway`, and named in files and in the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

SERVE_HELP = """
Start a cluster on this machine and serve an OpenAI-compatible API until Ctrl-C.

MODEL is a folder in Hugging Face format, a .gguf file, a model hub id (owner/name), or smollm2-135m-instruct.

Examples:

    tandem serve smollm2-135m-instruct

    tandem serve ./Qwen3-0.6B --prefill 1 --decode 2

    tandem serve model.gguf --aggregated 1 --port 9000

    tandem serve --config cluster.yaml --api-key SECRET

A configuration file is YAML with the names of the flags: `decode: 2`, `max-model-len: 4096` (or TOML, in a file
named .toml). Every flag has a twin in the environment: TANDEM_DECODE=2. The command line wins over the environment, and
that over the file; `tandem config --print` shows what comes out.
"""

DtypeChoice = Literal["auto", "bfloat16", "float16", "float32"]
TransferChoice = Literal["nixl", "nccl"]
CpuLevelChoice = Literal["auto", "amx_bf16", "avx512_bf16", "avx512", "avx2", "plain"]

POOLS = "Workers"
CHAT = "Chat"
NETWORK = "Network"
ENGINE = "Engine"
ROUTER = "Router"
CLUSTER = "Several machines"
OPERATION = "Operation"
RESOURCES: dict[str, Any] = {"show_default": "its threads, and a GPU with --device cuda", "rich_help_panel": CLUSTER}
PolicyChoice = Literal["cost", "round-robin", "least-loaded", "prefix"]
CallParserChoice = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"]
ReasoningParserChoice = Literal["auto", "think", "none"]
PlacementChoice = Literal["pack", "spread", "strict-pack", "strict-spread"]


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command(help=SERVE_HELP)(serve)


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a .gguf file, a hub id, or smollm2-135m-instruct.", show_default="--config's"),
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="Workers that read prompts.", show_default="1", rich_help_panel=POOLS)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Workers that write tokens.", show_default="1", rich_help_panel=POOLS)
    ] = None,
    aggregated: Annotated[
        int, typer.Option(help="Workers that do both. Alone, there are no others.", rich_help_panel=POOLS)
    ] = 0,
    prefill_max: Annotated[
        int | None,
        typer.Option(help="Grow that pool under load up to so many.", show_default="--prefill", rich_help_panel=POOLS),
    ] = None,
    decode_max: Annotated[
        int | None, typer.Option(help="The same for decode.", show_default="--decode", rich_help_panel=POOLS)
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the public port.", rich_help_panel=NETWORK)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The API. 0: any free port.", rich_help_panel=NETWORK)] = 8000,
    admin_port: Annotated[
        int, typer.Option(help="/metrics and /cluster, without authentication. 0: any.", rich_help_panel=NETWORK)
    ] = 8001,
    admin_host: Annotated[str, typer.Option(help="Address of the admin port.", rich_help_panel=NETWORK)] = "127.0.0.1",
    gateways: Annotated[
        int,
        typer.Option(
            help="Gateway processes that share the public port. Limits hold for each: requests and tokens in flight, "
            "connections, --max-queue; --slo-ttft and --slo-itl see what others route as far as workers tell.",
            rich_help_panel=NETWORK,
        ),
    ] = 1,
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="Redis for the prefix index and for what gateways share (redis://, rediss://, unix://, "
            "redis+sentinel://).",
            show_default="an embedded server",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients must send. Repeat for several.", rich_help_panel=NETWORK),
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="A file with such keys, one per line.", rich_help_panel=NETWORK)
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="A Jinja file.", show_default="the model's own", rich_help_panel=CHAT),
    ] = None,
    tool_call_parser: Annotated[
        CallParserChoice,
        typer.Option(help="How the model writes calls of tools. auto: see its template.", rich_help_panel=CHAT),
    ] = "auto",
    reasoning_parser: Annotated[
        ReasoningParserChoice, typer.Option(help="How it writes its thoughts.", rich_help_panel=CHAT)
    ] = "auto",
    transfer: Annotated[TransferChoice, typer.Option(help="How KV travels.", rich_help_panel=ENGINE)] = "nixl",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where workers compute.", rich_help_panel=ENGINE)
    ] = "auto",
    cpu_level: Annotated[
        CpuLevelChoice,
        typer.Option(
            help="Instruction set of the kernels on CPUs. Machines of different kinds compute the same tokens at the "
            "lowest one that all have. auto: the best of each machine.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto",
    dtype: Annotated[DtypeChoice, typer.Option(help="Of weights and KV.", rich_help_panel=ENGINE)] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=ENGINE)] = 32,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of prompt and answer together.", show_default="the model's", rich_help_panel=ENGINE
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences per step of a worker.", rich_help_panel=ENGINE)] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens per step; prompts are read in chunks of it.", rich_help_panel=ENGINE)
    ] = 512,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            help="KV memory per worker.",
            show_default="a share of the machine, at most 1 GiB; on a GPU what --gpu-memory-utilization leaves",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            help="Of a GPU's memory: what its workers take together, weights and all, if --kv-cache-memory-bytes does "
            "not say how much KV there is.",
            rich_help_panel=ENGINE,
        ),
    ] = 0.9,
    kv_host_memory_bytes: Annotated[
        int,
        typer.Option(
            help="Host memory per worker for KV blocks that its cache gives up; they come back on a hit. 0: none.",
            rich_help_panel=ENGINE,
        ),
    ] = 0,
    kv_disk_path: Annotated[
        str | None,
        typer.Option(
            help="A folder on local disk for blocks that memory gives up. Found again by a later start with the same "
            "--cluster-key and the same model.",
            show_default="none",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    kv_disk_bytes: Annotated[
        int | None,
        typer.Option(
            help="Most bytes there per worker; needed with --kv-disk-path.", show_default="none", rich_help_panel=ENGINE
        ),
    ] = None,
    tuning_deadline: Annotated[
        float,
        typer.Option(
            help="Most seconds to time kernels in at a first start; see tandem tune. 0: never.", rich_help_panel=ENGINE
        ),
    ] = 60.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of requests that give none, so that they, too, get the same answers each time.",
            show_default="drawn for each request",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    router_policy: Annotated[
        PolicyChoice,
        typer.Option(
            help="How workers are chosen: cost, by predicted times. To compare: prefix, by what they hold; "
            "least-loaded and round-robin, which do not ask the index.",
            rich_help_panel=ROUTER,
        ),
    ] = "cost",
    slo_ttft: Annotated[
        float | None,
        typer.Option(
            help="Hold back, then refuse (429) what would wait longer for its first token. Seconds.",
            show_default="no limit",
            rich_help_panel=ROUTER,
        ),
    ] = None,
    slo_itl: Annotated[
        float | None,
        typer.Option(
            help="The same for the time between tokens, which prompts read by decode workers must not exceed either.",
            show_default="no limit",
            rich_help_panel=ROUTER,
        ),
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(help="Sequences in a gateway at once; more get 429.", rich_help_panel=ROUTER)
    ] = 1024,
    slow_reader_timeout: Annotated[
        float,
        typer.Option(help="Seconds for which a client may read nothing of its stream.", rich_help_panel=ROUTER),
    ] = 30.0,
    max_queue: Annotated[
        int, typer.Option(help="Requests held back at once, where there are such limits.", rich_help_panel=ROUTER)
    ] = 256,
    address: Annotated[
        str | None,
        typer.Option(
            help="Join a running Ray: auto, or HOST:PORT of its head.", show_default="our own", rich_help_panel=CLUSTER
        ),
    ] = None,
    prefill_resources: Annotated[
        str | None, typer.Option(help="What one takes of a machine, in Ray's words: GPU=1,prefill=1.", **RESOURCES)
    ] = None,
    decode_resources: Annotated[str | None, typer.Option(help="The same for decode workers.", **RESOURCES)] = None,
    aggregated_resources: Annotated[str | None, typer.Option(help="The same for aggregated ones.", **RESOURCES)] = None,
    placement: Annotated[
        PlacementChoice, typer.Option(help="Of the workers of one pool over the machines.", rich_help_panel=CLUSTER)
    ] = "pack",
    worker_threads: Annotated[
        int | None,
        typer.Option(help="Compute threads of a worker.", show_default="cores / workers", rich_help_panel=CLUSTER),
    ] = None,
    worker_host: Annotated[
        str | None,
        typer.Option(
            help="Where workers listen: the network that the machines share, such as 10.0.0.0/8.",
            show_default="loopback; with --address each machine's address in Ray",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    worker_ports: Annotated[
        str | None, typer.Option(help="Of the workers: FIRST-LAST.", show_default="any", rich_help_panel=CLUSTER)
    ] = None,
    transfer_ports: Annotated[
        str | None,
        typer.Option(help="Of NIXL over TCP: FIRST-LAST.", show_default="any", rich_help_panel=CLUSTER),
    ] = None,
    cluster_key: Annotated[
        str | None,
        typer.Option(
            help="Shared by workers and gateways. Better given as TANDEM_CLUSTER_KEY.",
            show_default="a random one",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have at a stop.", rich_help_panel=OPERATION)
    ] = 5.0,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of standard error.", rich_help_panel=OPERATION)
    ] = "text",
    metrics_compat: Annotated[
        Literal["none", "vllm"],
        typer.Option(help="Show metrics under these names, too.", rich_help_panel=OPERATION),
    ] = "none",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send a trace of each request to this OpenTelemetry collector: http://HOST:4318.",
            show_default="no traces",
            rich_help_panel=OPERATION,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="TANDEM_CONFIG", help="A YAML or TOML file with the names of these flags.")
    ] = None,
) -> None:
    from tandem.cluster.config import load_config

    cluster_config = load_config(given_flags(context), config, os.environ)
    # here: a mistake in a flag should not wait for the imports
    from tandem.cluster.app import run
    from tandem.cluster.logs import configure_logging
    from tandem.cluster.progress import create_progress

    configure_logging(cluster_config.log_format)
    run(cluster_config, create_progress(sys.stderr, as_records=cluster_config.log_format == "json"))


def given_flags(context: typer.Context) -> dict[str, Any]:
    """What was on the command line: defaults must not win over a configuration file."""
    return {
        name: value
        for name, value in context.params.items()
        if name != "config" and getattr(context.get_parameter_source(name), "name", None) == "COMMANDLINE"
    }
