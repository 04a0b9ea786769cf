"""Logs for machines."""

from __future__ import annotations

import json
import logging

from tandem.cluster.logs import JsonFormatter


def test_a_json_log_names_request_and_worker() -> None:
    record = logging.LogRecord(
        "tandem.x", logging.INFO, "f", 1, "request %s leaves worker %s", ("r-1", "decode-0"), None
    )
    entry = json.loads(JsonFormatter().format(record))
    assert entry["request_id"] == "r-1"
    assert entry["worker"] == "decode-0"
    assert (entry["level"], entry["logger"]) == ("info", "tandem.x")
    plain = json.loads(JsonFormatter().format(logging.LogRecord("x", logging.ERROR, "f", 1, "two\nlines", (), None)))
    assert plain["message"] == "two\nlines"
    assert "request_id" not in plain
