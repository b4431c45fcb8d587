"""The load generator against a real server: every token is counted three times, and all three agree."""

import asyncio
import math

import pytest

from radixkv.bench.load.accounting import accounting, counted_by_metrics
from radixkv.bench.load.arrivals import Load
from radixkv.bench.load.client import Client
from radixkv.bench.load.generator import LoadGenerator
from radixkv.bench.load.prompt_encoder import PromptEncoder
from radixkv.bench.session import Request, Session, lone

SHARED = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n\n" * 8


def chats():
    """A chat whose turns have all that was said, and two questions at once in the end."""

    def turns():
        messages = [{"role": "system", "content": SHARED}]
        for _ in range(2):
            messages.append({"role": "user", "content": "And then?"})
            (reply,) = yield [Request(list(messages), 6)]
            messages.append({"role": "assistant", "content": reply.texts[0]})
        yield [Request([*messages, {"role": "user", "content": f"Way {n}?"}], 5, n=2, seed=n) for n in range(2)]

    return Session(turns, n_requests=4)


def mixed():
    texts = [lone(Request(f"{SHARED}Question: {n} + 1?\nAnswer:", 7, n=1 + n % 3)) for n in range(6)]
    return [*texts, chats(), lone(Request(tuple(range(20, 120)), 9, n=2, temperature=0.9, seed=5)), chats()]


@pytest.mark.parametrize("form", ["text", "tokens"])
@pytest.mark.parametrize("load", [{"max_concurrency": 3}, {"request_rate": 50.0}])
def test_client_usage_and_metrics_agree_exactly(server, sensitive, form, load):
    encoder = PromptEncoder(sensitive) if form == "tokens" else None

    async def go():
        async with Client(server.base_url) as client:
            settings = Load(await client.model(), **{"request_rate": math.inf} | load)
            assert await client.flush() == "/flush_cache"
            before = counted_by_metrics(await client.metrics())
            measurement = await LoadGenerator(client, encoder).run(mixed(), settings)
            return measurement.records, counted_by_metrics(await client.metrics()) - before

    records, metrics = asyncio.run(go())
    assert [record.error for record in records] == [None] * 15
    told = accounting(records, metrics)
    assert told["agree"] is True
    assert told["client"]["prompt"] == told["usage"]["prompt"] == told["metrics"]["prompt"] > 2000
    assert told["client"]["generated"] == told["metrics"]["generated"] == 12 * 7 + 2 * (2 * 6 + 2 * 2 * 5) + 18
    assert told["usage"]["cached"] == told["metrics"]["cached"] > 1000


def test_a_prompt_is_encoded_to_the_ids_that_the_server_takes_it_for(server, sensitive):
    def run(encoder):
        async def go():
            async with Client(server.base_url) as client:
                load = Load(await client.model(), max_concurrency=1)
                return (await LoadGenerator(client, encoder).run([*mixed()[:2], chats()], load)).records

        return asyncio.run(go())

    as_texts, as_ids = run(None), run(PromptEncoder(sensitive))
    assert [record.prompt_token_ids for record in as_texts] == [record.prompt_token_ids for record in as_ids]
    assert [record.token_ids for record in as_texts[:4]] == [record.token_ids for record in as_ids[:4]]
