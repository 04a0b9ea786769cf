"""What the commands of `tandem bench` have in common: mistakes as one line, lists of numbers, where results go."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from tandem.workers.errors import UserError

JsonPath = Annotated[str | None, typer.Option("--json", help="Write everything to this file, or - .")]


@contextmanager
def failures_of(command: str, *more: type[Exception]) -> Iterator[None]:
    """A mistake of the user's in this block, or one of `more`, is one red line and exit code 2."""
    expected: tuple[type[Exception], ...] = (UserError, *more)
    try:
        yield
    except expected as error:
        console = Console(stderr=True)
        console.print(f"tandem bench {command}: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers of at least 1. Raises `UserError` naming the flag."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UserError(f"{flag} must be numbers of at least 1, separated by commas, but is {text!r}")
    return numbers


def tell_progress(message: str) -> None:
    """A dim line on standard error."""
    Console(stderr=True).print(message, style="dim")


def table_console(json_path: str | None) -> Console:
    """Where tables go: standard output, unless JSON goes there."""
    return Console(stderr=json_path == "-")


def put_json(path: str | None, content: bytes) -> None:
    """Write what --json asked for: to the file, to standard output (-), or nowhere. Raises `UserError`."""
    if path is None:
        return
    if path == "-":
        sys.stdout.buffer.write(content)
        return
    try:
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
