"""Compiles every kernel with every tuning candidate for chips that are not here, and shows what each needs.

    python -m tandem.kernels.triton.aot [--op linear] [--arch 90] [--quick] [--markdown]

For each: registers per thread, bytes of stack (a spill shows as such; the bar is 0), shared memory against the chip's
limit, and the family of matrix instructions. The exit status is 1 if a candidate that the rules let through spills,
does not fit, or uses another family than the chip's others.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.kernels.triton.aot_jobs import Job, jobs
from tandem.kernels.triton.device import ARCHITECTURES, Architecture
from tandem.kernels.triton.launch import Grid, Kernel, compile_options

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_FAMILIES = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")


@dataclass(frozen=True, slots=True)
class Report:
    """What one compiled kernel needs."""

    job: Job
    architecture: Architecture
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    family: str  # "" if it has no matrix product on matrix units

    @property
    def problem(self) -> str:
        """Why this candidate must not be offered; "" if all is well."""
        if self.stack_bytes:
            return f"spills {self.stack_bytes} bytes"
        if self.shared_bytes > self.architecture.shared_bytes:
            return f"shared memory {self.shared_bytes} > {self.architecture.shared_bytes}"
        if self.job.has_matrix_product and self.family != self.architecture.matrix_instruction:
            return f"{self.family or 'no matrix instruction'} instead of {self.architecture.matrix_instruction}"
        return ""


class _Recorder:
    """A `Launch` that remembers the last launch instead of starting it."""

    def __init__(self) -> None:
        self.last: tuple[Kernel, tuple[object, ...], dict[str, int]] | None = None

    def __call__(self, kernel: Kernel, grid: Grid, arguments: tuple[object, ...], **meta: int) -> None:
        self.last = (kernel, arguments, meta)


def compile_job(job: Job, architecture: Architecture) -> Report:
    """Compile as the launcher would, for a chip of that kind."""
    recorder = _Recorder()
    job.launch(recorder)
    assert recorder.last is not None
    kernel, arguments, meta = recorder.last
    options = {"num_stages": meta["num_stages"], "num_warps": meta["num_warps"], **compile_options(meta["num_warps"])}
    target = GPUTarget("cuda", architecture.capability, 32)
    compiled: Any = triton.compile(_source(kernel, arguments, meta), target=target, options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    found = [family for family in _FAMILIES if re.search(rf"\b{re.escape(family)}", compiled.asm["ptx"])]
    return Report(job, architecture, registers, stack, compiled.metadata.shared, "+".join(found))


def _source(kernel: Kernel, arguments: tuple[object, ...], meta: dict[str, int]) -> Any:
    """The kernel specialised for these arguments, by the same rules as at a launch."""
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    values = iter(arguments)
    for index, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = meta[parameter.name]
            continue
        value = next(values)
        signature[parameter.name] = _type_of(value)
        if isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        elif _is_aligned(value) and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if value < 1 << 31 else "i64"


def _is_aligned(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", shown), re.search(r"STACK:(\d+)", shown)
    assert registers is not None, shown
    assert stack is not None, shown
    return int(registers[1]), int(stack[1])


def compile_all(wanted: Iterable[Job], architectures: Iterable[Architecture]) -> Iterator[Report]:
    chips = list(architectures)
    for job in wanted:
        for architecture in chips:
            if job.fits(architecture):
                yield compile_job(job, architecture)


_HEADER = ("kernel", "candidate", "chip", "registers", "stack", "shared", "limit", "matrix", "")


def row_of(report: Report) -> tuple[str, ...]:
    """A report's cells, in the order of the table's header."""
    numbers = (report.num_registers, report.stack_bytes, report.shared_bytes, report.architecture.shared_bytes)
    chip = f"sm_{report.architecture.capability}"
    return (
        *(report.job.name, report.job.candidate, chip),
        *map(str, numbers),
        *(report.family or "-", report.problem or "ok"),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the GPU kernels ahead of time and show what they need.")
    parser.add_argument("--op", help="only kernels whose name begins with this")
    parser.add_argument("--arch", type=int, action="append", choices=sorted(ARCHITECTURES), help="80, 90 and 100")
    parser.add_argument("--quick", action="store_true", help="the first candidate of each kernel only")
    options = parser.parse_args(arguments)
    chips = [ARCHITECTURES[one] for one in options.arch or (80, 90, 100)]
    wanted = [one for one in jobs(chips, quick=options.quick) if one.name.startswith(options.op or "")]
    out = sys.stdout
    out.write(f"| {' | '.join(_HEADER)} |\n{'|---' * len(_HEADER)}|\n")
    num_kernels = num_problems = 0
    for report in compile_all(wanted, chips):
        out.write(f"| {' | '.join(row_of(report))} |\n")
        out.flush()
        num_kernels += 1
        num_problems += bool(report.problem)
    out.write(f"\n{num_kernels} kernels, {num_problems} with a problem\n")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
