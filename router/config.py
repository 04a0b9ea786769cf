"""Configuration of one gateway: frozen, validated once, torch-free."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.router.parsers.select import CallParserChoice, ReasoningParserChoice
from tandem.router.policy import POLICIES, PolicyName
from tandem.workers.errors import UserError


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one gateway needs to know. Lengths in tokens, sizes in bytes, times in seconds.

    Raises `UserError` naming the field when a value cannot work.
    """

    model_name: str
    tokenizer_folder: Path
    """A folder with tokenizer.json, and where there are such: tokenizer_config.json, chat_template.jinja,
    generation_config.json, config.json."""
    chat_template: Path | None = None
    """In the place of the model's own."""
    tool_call_parser: CallParserChoice = "auto"
    """How the model writes calls of tools. "auto": as its chat template shows."""
    reasoning_parser: ReasoningParserChoice = "auto"
    """How it writes its thoughts."""
    max_model_len: int
    cluster_key: bytes = b""
    """The key that workers are given; also keys the block hashes."""
    api_keys: tuple[str, ...] = ()
    """Empty: everybody may ask."""
    redis_url: str | None = None
    share_responses: bool = False
    """Keep stored responses in Redis, too, where all gateways of the cluster find them."""
    index_namespace: str = "default"
    """Separates clusters that share a Redis. Publishers and readers of one cluster must agree on it."""

    num_prefill: int = 0
    num_decode: int = 0
    num_aggregated: int = 0
    """How many workers of each role the cluster was started with: `/ready` asks for at least one of each kind that is
    not 0, `wait_ready` for all of them."""

    local_prefill_tokens: int = 64
    """A decode worker is asked to prefill itself when it misses at most this many prompt tokens."""
    max_in_flight: int = 1024
    """Sequences (choices of all prompts of all requests) in the house at once; more are turned away with 429."""
    max_in_flight_tokens: int = 4 << 20
    """Of the prompts of all requests in the house; more are turned away with 429."""
    max_num_choices: int = 128
    """Most sequences that one request may ask for: prompts times n."""
    max_num_inputs: int = 2048
    """Most texts whose embeddings one request may ask for."""
    max_num_input_tokens: int = 300_000
    """Of these together."""
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    slow_reader_timeout_s: float = 30.0
    """How long the client of a stream may read nothing at all, once too much waits for it, before it is given up."""
    max_migrations: int = 3
    """How often one request may be moved to another decode worker before the client gets an error."""
    heartbeat_s: float = 1.0
    max_missed_heartbeats: int = 3
    index_budget_s: float = 0.005

    router_policy: PolicyName = "cost"
    slo_ttft_s: float | None = None
    """Requests whose first token is predicted to come later are held back, and refused when it is too late for them."""
    slo_itl_s: float | None = None
    """The same for the time between tokens; also the longest step that a decode worker's streams may be made to wait
    for a prompt that it reads itself."""
    max_queue: int = 256
    """Requests that are held back at once, where there are such limits."""
    seed: int | None = None
    """Of requests that give none. None: one is drawn for each."""

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, rule: str) -> None:
            if not ok:
                raise UserError(f"{field} {rule}, but is {getattr(self, field)!r}")

        require(bool(self.model_name), "model_name", "must not be empty")
        require(self.max_model_len >= 2, "max_model_len", "must be at least 2")
        require(all(self.api_keys), "api_keys", "must not hold an empty key")
        require(self.local_prefill_tokens >= 0, "local_prefill_tokens", "must not be negative")
        require(self.router_policy in POLICIES, "router_policy", f"must be one of {', '.join(POLICIES)}")
        for field in ("slo_ttft_s", "slo_itl_s"):
            require(getattr(self, field) is None or getattr(self, field) > 0, field, "must be positive")
        for field in (
            "max_in_flight",
            "max_in_flight_tokens",
            "max_num_choices",
            "max_num_inputs",
            "max_num_input_tokens",
            "max_body_bytes",
            "max_missed_heartbeats",
        ):
            require(getattr(self, field) >= 1, field, "must be at least 1")
        for field in ("body_timeout_s", "request_timeout_s", "slow_reader_timeout_s", "heartbeat_s", "index_budget_s"):
            require(getattr(self, field) > 0, field, "must be positive")
        for field in ("num_prefill", "num_decode", "num_aggregated", "max_migrations", "max_queue"):
            require(getattr(self, field) >= 0, field, "must not be negative")
