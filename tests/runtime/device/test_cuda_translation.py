"""What a failed step leaves behind: nothing after a lack of memory, everything on a lost GPU."""

import gc
import weakref

import pytest
import torch

from radixkv.errors import DeviceError, DeviceLost
from radixkv.runtime.device.cuda.translation import Translation


class Held:
    """What a step has on the device."""


def fail(translation, kind):
    """A step that had something when it failed; a weak reference to it."""
    held = Held()
    found = weakref.ref(held)

    def work(held=held):
        raise kind("what CUDA says")

    del held
    try:
        with translation.of(7), torch.inference_mode():
            work()
    except (DeviceError, DeviceLost):
        pass
    del work
    return found


@pytest.fixture
def collector_off():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_what_a_step_without_memory_had_is_free_at_once(collector_off):
    assert fail(Translation(), torch.OutOfMemoryError)() is None


def test_what_a_lost_gpu_held_is_kept(collector_off):
    translation = Translation()
    held = fail(translation, torch.AcceleratorError)
    assert held() is not None


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("a lot"), DeviceError, "step 7: the device is out of memory: a lot"),
        (torch.AcceleratorError("assert\nadvice"), DeviceLost, "step 7: the GPU failed, .*: assert$"),
        (KeyError("a bug"), KeyError, "a bug"),
    ],
)
def test_errors_say_what_they_mean(error, kind, message):
    with pytest.raises(kind, match=message) as caught, Translation().of(7):
        raise error
    assert type(caught.value) is kind


HOST_FULL = "CUDA error: out of memory\nadvice"


def test_a_lack_of_the_hosts_memory_passes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(DeviceError, match="step 7: the device is out of memory: .*memory$"), Translation().of(7):
        raise torch.AcceleratorError(HOST_FULL)


def test_a_gpu_that_does_not_answer_is_lost_whatever_it_says(monkeypatch):
    def fail():
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(DeviceLost, match="out of memory$"), Translation().of(7):
        raise torch.AcceleratorError(HOST_FULL)
