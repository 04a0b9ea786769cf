"""What NIXL needs of a GPU worker, as far as that can be seen without a GPU."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
import torch

from tandem.workers.errors import UserError
from tandem.workers.transfer import nixl, nixl_library
from tandem.workers.transfer.base import KVPoolMemory

BLOCKS, BLOCK_BYTES = 4, 4096


def pool() -> KVPoolMemory:
    return KVPoolMemory.of(torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8))


def transfer(name: str) -> nixl.NixlTransfer:
    return nixl.NixlTransfer(pool(), worker_id=name, epoch=0, host="127.0.0.1")


async def test_its_threads_use_the_device_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has no context of CUDA's has no way from GPU to GPU either."""
    used: dict[str, torch.device] = {}
    monkeypatch.setattr(nixl, "_use_device", lambda device: used.setdefault(threading.current_thread().name, device))
    source, reader = transfer("source"), transfer("reader")
    await reader.pull(source.describe(), [0], [1], timeout_s=10.0)
    await reader.close()
    await source.close()
    assert {"transfer-nixl_0", "transfer-nixl-progress"} <= set(used)
    assert set(used.values()) == {torch.device("cpu")}


def test_a_thread_gets_the_context_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch, "zeros", lambda size, device: devices.append(device))
    nixl._use_device(torch.device("cpu"))
    assert devices == []
    nixl._use_device(torch.device("cuda", 0))
    assert devices == [torch.device("cuda", 0)] * 2, "choosing a device alone does not make its context"


@pytest.mark.parametrize(("cuda", "first"), [("13.0", "nixl_cu13"), ("12.8", "nixl_cu12"), (None, "nixl_cu12")])
def test_the_wheel_for_torchs_cuda_comes_first(monkeypatch: pytest.MonkeyPatch, cuda: str | None, first: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    names = ("nixl_cu12", "nixl_cu13", "nixl")
    for name in names:
        for part in ("", "._api", "._bindings"):
            monkeypatch.setitem(sys.modules, name + part, ModuleType(name + part))
    monkeypatch.setattr(nixl_library.os, "environ", environment := dict[str, str]())
    api, _ = nixl_library.load_nixl("127.0.0.1", "cuda")
    assert api.__name__ == f"{first}._api"
    assert (environment["UCX_MEMTYPE_CACHE"], environment["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"]) == ("n", "on")
    environment |= {"UCX_MEMTYPE_CACHE": "y"}
    nixl_library.load_nixl("127.0.0.1", "cuda")
    assert environment["UCX_MEMTYPE_CACHE"] == "y", "what the user says holds"


def test_a_cpu_worker_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_library.os, "environ", environment := dict[str, str]())
    nixl_library._prepare_environment("127.0.0.1", "cpu")
    assert not {"UCX_MEMTYPE_CACHE", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"} & environment.keys()


def test_memory_that_ucx_cannot_register_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    api, bindings = nixl_library.load_nixl("127.0.0.1")

    def fail(*_: object) -> None:
        raise bindings.nixlBackendError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(api.nixl_agent, "register_memory", fail)
    with pytest.raises(UserError, match=r"--transfer nixl: .* cannot register DRAM: NIXL_ERR_BACKEND"):
        transfer("worker")
