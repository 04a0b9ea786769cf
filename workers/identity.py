"""Whether two workers compute the same: what KV, tokens and logprobs depend on beside the request. No torch.

`ModelIdentity.numerics` is "cpu/avx512/3fa2c1d0": backend, hardware as far as bits depend on it (the level of the CPU's
instruction set, or the GPU's capability), and a digest of the code that computes. It is part of the blocks' keys
(block_key.py) and of a disk tier's namespace, so caches of another identity hold nothing that anybody asks for; of what
two workers compare when they pair; and of what a gateway compares before it gives a worker anything to do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import get_args

import msgspec

from tandem.kernels.compiler import fingerprint
from tandem.workers.config import CpuLevel
from tandem.workers.types import ModelIdentity

VERSION_LEN = 8
"""Hex digits of a digest that people have to compare."""


@cache
def numerics_of(backend: str) -> str:
    """`ops.Ops.numerics` of a backend, with the version of the model's code beside that of the ops."""
    hardware, _, version = backend.rpartition("/")
    files = sorted((Path(__file__).parent / "models").glob("*.py"))
    return f"{hardware}/{fingerprint([version], files)[:VERSION_LEN]}"


def difference(ours: ModelIdentity, theirs: ModelIdentity) -> str | None:
    """The first field in which they differ, both values, and what can be done about it; None: they compute the same."""
    for field in msgspec.structs.fields(ModelIdentity):
        our_value, their_value = getattr(ours, field.name), getattr(theirs, field.name)
        if our_value != their_value:
            remedy = _remedy(our_value, their_value) if field.name == "numerics" else ""
            return f"{field.name} differs: ours {our_value!r}, theirs {their_value!r}{remedy}"
    return None


def _remedy(ours: str, theirs: str) -> str:
    """For the end of the line that an operator reads."""
    hardware = {numerics.rpartition("/")[0] for numerics in (ours, theirs)}
    if len(hardware) == 1:
        return "; install the same version of Tandem and its packages on all machines"
    lowest_first = [level for level in reversed(get_args(CpuLevel)) if f"cpu/{level}" in hardware]
    if len(lowest_first) == 2:
        return f"; --cpu-level {lowest_first[0]} makes all workers compute the same"
    if {name.partition("/")[0] for name in hardware} == {"cpu", "reference"}:
        return "; a machine without a C++ compiler computes with plain torch: install g++ there"
    return "; the workers of a cluster need machines of one kind"
