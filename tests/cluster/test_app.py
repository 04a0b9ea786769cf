"""The launcher's own parts."""

from __future__ import annotations

import tempfile

import pytest

from tandem.cluster.app import run_folder
from tandem.workers.errors import UserError


def test_no_room_for_the_run_folder_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(UserError, match=r"no temporary folder .*: No such file .* TMPDIR"), run_folder():
        pass
