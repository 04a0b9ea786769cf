"""Inputs of a recorded decode step: one piece of memory, one copy."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.workers.decode_inputs import DecodeInputs

CPU = torch.device("cpu")


class CountCopies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_views_are_apart_in_order_and_aligned() -> None:
    inputs = DecodeInputs.allocate(5, 3, CPU)
    start = inputs.packed.data_ptr()
    places = [(tensor.data_ptr() - start, tensor.nbytes) for tensor in inputs.arrays().values()]
    assert all(place % 64 == 0 for place, _ in places)
    assert all(place + size <= following for (place, size), (following, _) in pairwise(places))
    assert sum(places[-1]) <= inputs.packed.nbytes
    assert list(inputs.arrays())[-1] == "block_tables"


@pytest.mark.parametrize("num_seqs", [1, 4, 7])
def test_one_copy_brings_all_that_a_bucket_reads(num_seqs: int) -> None:
    host, device = (DecodeInputs.allocate(7, 3, CPU) for _ in range(2))
    for value, tensor in enumerate(host.arrays().values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * value)
    with CountCopies() as copies:
        host.upload(device, num_seqs)
    assert len(copies.sizes) == 1
    for name, tensor in host.arrays().items():
        rows = num_seqs + (name == "query_starts")
        assert torch.equal(device.arrays()[name][:rows], tensor[:rows]), name
    assert not device.block_tables[num_seqs:].any()  # the largest part, as far as it is in use
