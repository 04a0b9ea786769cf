"""What this Triton makes of each kernel for this chip: no spills, no more shared memory than there is, one family."""

from __future__ import annotations

from collections.abc import Iterator

from report import Context
from rows import Row

from tandem.kernels.triton.aot import compile_all
from tandem.kernels.triton.aot_jobs import jobs
from tandem.kernels.triton.device import ARCHITECTURES, architecture_of


def compiles(context: Context) -> Iterator[Row]:
    """The first candidate of each kernel. A dry run compiles for an H100 or H200."""
    chip = ARCHITECTURES[90] if context.is_tiny else architecture_of(context.device)
    for report in compile_all(jobs([chip], quick=True), [chip]):
        family = report.family or "no products"
        detail = f"{report.num_registers} registers, {report.shared_bytes >> 10} KiB shared, {family}"
        case = f"{report.job.name}, sm_{chip.capability}"
        yield Row("compiles", case, "FAILED" if report.problem else "ok", report.problem or detail)
