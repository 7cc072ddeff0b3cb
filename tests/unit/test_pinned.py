"""Pinned memory without a GPU: the bookkeeping with an injected driver, and the ring that stages what is not pinned."""

import contextlib
import gc
import logging
import threading
import time

import pytest
import torch

from trainer.memory import pinned
from trainer.memory.pinned import PAGE, Landed, PinnedMemory, Staging


class Driver:
    """Remembers what is registered, and refuses what overlaps, what is no page, and what is above ``room``."""

    def __init__(self, room: int = 1 << 40):
        self.room, self.ranges, self.lock = room, {}, threading.Lock()
        self.threads = set()

    def register(self, address: int, size: int) -> bool:
        assert address % PAGE == 0 and size % PAGE == 0 and size > 0
        time.sleep(0.01)
        with self.lock:
            self.threads.add(threading.get_ident())
            for other, length in self.ranges.items():
                assert address + size <= other or other + length <= address, "registered twice"
            if sum(self.ranges.values()) + size > self.room:
                return False
            self.ranges[address] = size
            return True

    def unregister(self, address: int) -> None:
        with self.lock:
            del self.ranges[address]


def memory(driver: Driver, limit: int | None = None) -> PinnedMemory:
    return PinnedMemory(limit, register=driver.register, unregister=driver.unregister)


@pytest.mark.parametrize("shape, dtype", [((3,), torch.float32), ((1000, 7), torch.bfloat16), ((5000,), torch.uint8)])
def test_tensors_of_zeros_have_whole_pages_of_their_own(shape, dtype):
    driver = Driver()
    of = memory(driver)
    made = [of.zeros(shape, dtype) for _ in range(20)]
    for i, tensor in enumerate(made):
        assert tensor.shape == shape and tensor.dtype == dtype and not tensor.any() and tensor.is_contiguous()
        tensor.fill_(i)  # while it is being pinned
    of.ready()
    assert all((t == i).all() and of.holds(t) and of.holds(t[1:]) for i, t in enumerate(made))
    assert of.pinned == sum(driver.ranges.values()) >= sum(t.nbytes for t in made)
    assert of.pinned < sum(t.nbytes for t in made) + 20 * PAGE  # nothing is rounded up further
    assert len(driver.threads) > 1


def test_beyond_the_limit_memory_stays_ordinary_and_that_is_told(caplog):
    driver = Driver()
    of = memory(driver, limit=10 * PAGE)
    made = [of.zeros([4 * PAGE], torch.uint8) for _ in range(3)]
    with caplog.at_level(logging.INFO):
        of.ready()
    assert [of.holds(t) for t in made] == [True, True, False]
    assert (of.pinned, of.refused) == (8 * PAGE, 4 * PAGE) and "could not be pinned" in caplog.text


def test_what_the_system_refuses_stays_ordinary():
    of = memory(Driver(room=5 * PAGE))
    made = [of.zeros([4 * PAGE], torch.uint8) for _ in range(3)]
    of.ready()
    assert sum(of.holds(t) for t in made) == 1 and of.refused == 8 * PAGE


def test_all_is_unpinned_when_asked_and_when_nobody_needs_it():
    driver = Driver()
    of = memory(driver)
    tensor = of.zeros([PAGE], torch.uint8)
    tensor.fill_(7)
    of.ready()
    of.release()
    assert not driver.ranges and not of.holds(tensor) and (tensor == 7).all()
    of.zeros([PAGE], torch.uint8)
    of.ready()
    assert len(driver.ranges) == 1
    del of
    gc.collect()
    assert not driver.ranges


def test_single_buffers_are_unpinned_and_their_share_of_the_limit_is_free_again():
    driver = Driver()
    of = memory(driver, limit=10 * PAGE)
    for round_ in range(5):  # as inputs of ever larger pictures come and go
        first, second = (of.zeros([4 * PAGE], torch.uint8) for _ in range(2))
        first.fill_(round_)
        of.free(first)  # while it is being pinned
        assert len(driver.ranges) == 1 and of.pinned == 4 * PAGE and not of.holds(first) and of.holds(second)
        assert (first == round_).all()
        of.free(second)
        of.free(second)
        assert not driver.ranges and not of.pinned and not of.refused
    of.free(torch.zeros(10))


def test_ordinary_tensors_are_not_held():
    of = memory(Driver())
    of.zeros([PAGE], torch.uint8)
    of.ready()
    assert not of.holds(torch.zeros(100))


class Device:
    """A stream that copies later: each event runs what was put before it."""

    def __init__(self, lag: float = 0.0):
        self.queue, self.lag, self.lock = [], lag, threading.Lock()

    def put(self, target, source):
        self.queue.append((target, source))

    def mark(self):
        return Event(self, len(self.queue))

    def run(self, until: int) -> None:
        with self.lock:
            time.sleep(self.lag)
            for i in range(until):
                if self.queue[i] is not None:
                    target, source = self.queue[i]
                    target.copy_(source)
                    self.queue[i] = None


class Event:
    def __init__(self, device, until):
        self.device, self.until = device, until

    def synchronize(self):
        self.device.run(self.until)


def staging(device: Device) -> tuple[Staging, list]:
    slots: list[torch.Tensor] = []

    def make(size: int) -> torch.Tensor:
        slots.append(torch.zeros(size, dtype=torch.uint8))
        return slots[-1]

    return Staging(device.put, device.mark, make, slot=64, slots=3), slots


@pytest.mark.parametrize("size", [1, 16, 17, 100, 1000])
def test_copies_up_arrive_whole_through_few_slots(size):
    device = Device()
    ring, slots = staging(device)
    source, target = torch.randn(size), torch.zeros(size)
    ring.up(target, source)
    kept = source.clone()
    source.zero_()  # the host may write it again at once
    device.run(len(device.queue))
    assert torch.equal(target, kept) and len(slots) <= 3


@pytest.mark.parametrize("lag", [0.0, 0.002])
def test_copies_down_arrive_whole_in_order_when_they_have_landed(lag):
    device = Device(lag)
    ring, slots = staging(device)
    sources, target = [torch.randn(100) for _ in range(5)], torch.zeros(100)
    for source in sources:
        ring.down(target, source)
    landed = Landed(device.mark(), ring.landing)
    landed.synchronize()
    assert torch.equal(target, sources[-1]) and len(slots) == 3
    ring.synchronize()
    assert not ring.landing


def test_a_copy_that_fails_in_the_thread_is_raised():
    device = Device()

    def broken():
        raise RuntimeError("device lost")

    event = Event(device, 0)
    event.synchronize = broken
    device.mark = lambda: event
    ring, _ = staging(device)
    with pytest.raises(RuntimeError, match="device lost"):
        ring.down(torch.zeros(4), torch.zeros(4))
        ring.synchronize()


def test_registering_asks_the_driver(monkeypatch):
    asked = []

    class Runtime:
        def cudaHostRegister(self, *arguments):
            asked.append(arguments)
            return 0 if len(asked) == 2 else 2

        def cudaHostUnregister(self, address):
            asked.append(address)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or contextlib.nullcontext())
    assert pinned.cuda_register("cuda:1", 4096, 8192) and not pinned.cuda_register("cuda:1", 0, 4096)
    pinned.cuda_unregister(4096)
    assert asked == ["cuda:1", (4096, 8192, 0), "cuda:1", (0, 4096, 0), 4096]
