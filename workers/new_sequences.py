"""A request becomes the sequences of its choices, or of its beams."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tandem.workers.beams import as_beams
from tandem.workers.constraint import Constraint, needs_constraint
from tandem.workers.grammar import GrammarCache, GrammarState
from tandem.workers.sequence import Sequence, Status, begin_search
from tandem.workers.types import Request


def sequences_of(
    request: Request,
    root: bytes,
    arrivals: Iterator[int],
    *,
    wants_remote: bool,
    hold: bool,
    num_source_blocks: int,
) -> list[Sequence]:
    """Lowest choice first: the leader, WAITING; the others are its siblings, BLOCKED. Arguments as in `Engine.add`."""
    beams = begin_search(request)
    if beams is not None:
        request = as_beams(request)
    now = time.monotonic()
    sequences = [
        Sequence(
            request_id=request.request_id,
            choice=choice.index,
            token_ids=[*request.prompt_token_ids, *choice.emitted_token_ids],
            num_prompt_tokens=len(request.prompt_token_ids),
            params=request.sampling,
            root=root,
            order=next(arrivals),
            wants_remote=wants_remote,
            hold=hold,
            retention=request.retention,
            priority=request.priority,
            beams=beams,
            num_source_blocks=num_source_blocks,
            status=Status.BLOCKED,
            queued_at=now,
        )
        for choice in sorted(request.choices, key=lambda choice: choice.index)
    ]
    leader, *siblings = sequences
    if beams is None:
        leader.siblings = siblings  # beams are let go by the search
    else:
        beams.sequences = sequences
    leader.status = Status.WAITING
    leader.scores_prompt = _scores_prompt(request)
    return sequences


def constrain(sequences: list[Sequence], vocab_size: int, grammars: GrammarCache | None) -> None:
    """Each has its own place in the grammar; what else there is belongs to all choices."""
    params = sequences[0].params
    if not needs_constraint(params):
        return
    constraint = Constraint(params, vocab_size)
    for sequence in sequences:
        sequence.constraint = constraint.of_another(_start_grammar(params.grammar, grammars))


def _start_grammar(text: str | None, grammars: GrammarCache | None) -> GrammarState | None:
    if text is None:
        return None
    assert grammars is not None, "not validated"
    return grammars.get(text).start()


def _scores_prompt(request: Request) -> bool:
    """A request that is continued was told of its prompt before."""
    is_new = not any(choice.emitted_token_ids for choice in request.choices)
    return request.sampling.num_prompt_logprobs is not None and is_new
