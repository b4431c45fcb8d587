"""What a failed step leaves behind: nothing after a lack of memory, everything on a lost GPU."""

import gc
import weakref

import pytest
import torch

from radixkv.errors import DeviceError, DeviceLost
from radixkv.runtime.device.errors_cuda import Translation


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


def test_what_steps_have_is_free_once_they_ended_or_all_is_closed(collector_off):
    translation = Translation()
    step, other = Held(), Held()
    first, second = weakref.ref(step), weakref.ref(other)
    translation.hold(step)
    translation.hold(other)
    for _ in range(2):  # a step may be asked again
        translation.release(step)
    del step, other
    assert (first() is None, second() is None) == (True, False)
    translation.let_go()
    assert second() is None


def test_what_a_gpu_holds_that_is_lost_when_it_is_closed_is_kept(collector_off):
    opened, step = Held(), Held()
    kept = weakref.ref(opened), weakref.ref(step)
    translation = Translation(opened)
    translation.hold(step)
    translation.keep()
    del translation, opened, step
    assert all(held() is not None for held in kept)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("a lot"), DeviceError, "step 7: there is too little memory: a lot"),
        (torch.AcceleratorError("assert\nadvice"), DeviceLost, "step 7: the GPU failed, .*: assert$"),
        (KeyError("a bug"), KeyError, "a bug"),
    ],
)
def test_errors_say_what_they_mean(error, kind, message):
    with pytest.raises(kind, match=message) as caught, Translation().of(7):
        raise error
    assert type(caught.value) is kind


HOST_FULL = "CUDA error: out of memory\nadvice"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(HOST_FULL),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["of the host", "in Triton", "in cuBLAS"],
)
def test_a_lack_of_memory_passes_whoever_says_it(error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(DeviceError, match="step 7: there is too little memory: "), Translation().of(7):
        raise error


def test_a_gpu_that_does_not_answer_is_lost_whatever_it_says(monkeypatch):
    def fail():
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(DeviceLost, match="out of memory$"), Translation().of(7):
        raise torch.AcceleratorError(HOST_FULL)
