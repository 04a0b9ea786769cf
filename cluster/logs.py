"""Logs on standard error: lines for people, or one JSON object per line for machines."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal

_REQUEST = re.compile(r"\brequest ([A-Za-z0-9_.-]{1,128})")
_WORKER = re.compile(r"\b((?:prefill|decode|aggregated)-\d+)\b")


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message"}`, with "request_id" and "worker" where the message names them."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        for name, pattern in (("request_id", _REQUEST), ("worker", _WORKER)):
            found = pattern.search(message)
            if found is not None:
                entry[name] = found[1]
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(kind: Literal["text", "json"], *, level: int = logging.WARNING) -> None:
    """Of the whole process. With "json", what each request did is told, too, at INFO."""
    handler = logging.StreamHandler(sys.stderr)
    if kind == "json":
        handler.setFormatter(JsonFormatter())
        logging.getLogger("tandem").setLevel(logging.INFO)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
