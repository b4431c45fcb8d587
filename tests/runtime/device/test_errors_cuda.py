"""Conversion of CUDA errors: an out-of-memory step frees its memory, a lost GPU frees nothing."""

import gc
import weakref

import pytest
import torch

from radixkv.errors import DeviceError, DeviceLost
from radixkv.runtime.device.cuda.errors import CudaErrorConverter


class StepMemory:
    """Stands for what a step holds on the device."""


def fail(converter, kind):
    """Fails a step that holds memory; returns a weak reference to that memory."""
    memory = StepMemory()
    reference = weakref.ref(memory)

    def work(memory=memory):
        raise kind("what CUDA says")

    del memory
    try:
        with converter.convert(7), torch.inference_mode():
            work()
    except (DeviceError, DeviceLost):
        pass
    del work
    return reference


@pytest.fixture
def collector_off():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_memory_of_an_out_of_memory_step_is_freed_at_once(collector_off):
    assert fail(CudaErrorConverter(), torch.OutOfMemoryError)() is None


def test_memory_of_a_lost_gpu_is_never_freed(collector_off):
    converter = CudaErrorConverter()
    reference = fail(converter, torch.AcceleratorError)
    assert reference() is not None


def test_memory_of_steps_is_freed_when_they_end_or_the_device_is_closed(collector_off):
    converter = CudaErrorConverter()
    step, other = StepMemory(), StepMemory()
    first, second = weakref.ref(step), weakref.ref(other)
    converter.hold(step)
    converter.hold(other)
    for _ in range(2):  # ``result`` may be called again
        converter.release(step)
    del step, other
    assert (first() is None, second() is None) == (True, False)
    converter.release_all()
    assert second() is None


def test_memory_of_a_gpu_found_lost_at_close_is_never_freed(collector_off):
    opened, step = StepMemory(), StepMemory()
    references = weakref.ref(opened), weakref.ref(step)
    converter = CudaErrorConverter(opened)
    converter.hold(step)
    converter.never_free()
    del converter, opened, step
    assert all(reference() is not None for reference in references)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("a lot"), DeviceError, "step 7: there is too little memory: a lot"),
        (torch.AcceleratorError("assert\nadvice"), DeviceLost, "step 7: the GPU failed .*: assert$"),
        (KeyError("a bug"), KeyError, "a bug"),
    ],
)
def test_errors_are_converted_with_their_text(error, kind, message):
    with pytest.raises(kind, match=message) as caught, CudaErrorConverter().convert(7):
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
def test_out_of_memory_is_recognised_from_every_library(error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(DeviceError, match="step 7: there is too little memory: "), CudaErrorConverter().convert(7):
        raise error


def test_a_gpu_that_does_not_respond_is_lost_whatever_the_error_text(monkeypatch):
    def fail():
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(DeviceLost, match="out of memory$"), CudaErrorConverter().convert(7):
        raise torch.AcceleratorError(HOST_FULL)
