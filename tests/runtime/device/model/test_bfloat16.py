"""In bfloat16 the device's error is about that of Transformers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from radixkv.checkpoints import Checkpoint
from radixkv.errors import ConfigError
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.step.plan import StepPlan
from support.cases import nightly_but
from support.device_support import CHECKPOINTS, GREEDY, OpenDevice, load_oracle, random_ids, row_of

Get = Callable[[str], Checkpoint]
IDS = random_ids(200, seed=1)


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([IDS])).logits[0].float()
    return logits


def typical_error(logits: Tensor, exact_logits: Tensor) -> float:
    """Returns the median error per token: rounding may route a token to another expert, with any error."""
    return (logits - exact_logits).square().mean(-1).sqrt().median().item()


@pytest.mark.parametrize(
    "name",
    nightly_but(CHECKPOINTS, "mixtral", "qwen3.5-attention", "gemma4-moe", "opt"),
)
def test_the_error_is_about_that_of_transformers(checkpoint: Get, name: str) -> None:
    exact = load_oracle(checkpoint(name))
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16().float())
    exact_logits = logits_of(exact)
    transformers_error = typical_error(logits_of(load_oracle(checkpoint(name), torch.bfloat16)), exact_logits)
    device = OpenDevice(checkpoint(name), dtype=torch.bfloat16)
    (logits,) = device.run(row_of(IDS, device.pages(len(IDS))))
    assert logits.dtype == torch.float32
    assert 0.0 < typical_error(logits, exact_logits) < 1.15 * transformers_error


def open_executor(checkpoint: Checkpoint, dtype: str) -> CpuExecutor:
    return CpuExecutor(
        checkpoint,
        DeviceSettings(
            page_size=8,
            max_num_seqs=2,
            max_model_len=256,
            kv_cache_memory_bytes=1 << 20,
            max_total_tokens=None,
            dtype=dtype,
            max_num_batched_tokens=2048,
        ),
    )


def test_the_pool_holds_twice_the_pages(checkpoint: Get) -> None:
    wide, narrow = open_executor(checkpoint("grouped"), "float32"), open_executor(checkpoint("grouped"), "bfloat16")
    assert narrow.n_pages // 2 == wide.n_pages
    assert narrow.pool.k.dtype == narrow.pool.v.dtype == torch.bfloat16
    assert open_executor(checkpoint("grouped"), "auto").pool.k.dtype == torch.float32


def test_greedy_sampling(checkpoint: Get) -> None:
    executor = open_executor(checkpoint("mixtral"), "bfloat16")
    row = row_of(IDS, range(25), sampling=GREEDY)
    result = executor.launch(StepPlan(0, (row,))).sample(None).result()
    assert result.finite == (True,)
    device = OpenDevice(checkpoint("mixtral"), dtype=torch.bfloat16)
    (logits,) = device.run(row_of(IDS, device.pages(len(IDS))))
    assert result.tokens == (int(logits[-1].argmax()),)


def test_another_dtype_is_refused(checkpoint: Get) -> None:
    with pytest.raises(ConfigError, match="dtype 'float16' is not supported on the CPU; use float32 or bfloat16"):
        open_executor(checkpoint("grouped"), "float16")
