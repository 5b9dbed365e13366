"""The window of a GPU: its checksum anywhere, and two processes that share one device."""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from deepmesh.wire.messages import KvKind, Pool
from services.executor.gpu.window import CudaWindow, OpenCudaWindow, host_sum, place_sum
from services.executor.handover_area import NONCE_BYTES, HandoverArea
from services.executor.kv_window import MappedWindow

WAIT_S = 60.0


def by_definition(payload: bytes) -> int:
    words = [int.from_bytes(payload[at : at + 8], "little") for at in range(0, len(payload), 8)]
    whole = len(payload) // 8
    words = [*words[:whole], *(byte + 1 for byte in payload[8 * whole :])]
    factor = 0x9E3779B97F4A7C15
    total = sum(word * (2 * at + 1) * factor for at, word in enumerate(words)) % (1 << 64)
    return (total ^ total >> 32) & 0xFFFFFFFF


def test_the_checksum_of_a_device_is_that_of_the_host_and_sees_what_may_go_wrong() -> None:
    draw = np.random.default_rng(2)
    for size in (0, 1, 7, 8, 9, 57_024, 4096 + 3):
        payload = np.frombuffer(bytearray(draw.bytes(size)), np.uint8)
        found = host_sum(payload)
        assert found == by_definition(payload.tobytes()) == place_sum(torch.tensor(payload))
        wrong = [payload.copy() for _ in range(min(size, 40))]
        for each in wrong:  # a bit; two words that changed places; an end of another payload
            each[draw.integers(size)] ^= 1 << draw.integers(8)
        if size > 16:
            moved = payload.copy()
            moved[:8], moved[8:16] = payload[8:16], payload[:8]
            torn = payload.copy()
            torn[size // 2 :] = np.frombuffer(draw.bytes(size - size // 2), np.uint8)
            wrong += [moved, torn]
        assert found not in [host_sum(each) for each in wrong]


def test_a_window_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="host is not a window of a GPU"):
        OpenCudaWindow("window:host:1:2", 4096)


def read_in_another_process(ours: Connection, device: int) -> None:
    """Open it, look at its head, copy a payload out of it, and say what the sums are."""
    torch.cuda.set_device(device)
    name, num_bytes = ours.recv()
    window = MappedWindow(OpenCudaWindow(name, num_bytes), num_bytes)
    ours.send(window.head(NONCE_BYTES))
    extents, size = ours.recv()
    place = window.place(extents, size)
    assert isinstance(place, torch.Tensor)
    before = window.checksum(place)
    mine = torch.empty(size, dtype=torch.uint8, device="cuda").copy_(place)
    window.close()  # the link is lost: what is looked at stays mapped
    ours.send((before, place_sum(mine), mine.cpu().numpy().tobytes(), window_of(place)))


def window_of(place: torch.Tensor) -> int:
    return place_sum(place)


@pytest.mark.gpu
@pytest.mark.parametrize("reader", [0, 1])
def test_a_payload_goes_from_process_to_process(reader: int) -> None:
    """On one GPU, and from one to another; it is written once the other process looks."""
    if reader >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    area = HandoverArea(CudaWindow(8 << 20))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=read_in_another_process, args=(theirs, reader))
    child.start()
    try:
        ours.send((area.memory.name, area.memory.num_bytes))
        assert ours.poll(WAIT_S)
        assert ours.recv() == area.nonce
        key, payload = (b"k" * 16, KvKind.BLOCK), np.random.default_rng(1).bytes(57_024 + 5)
        room = area.take(len(payload))
        assert room is not None
        at, place = room
        assert isinstance(place, torch.Tensor)
        place.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        torch.cuda.synchronize()
        area.keep(1, key, [(Pool.GLOBAL, len(payload))], at)
        found = area.begin_read(key)
        assert found is not None
        item, handle = found
        assert area.read(item) == payload, "as frames"
        ours.send((item.extents, len(payload)))
        assert ours.poll(WAIT_S)
        before, copied, data, still = ours.recv()
        assert before == copied == still == item.checksum
        assert data == payload
    finally:
        child.join(WAIT_S)
        child.kill()
    area.end_read(handle)
    place[3] ^= 1
    assert area.read(item) is None, "damage does not leave as frames"
    area.release(1)
    assert area.used_bytes == 0
    area.close()
