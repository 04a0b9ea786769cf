"""What a recorded decode step reads: arrays at fixed addresses in one piece of memory, so that one copy uploads all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.ops import SamplingInputs, StepLayout

_ALIGNMENT = 64
"""Bytes: kernels are told that addresses are multiples of 16."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """Everything that a decode step reads, for the largest batch. All are views of `packed`, in its order."""

    packed: Tensor  # uint8
    token_ids: Tensor  # [max_seqs] int64, as all that follow unless they say otherwise
    positions: Tensor
    slots: Tensor
    query_starts: Tensor  # [max_seqs + 1]
    context_lens: Tensor
    temperature: Tensor  # float32
    top_k: Tensor
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor
    choice: Tensor
    following_rows: Tensor  # sequences whose token is only on the device, as many as there are ...
    followed_rows: Tensor  # ... and where the step before samples it
    block_tables: Tensor  # [max_seqs, max_blocks]; last, because it is the largest and only rows in use are uploaded

    @classmethod
    def allocate(cls, max_seqs: int, max_blocks: int, device: torch.device, *, pin: bool = False) -> DecodeInputs:
        """Zeros; `pin`: in memory that a device can read while the host goes on. The layout depends on sizes alone."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token_ids": ((max_seqs,), torch.int64),
            "positions": ((max_seqs,), torch.int64),
            "slots": ((max_seqs,), torch.int64),
            "query_starts": ((max_seqs + 1,), torch.int64),
            "context_lens": ((max_seqs,), torch.int64),
            "temperature": ((max_seqs,), torch.float32),
            "top_k": ((max_seqs,), torch.int64),
            "top_p": ((max_seqs,), torch.float32),
            "min_p": ((max_seqs,), torch.float32),
            "seed": ((max_seqs,), torch.int64),
            "choice": ((max_seqs,), torch.int64),
            "following_rows": ((max_seqs,), torch.int64),
            "followed_rows": ((max_seqs,), torch.int64),
            "block_tables": ((max_seqs, max_blocks), torch.int64),
        }
        offsets, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            offsets[name] = end
            end += math.prod(shape) * dtype.itemsize
            end += -end % _ALIGNMENT
        packed = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pin)

        def part(name: str) -> Tensor:
            shape, dtype = shapes[name]
            num_bytes = math.prod(shape) * dtype.itemsize
            return packed[offsets[name] : offsets[name] + num_bytes].view(dtype).view(shape)

        return cls(packed, **{name: part(name) for name in shapes})

    def arrays(self) -> dict[str, Tensor]:
        """All but `packed`, by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "packed"}

    def upload(self, device: DecodeInputs, num_seqs: int) -> None:
        """Copy what `num_seqs` sequences need to `device`, which has the same sizes: one copy, nobody waits."""
        tables = self.block_tables
        end = tables.storage_offset() * tables.itemsize + num_seqs * tables.stride(0) * tables.itemsize
        device.packed[:end].copy_(self.packed[:end], non_blocking=True)

    def follow(self, num_following: int, sampled: Tensor) -> None:
        """Take the tokens of so many sequences from what the step before sampled, [any number] int64."""
        rows, sources = self.following_rows[:num_following], self.followed_rows[:num_following]
        self.token_ids.index_copy_(0, rows, sampled.index_select(0, sources))

    def layout(self, num_seqs: int) -> StepLayout:
        return StepLayout(
            positions=self.positions[:num_seqs],
            slots=self.slots[:num_seqs],
            query_starts=self.query_starts[: num_seqs + 1],
            context_lens=self.context_lens[:num_seqs],
            block_tables=self.block_tables[:num_seqs],
        )

    def sampling(self, num_seqs: int) -> SamplingInputs:
        return SamplingInputs(
            temperature=self.temperature[:num_seqs],
            top_k=self.top_k[:num_seqs],
            top_p=self.top_p[:num_seqs],
            min_p=self.min_p[:num_seqs],
            seed=self.seed[:num_seqs],
            choice=self.choice[:num_seqs],
            position=self.context_lens[:num_seqs],  # a new token's position is the length of what is before it
        )
