"""Texts of grammars (llguidance's Lark dialect) for what an answer must match."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any


def json_schema_grammar(schema: Any, strict: bool) -> str:
    """JSON that this schema allows. `strict` is the API's word for what is always done here."""
    return f"start: %json {json.dumps(schema, ensure_ascii=False)}\n"


def json_object_grammar() -> str:
    return 'start: %json {"type": "object"}\n'


def regex_grammar(pattern: str) -> str:
    """Text that this regular expression matches from end to end."""
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
    return f"start: /{escaped}/\n"


def choice_grammar(options: Sequence[str]) -> str:
    """One of these texts."""
    return "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options) + "\n"
