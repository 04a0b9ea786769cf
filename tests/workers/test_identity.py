"""Whether two workers compute the same, and what an operator is told when they do not."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tandem.kernels.cpu.build import LEVELS
from tandem.workers.block_key import root_key
from tandem.workers.config import CpuLevel
from tandem.workers.identity import difference, numerics_of
from tandem.workers.offload.create import namespace_of
from tandem.workers.types import ModelIdentity

IDENTITY = ModelIdentity(
    protocol_version=1,
    model="m",
    revision="0",
    dtype="bfloat16",
    numerics="cpu/avx512/1a",
    layout_version=1,
    block_size=32,
    block_bytes=64,
    max_model_len=128,
)


def with_numerics(numerics: str) -> ModelIdentity:
    return msgspec.structs.replace(IDENTITY, numerics=numerics)


@pytest.mark.parametrize(
    ("numerics", "remedy"),
    [
        ("cpu/avx2/1a", "--cpu-level avx2 makes all workers compute the same"),
        ("cpu/amx_bf16/1a", "--cpu-level avx512 makes all workers compute the same"),
        ("cpu/avx512/2b", "install the same version of Tandem and its packages on all machines"),
        ("reference/AVX512/3c", "a machine without a C++ compiler computes with plain torch: install g++ there"),
        ("triton/sm_90/1a", "the workers of a cluster need machines of one kind"),
        ("cpu-aarch64/plain/1a", "the workers of a cluster need machines of one kind"),
        ("cpu/later_level/1a", "the workers of a cluster need machines of one kind"),
        ("nonsense", "the workers of a cluster need machines of one kind"),
    ],
)
def test_other_numerics_are_named_with_what_can_be_done(numerics: str, remedy: str) -> None:
    told = difference(IDENTITY, with_numerics(numerics))
    assert told == f"numerics differs: ours 'cpu/avx512/1a', theirs '{numerics}'; {remedy}"


def test_other_differences_and_none() -> None:
    assert difference(IDENTITY, msgspec.structs.replace(IDENTITY)) is None
    other = msgspec.structs.replace(IDENTITY, dtype="float32", numerics="cpu/avx2/1a")
    assert difference(IDENTITY, other) == "dtype differs: ours 'bfloat16', theirs 'float32'"


def test_blocks_and_disks_of_other_numerics_have_other_names() -> None:
    other = with_numerics("cpu/avx2/1a")
    assert root_key(b"key", IDENTITY, "") != root_key(b"key", other, "")
    assert namespace_of(IDENTITY, b"key") != namespace_of(other, b"key")


def test_the_version_is_of_the_ops_and_of_the_model_around_them() -> None:
    one, other = numerics_of("cpu/avx2/1a"), numerics_of("cpu/avx2/2b")
    assert one.startswith("cpu/avx2/")
    assert one != other
    assert one.rpartition("/")[2] != "1a", "the model's own code counts, too"


def test_the_levels_that_can_be_asked_for_are_those_that_are_built() -> None:
    assert get_args(CpuLevel) == tuple(LEVELS)
