"""The child process in which the gateway tries grammars: one line of JSON in, one out, until the input ends.

    python -m tandem.router.grammar_helper FOLDER VOCAB_SIZE EOS_TOKEN_ID,...

First it says {"ready": true}. Then each {"text": ...} is answered by {"error": message or null}. Whatever a text does
to this process, somebody kills it, and nobody else has felt it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tandem.workers.errors import RequestError
from tandem.workers.grammar import compile_grammar, load_grammar_tokenizer

MAX_MEMORY_BYTES = 4 << 30
NICENESS = 5
"""Others' streams go first."""


def make_check(folder: Path, vocab_size: int, eos_token_ids: list[int]) -> Callable[[str], str | None]:
    """A function from a text to what is wrong with it."""
    try:
        tokenizer = load_grammar_tokenizer(folder, vocab_size, eos_token_ids)
    except RequestError as error:
        reason = str(error)
        return lambda text: reason

    def check(text: str) -> str | None:
        try:
            compile_grammar(tokenizer, text)
        except RequestError as error:
            return str(error)
        return None

    return check


def main(folder: str, vocab_size: str, eos_token_ids: str) -> None:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    check = make_check(Path(folder), int(vocab_size), [int(part) for part in eos_token_ids.split(",") if part])
    answers = sys.stdout
    sys.stdout = sys.stderr  # a library that prints must not answer
    _say({"ready": True}, answers)
    for line in sys.stdin:
        _say({"error": check(json.loads(line)["text"])}, answers)


def _say(answer: dict[str, object], answers: TextIO) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
