"""The generator against the known answers published with Random123, and the shape of its uniform numbers."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.philox import philox4x32, uniform

# counter words, key words, answer (Random123, kat_vectors, philox4x32 10)
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == answer


def test_uniform_depends_on_seed_choice_and_position_only() -> None:
    seed = torch.tensor([1, 1, 1, 2, -1, 1])
    choice = torch.tensor([0, 0, 1, 0, 0, 0])
    position = torch.tensor([5, 6, 5, 5, 5, 5])
    numbers = uniform(seed, choice, position)
    assert numbers.dtype == torch.float64
    assert len(set(numbers[:5].tolist())) == 5
    assert numbers[5] == numbers[0]
    assert torch.equal(uniform(seed[2:3], choice[2:3], position[2:3]), numbers[2:3])


def test_uniform_is_uniform() -> None:
    count = 100_000
    numbers = uniform(torch.full((count,), 7), torch.zeros(count, dtype=torch.int64), torch.arange(count))
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    expected = count / 50
    chi_square = float(((numbers.histc(50, 0, 1) - expected) ** 2 / expected).sum())
    assert chi_square < 95  # 49 degrees of freedom: exceeded once in 10,000
