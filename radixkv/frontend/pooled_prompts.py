"""Prompts without answers: what the runtime reports of each, and what the cache had of them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from radixkv.errors import RequestError
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.field_names import numbering
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.miss_report import cached_fields
from radixkv.frontend.served_model import ServedModel
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import Submit
from radixkv.wire.request_limits import check_pooled_length
from radixkv.wire.sampling import SamplingParams

MAX_POOLED = 2048
"""Most prompts of a request; OpenAI's limit."""
_STEPS_IN_FLIGHT = 2
"""So many full steps of a request's prompts are at the runtime: what follows a step has arrived when it ends."""


@dataclass(frozen=True)
class PooledPrompts:
    """The prompts of one request, computed."""

    values: list[bytes]
    """What the runtime reports of each, little-endian float32."""
    n_tokens: int
    """Tokens of all prompts."""
    cache_use: CacheUse

    def usage(self, served_model: ServedModel) -> dict[str, Any]:
        """Returns the response's ``usage``."""
        return {
            "prompt_tokens": self.n_tokens,
            "completion_tokens": 0,
            "total_tokens": self.n_tokens,
            "prompt_tokens_details": cached_fields(
                self.cache_use, None, served_model.ready, served_model.tokenizer
            ),
        }


async def pool_prompts(
    request: Request,
    prompts: Sequence[bytes],
    client: EngineClient,
    served_model: ServedModel,
    arrived: Arrival,
    *,
    field: str,
    cache_salt: str | None,
    priority: int | None,
) -> PooledPrompts:
    """Computes prompts, in the order in which they are given. A disconnect of the client cancels them.

    The runtime has as many of them as fill two steps: more would only wait, before those of other clients.

    Args:
        request: of the client who may leave.
        prompts: little-endian int32 ids of each; at least one.
        client: sends them to the runtime.
        served_model: says what to report of them.
        arrived: when and where the request arrived, and whose it is.
        field: the field of the request that errors name.
        cache_salt: of the request.
        priority: of the request.

    Raises:
        RequestError: a prompt cannot be computed; of several, it has the prompt's number.
    """
    ready = served_model.ready
    for index, tokens in enumerate(prompts):
        with numbering(index, len(prompts)):
            check_pooled_length(len(tokens) // 4, ready.max_pooled, ready.pool_limit, field=field)
    name = uuid.uuid4().hex
    submits = [
        Submit(
            id=f"{name}-{index}",
            tokens=tokens,
            sampling=SamplingParams(),
            namespace=served_model.namespace(arrived.tenant, cache_salt),
            priority=priority or 0,
            pooling=served_model.pooling,
        )
        for index, tokens in enumerate(prompts)
    ]
    max_in_flight = _STEPS_IN_FLIGHT * ready.max_num_seqs * len(client.runtimes)
    try:
        return await cancel_on_disconnect(request.receive, _run(submits, client, arrived, max_in_flight))
    except RequestError as error:
        if error.index is not None:
            error.param = field
        raise


async def _run(
    prompts: Sequence[Submit], client: EngineClient, arrived: Arrival, max_in_flight: int
) -> PooledPrompts:
    values = [b""] * len(prompts)
    cache_use = CacheUse()
    group = client.submit(prompts, arrived=arrived, streams=False, max_in_flight=max_in_flight)
    async with group, aclosing(group.deltas()) as deltas:
        async for delta in deltas:
            if delta.pooled is not None:
                values[delta.prompt] = delta.pooled
            if delta.finish_reason is not None:
                group.end_choice(delta, delta.finish_reason)
            if delta.done is not None:
                cache_use += delta.done.cache_use
    assert all(values), "a prompt ends with what is pooled"
    return PooledPrompts(values, sum(len(prompt.tokens) for prompt in prompts) // 4, cache_use)
