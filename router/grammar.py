"""Texts of grammars (llguidance's Lark dialect) for what an answer must match."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""On one line. With white space wherever JSON allows it, a model may write line breaks to its last token."""


def json_rule(schema: Any) -> str:
    """The right side of a rule: JSON that this schema allows."""
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": WHITE_SPACE}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def json_schema_grammar(schema: Any) -> str:
    """JSON that this schema allows: every schema is followed to the letter, which the API calls `strict`."""
    return f"start: {json_rule({} if schema is True else schema)}\n"


def json_object_grammar() -> str:
    return f"start: {json_rule({'type': 'object'})}\n"


def regex_grammar(pattern: str) -> str:
    """Text that this regular expression matches from end to end."""
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
    return f"start: /{escaped}/\n"


def choice_grammar(options: Sequence[str]) -> str:
    """One of these texts."""
    return "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options) + "\n"
