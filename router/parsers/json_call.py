"""One call of a tool written as a JSON object, read as it arrives: `{"name": "f", "arguments": {...}}`.

The text of the arguments is passed on piece by piece as soon as the name is known. Nothing is corrected: what the model
wrote is what the client gets.
"""

from __future__ import annotations

import json

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_SPACE = " \t\r\n"


class JsonScanner:
    """Follows one JSON value, character by character, to its end: an object, an array, or anything simpler inside."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_in_string = False
        self._is_escaped = False

    def push(self, character: str) -> None:
        if self.is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self.is_in_string = False
        elif character == '"':
            self.is_in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


class JsonCall:
    """`push` takes text from the opening brace on. `name` is None until it is known; from then on `take` gives the
    arguments. After the closing brace `is_complete`; an object without a name is no call."""

    def __init__(self) -> None:
        self.raw = ""
        """The text so far, as long as the name is not known."""
        self.name: str | None = None
        self.is_complete = False
        self._scanner = JsonScanner()
        self._key: str | None = None
        self._token = ""
        """The key, or the value other than arguments, that is being read at depth 1."""
        self._is_value = False
        self._pending = ""
        """Text of the arguments that was not taken yet."""
        self._has_arguments = False
        self._is_quoted = False

    def push(self, text: str) -> str:
        """Returns what follows the object."""
        for position, character in enumerate(text):
            if self.is_complete:
                return text[position:]
            self._push(character)
        return ""

    def take(self) -> str:
        """The text of the arguments that was not taken before."""
        if self.name is None or (self._is_quoted and not self.is_complete):
            return ""
        if self.is_complete:
            taken, self._pending = self._pending.rstrip(), ""
            if self._is_quoted:
                return _unquoted(taken)
            return taken if self._has_arguments else "{}"
        # white space at the end may belong to the object around it
        taken = self._pending.rstrip()
        self._pending = self._pending[len(taken) :]
        return taken

    def _push(self, character: str) -> None:
        if self.name is None:
            self.raw += character
        scanner = self._scanner
        was_string, depth = scanner.is_in_string, scanner.depth
        scanner.push(character)
        if depth == 0:
            return
        if depth == 1 and not was_string and self._ends_part(character):
            return
        if not self._is_value or self._key not in ARGUMENT_KEYS:
            self._token += character
            return
        if not self._has_arguments:
            self._has_arguments, self._is_quoted = True, character == '"'
        self._pending += character

    def _ends_part(self, character: str) -> bool:
        """True for what stands between keys and values."""
        if character == ":" and not self._is_value:
            self._key, self._token, self._is_value = _string(self._token), "", True
            return True
        if character in ",}":
            if self._is_value and self._key == "name":
                self.name = _string(self._token)
            self._key, self._token, self._is_value = None, "", False
            self.is_complete = character == "}"
            return True
        is_inside = bool(self._token) or (self._is_value and self._key in ARGUMENT_KEYS and self._has_arguments)
        return character in _SPACE and not is_inside


def _string(token: str) -> str | None:
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _unquoted(arguments: str) -> str:
    """Some models write the arguments as a string that holds JSON."""
    value = _string(arguments)
    return arguments if value is None else value
