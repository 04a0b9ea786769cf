"""A whole run against a server whose delays are known."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cluster.bench.cli import bench_app
from tandem.cluster.bench.plot import save_plot
from tandem.cluster.bench.report import ConsoleProgress, print_report, to_json
from tandem.cluster.bench.serve import ServeOptions, bench_serve
from tandem.workers.errors import UserError

ScriptedServer = Any


def options(server: ScriptedServer, **changes: Any) -> ServeOptions:
    values: dict[str, Any] = {"url": server.url, "num_warm_up": 0, "output_len": 8, "input_len": 20}
    return ServeOptions(**(values | changes))


async def test_a_closed_loop_measures_what_the_server_does(server: ScriptedServer) -> None:
    report = await bench_serve(options(server, concurrency=4, max_requests=12))
    summary = report.summary
    assert report.model == "scripted"
    assert (summary.num_ok, summary.num_failed, summary.output_tokens, summary.prompt_tokens) == (12, 0, 96, 480)
    assert summary.cached_share == 0.25
    assert server.most_running == 4
    assert summary.ttft is not None
    assert 0.03 <= summary.ttft.p50 < 0.06
    assert summary.itl_per_request is not None
    assert 0.0095 <= summary.itl_per_request.p50 < 0.02
    assert summary.itl_per_gap is not None
    assert summary.itl_per_gap.count == 12 * 7
    assert summary.end_to_end is not None
    assert 0.1 <= summary.end_to_end.p50 < 0.2
    # Three rounds of four requests, 0.1 s each.
    assert 0.3 <= summary.duration_s < 0.6
    assert summary.requests_per_s == pytest.approx(12 / summary.duration_s)
    assert summary.goodput.share == 1.0
    assert [record.number for record in report.records] == list(range(12))
    assert all(len(body["prompt"].split()) == 20 and body["ignore_eos"] for body in server.bodies)
    assert len({body["prompt"] for body in server.bodies}) == 12


async def test_poisson_arrivals_do_not_wait_for_the_server(server: ScriptedServer) -> None:
    server.ttft_s = 0.5
    report = await bench_serve(options(server, rate=100.0, duration_s=0.4, seed=3, output_len=1, slo_ttft_s=0.4))
    expected = len(list(options(server, rate=100.0, duration_s=0.4, seed=3, output_len=1).arrivals()))
    assert report.summary.num_ok == expected
    assert server.most_running == expected
    assert report.summary.itl_per_request is None
    assert report.summary.goodput.good == 0
    assert report.summary.start_delay is not None
    assert report.summary.start_delay.p90 < 0.1


async def test_chat_sends_messages_and_the_role_event_is_no_token(server: ScriptedServer) -> None:
    report = await bench_serve(
        options(server, concurrency=1, max_requests=2, api="chat", model="named", api_key="secret", ignore_eos=False)
    )
    assert report.model == "named"
    body = server.bodies[0]
    assert body["model"] == "named"
    assert body["messages"][0]["role"] == "user"
    assert len(body["messages"][0]["content"].split()) == 20
    assert "ignore_eos" not in body
    assert server.headers[0][b"authorization"] == b"Bearer secret"
    assert all(record.ttft_s is not None and record.ttft_s >= 0.03 for record in report.records)
    assert all(len(record.gaps_s) == 7 for record in report.records)


async def test_token_ids_and_shared_prefix_and_warm_up(server: ScriptedServer) -> None:
    report = await bench_serve(
        options(server, concurrency=1, max_requests=3, num_tokens=800, shared_prefix_len=8, num_warm_up=2)
    )
    assert report.summary.num_ok == 3
    prompts = [body["prompt"] for body in server.bodies]
    assert len(prompts) == 5
    assert all(len(prompt) == 20 and all(100 <= token < 800 for token in prompt) for prompt in prompts)
    measured = prompts[2:]
    assert len({tuple(prompt[:8]) for prompt in measured}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 5
    assert tuple(prompts[0][:8]) != tuple(measured[0][:8])


async def test_several_shared_prefixes(server: ScriptedServer) -> None:
    await bench_serve(options(server, concurrency=4, max_requests=30, shared_prefix_len=8, num_shared_prefixes=3))
    prompts = [body["prompt"].split() for body in server.bodies]
    beginnings = [tuple(prompt[:8]) for prompt in prompts]
    assert len(set(beginnings)) == 3
    assert min(beginnings.count(beginning) for beginning in set(beginnings)) > 2
    assert len({tuple(prompt) for prompt in prompts}) == 30


async def test_every_turn_begins_with_the_one_before_and_its_answer(server: ScriptedServer) -> None:
    sent = options(server, concurrency=2, max_requests=3, num_tokens=800, num_turns=3, turn_input_len=5, seed=1)
    report = await bench_serve(sent)
    assert report.summary.num_ok == 9
    prompts = sorted((body["prompt"] for body in server.bodies), key=len)
    assert [len(prompt) for prompt in prompts] == [20] * 3 + [33] * 3 + [46] * 3
    for earlier in prompts[:6]:  # the server says 7 eight times
        assert any(later[: len(earlier) + 8] == earlier + [7] * 8 for later in prompts)
    assert [record.turn for record in report.records] == [0, 1, 2] * 3
    assert [record.reusable_share for record in report.records] == [0.0, 28 / 33, 41 / 46] * 3
    assert report.summary.ideal_cached_share == pytest.approx((28 / 33 + 41 / 46) / 3)
    assert [(turn.turn, turn.count) for turn in report.summary.turns] == [(0, 3), (1, 3), (2, 3)]


async def test_a_chat_sends_its_whole_conversation_and_ends_with_its_first_failure(server: ScriptedServer) -> None:
    server.plan = {2: "503"}
    report = await bench_serve(
        options(server, concurrency=1, max_requests=2, api="chat", num_turns=2, turn_input_len=3, output_len=2)
    )
    first, second = server.bodies[0]["messages"], server.bodies[1]["messages"]
    assert second[:2] == [*first, {"role": "assistant", "content": "word word "}]
    assert len(second[2]["content"].split()) == 3
    assert len(server.bodies) == 3
    assert (report.summary.num_ok, report.summary.num_failed) == (2, 1)


async def test_every_failure_is_counted_by_kind(server: ScriptedServer) -> None:
    server.plan = {0: "503", 1: "error event", 2: "cut", 3: "garbage", 4: "503"}
    report = await bench_serve(options(server, concurrency=1, max_requests=7))
    assert report.summary.errors == {
        "HTTP 503": 2,
        "error event: worker_lost": 1,
        "stream ended early": 1,
        "malformed event": 1,
    }
    assert (report.summary.num_ok, report.summary.num_failed) == (2, 5)
    assert report.summary.goodput.share == pytest.approx(2 / 7)
    assert [record.output_tokens for record in report.records] == [0, 2, 2, 2, 0, 8, 8]


async def test_a_slow_request_times_out(server: ScriptedServer) -> None:
    server.ttft_s = 5.0
    report = await bench_serve(options(server, concurrency=2, max_requests=2, request_timeout_s=0.1))
    assert report.summary.errors == {"timeout": 2}


async def test_a_server_that_is_not_there(server: ScriptedServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    report = await bench_serve(options(server, url=url, model="m", concurrency=2, max_requests=4))
    assert report.summary.errors == {"connection refused": 4}
    assert report.summary.goodput.share == 0.0
    with pytest.raises(UserError, match="does not answer"):
        await bench_serve(options(server, url=url, concurrency=1, max_requests=1))


async def test_the_duration_bounds_a_closed_loop(server: ScriptedServer) -> None:
    report = await bench_serve(options(server, concurrency=2, duration_s=0.25))
    assert 4 <= report.summary.num_ok <= 8
    assert report.summary.duration_s < 0.6


async def test_interrupt_reports_what_there_is(server: ScriptedServer) -> None:
    server.ttft_s = 0.05

    async def interrupt() -> None:
        while len(server.bodies) < 7:  # two at a time: four have been answered  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = asyncio.create_task(interrupt())
    report = await bench_serve(options(server, concurrency=2, max_requests=1000, output_len=2))
    await interrupting
    assert report.was_interrupted
    assert report.summary.num_ok >= 4
    assert set(report.summary.errors) <= {"interrupted"}
    assert report.summary.errors["interrupted"] <= 2
    while server.running:  # noqa: ASYNC110  (their connections were closed)
        await asyncio.sleep(0.01)


async def test_interrupt_of_an_open_loop(server: ScriptedServer) -> None:
    asyncio.get_running_loop().call_later(1.0, os.kill, os.getpid(), signal.SIGINT)
    report = await bench_serve(options(server, rate=10.0, duration_s=30.0, output_len=2))
    assert report.was_interrupted
    assert 1 <= len(report.records) < 30


def page(counts: tuple[int, int, int]) -> str:
    return (
        "# TYPE tandem_handover_seconds histogram\n"
        f'tandem_handover_seconds_bucket{{le="0.01"}} {counts[0]}\n'
        f'tandem_handover_seconds_bucket{{le="0.02"}} {counts[1]}\n'
        f'tandem_handover_seconds_bucket{{le="+Inf"}} {counts[2]}\n'
        f"tandem_handover_seconds_sum {counts[2] * 0.015}\n"
        f"tandem_handover_seconds_count {counts[2]}\n"
    )


async def test_handover_comes_from_the_servers_histogram(server: ScriptedServer) -> None:
    server.metrics = [page((5, 5, 5)), page((5, 15, 15))]
    report = await bench_serve(options(server, concurrency=1, max_requests=1, admin_url=server.url))
    assert report.handover is not None
    assert (report.handover.count, report.handover.p50) == (10, pytest.approx(0.015))
    without = await bench_serve(options(server, concurrency=1, max_requests=1))
    assert without.handover is None


async def test_a_trace_is_sent_as_it_says(server: ScriptedServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at, "input_length": 1024, "output_length": out, "hash_ids": ids}
        for at, out, ids in [(0, 40, [1, 2]), (1000, 20, [1, 3]), (2000, 60, [4, 5])]
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    report = await bench_serve(options(server, trace=trace, time_scale=0.1, length_scale=0.1, num_tokens=999))
    assert report.summary.num_ok == 3
    assert [body["max_tokens"] for body in server.bodies] == [4, 2, 6]
    assert [record.scheduled_s for record in report.records] == pytest.approx([0.0, 0.1, 0.2])
    first, second, _ = (body["prompt"] for body in server.bodies)
    assert len(first) == 102
    assert first[:51] == second[:51]
    assert first[51:] != second[51:]


async def test_the_report_in_every_form(server: ScriptedServer, tmp_path: Path) -> None:
    server.plan = {1: "503"}
    report = await bench_serve(options(server, concurrency=2, max_requests=6, api_key="secret", seed=11))
    text = io.StringIO()
    print_report(report, Console(file=text, width=120))
    assert "5 ok, 1 failed (HTTP 503: 1)" in text.getvalue()
    assert "25.0% cached" in text.getvalue()
    assert "seed 11" in text.getvalue()
    assert text.getvalue().count("n/a") == 5  # handover, unknown

    body = json.loads(to_json(report))
    assert body["summary"]["num_ok"] == 5
    assert len(body["requests"]) == 6
    assert body["options"]["seed"] == 11
    assert "secret" not in to_json(report).decode()

    save_plot(report, tmp_path / "run.png")
    picture = (tmp_path / "run.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 20_000
    with pytest.raises(UserError, match="cannot be written"):
        save_plot(report, tmp_path / "absent" / "run.png")


async def test_progress_in_plain_lines(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.bench.report._LINE_INTERVAL_S", 0.05)
    text = io.StringIO()
    with ConsoleProgress(Console(file=text)) as progress:
        await bench_serve(options(server, concurrency=2, max_requests=6), progress)
    assert re.search(r"^[1-5] of 6 requests ended, 1 running, 0 failed$", text.getvalue(), re.MULTILINE)
    assert "\x1b" not in text.getvalue()


async def test_progress_on_a_terminal(server: ScriptedServer) -> None:
    text = io.StringIO()
    with ConsoleProgress(Console(file=text, force_terminal=True)) as progress:
        await bench_serve(options(server, concurrency=2, max_requests=6), progress)
    assert "6/6" in text.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "choose one of"),
        ({"rate": 1.0, "concurrency": 1}, "choose one of"),
        ({"rate": 0.0}, "--rate must be positive, but is 0.0"),
        ({"rate": float("inf")}, "--rate must be positive"),
        ({"concurrency": 1, "duration_s": -1.0}, "--duration must be positive"),
        ({"concurrency": 1, "input_len_spread": 512}, "--input-len-spread"),
        ({"concurrency": 1, "shared_prefix_len": 512}, "--shared-prefix-len"),
        ({"concurrency": 1, "api": "chat", "num_tokens": 100}, "--tokens needs"),
    ],
)
def test_options_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServeOptions(url="http://127.0.0.1:1", **changes)


def test_command_line_mistakes_end_with_one_line_and_code_2() -> None:
    result = CliRunner().invoke(bench_app, ["serve"])
    assert result.exit_code == 2
    assert result.output.strip() == "tandem bench serve: choose one of --rate, --trace and --concurrency"


async def test_the_command_writes_what_it_is_asked_for(server: ScriptedServer, tmp_path: Path) -> None:
    arguments = ["serve", "--url", server.url, "--concurrency", "2", "--max-requests", "4", "--output-len", "3"]
    arguments += ["--warmup", "0", "--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png")]
    arguments += ["--seed", "5"]
    process = await asyncio.create_subprocess_exec(
        *_command(arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors
    assert b"4 ok, 0 failed" in output
    assert json.loads((tmp_path / "run.json").read_text())["summary"]["output_tokens"] == 12
    assert (tmp_path / "run.png").exists()


def _command(arguments: list[str]) -> list[str]:
    import sys

    return [sys.executable, "-P", "-c", "from tandem.cluster.bench.cli import bench_app; bench_app()", *arguments]
