"""The masks of one step, computed in a thread of their own while the model's part of the step runs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor

from tandem.workers.batch import Refusal, SampleSpec
from tandem.workers.constraint import NothingAllowed
from tandem.workers.grammar import Words

Mask = Words | Refusal | None
"""Which tokens a row may choose; that it can choose none; or that it may choose any."""


class MaskMaker:
    """Sequences with a grammar are followed in the thread, where llguidance needs no GIL; the others take microseconds
    and are done when they are needed."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, specs: SequenceOf[SampleSpec]) -> Callable[[], list[Mask]] | None:
        """Call the result for one mask per spec, when the logits are there. None: nobody needs one."""
        constraints = [spec.constraint for spec in specs if spec.constraint is not None]
        if not constraints:
            return None
        if all(constraint.grammar is None for constraint in constraints):
            return lambda: _masks(specs)
        return self._executor.submit(_masks, specs).result


def _masks(specs: SequenceOf[SampleSpec]) -> list[Mask]:
    return [_mask(spec) for spec in specs]


def _mask(spec: SampleSpec) -> Mask:
    if spec.constraint is None:
        return None
    try:
        return spec.constraint.mask(spec.token_ids, spec.num_prompt_tokens)
    except NothingAllowed as error:
        return Refusal(str(error))
