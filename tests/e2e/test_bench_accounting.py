"""The load generator's token counts agree with the usage and the metrics of a real server."""

import asyncio
import math

import pytest

from radixkv.lab.bench.load.accounting import accounting
from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.generator import LoadGenerator
from radixkv.lab.bench.load.requests import PromptEncoder
from radixkv.lab.bench.load.server_counters import server_counts
from radixkv.lab.bench.session import BenchRequest, Session, single_request_session
from support.cases import covering

pytestmark = pytest.mark.nightly

SHARED = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n\n" * 8


def chats():
    """Returns a chat whose turns repeat the conversation, with two concurrent questions at the end."""

    def turns():
        messages = [{"role": "system", "content": SHARED}]
        for _ in range(2):
            messages.append({"role": "user", "content": "And then?"})
            (reply,) = yield [BenchRequest(list(messages), 6)]
            messages.append({"role": "assistant", "content": reply.texts[0]})
        yield [
            BenchRequest([*messages, {"role": "user", "content": f"Way {n}?"}], 5, n=2, seed=n) for n in range(2)
        ]

    return Session(turns, n_requests=4)


def mixed():
    texts = [
        single_request_session(BenchRequest(f"{SHARED}Question: {n} + 1?\nAnswer:", 7, n=1 + n % 3))
        for n in range(6)
    ]
    return [
        *texts,
        chats(),
        single_request_session(BenchRequest(tuple(range(20, 120)), 9, n=2, temperature=0.9, seed=5)),
        chats(),
    ]


@pytest.mark.parametrize(
    ("form", "load"), covering(["text", "tokens"], [{"max_concurrency": 3}, {"request_rate": 50.0}])
)
def test_client_usage_and_metrics_agree_exactly(server, sensitive, form, load):
    encoder = PromptEncoder(sensitive) if form == "tokens" else None

    async def go():
        async with OpenAIClient(server.base_url) as client:
            settings = Load(await client.model(), **{"request_rate": math.inf} | load)
            assert await client.flush() == "/flush_cache"
            before = server_counts(await client.metrics())
            measurement = await LoadGenerator(client, encoder).run(mixed(), settings)
            return measurement.records, (server_counts(await client.metrics()) - before).tokens

    records, metrics = asyncio.run(go())
    assert [record.error for record in records] == [None] * 15
    result = accounting(records, metrics)
    assert result["agree"] is True
    assert result["client"]["prompt"] == result["usage"]["prompt"] == result["metrics"]["prompt"] > 2000
    assert result["client"]["generated"] == result["metrics"]["generated"] == 12 * 7 + 2 * (2 * 6 + 2 * 2 * 5) + 18
    assert result["usage"]["cached"] == result["metrics"]["cached"] > 1000


def test_the_clients_encoding_equals_the_servers(server, sensitive):
    def run(encoder):
        async def go():
            async with OpenAIClient(server.base_url) as client:
                load = Load(await client.model(), max_concurrency=1)
                return (await LoadGenerator(client, encoder).run([*mixed()[:2], chats()], load)).records

        return asyncio.run(go())

    as_texts, as_ids = run(None), run(PromptEncoder(sensitive))
    assert [record.prompt_token_ids for record in as_texts] == [record.prompt_token_ids for record in as_ids]
    assert [record.token_ids for record in as_texts[:4]] == [record.token_ids for record in as_ids[:4]]
