"""Logs on standard error: lines for people, or one JSON object per line for machines."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TextIO

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
        elif record.exc_text:  # came from another process
            entry["traceback"] = record.exc_text
        return json.dumps(entry, ensure_ascii=False)


class _StandardError(logging.StreamHandler[TextIO]):
    """Whatever is standard error at the moment: the table of a start puts itself in its place while it lasts."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def configure_logging(kind: Literal["text", "json"], *, level: int = logging.WARNING) -> None:
    """Of the whole process. With "json", what each request did is told, too, at INFO, and nothing but JSON is written:
    warnings and the traceback of a bug are records as well."""
    handler = _StandardError()
    if kind == "json":
        handler.setFormatter(JsonFormatter())
        logging.getLogger("tandem").setLevel(logging.INFO)
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def is_json() -> bool:
    """Whether this process writes JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def say(text: str, *, level: int = logging.INFO) -> None:
    """A sentence for whoever looks at standard error: bare, or a record among records."""
    if is_json():
        logging.getLogger("tandem.cluster").log(level, "%s", text)
    else:
        sys.stderr.write(f"{text}\n")


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("tandem").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, traceback))
