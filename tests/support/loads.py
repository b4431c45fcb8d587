"""Sessions for tests of the load generator, and functions that send them."""

import asyncio

from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.generator import LoadGenerator
from radixkv.lab.bench.session import BenchRequest, Session, single_request_session
from support.live import LIMIT_S

OUTPUT_LEN = 4


def chat(*texts):
    """Returns a session of texts, each sent after the answer to the previous one."""

    def turns():
        prompt = ""
        for text in texts:
            prompt += text
            (reply,) = yield (BenchRequest(prompt, OUTPUT_LEN),)
            prompt += reply.texts[0]

    return Session(turns, n_requests=len(texts))


def sessions_of(prompts):
    """Turns texts and requests into sessions; leaves sessions as they are."""
    sessions = []
    for prompt in prompts:
        if isinstance(prompt, Session):
            sessions.append(prompt)
        else:
            sessions.append(
                single_request_session(
                    prompt if isinstance(prompt, BenchRequest) else BenchRequest(prompt, OUTPUT_LEN)
                )
            )
    return sessions


def send(address, prompts, *, encoder=None, silence_limit_s=LIMIT_S, **settings):
    """Sends prompts to a server and returns the measurement."""
    load = Load(**{"model": "fake-model", "max_concurrency": 8} | settings)

    async def go():
        async with OpenAIClient(address, silence_limit_s=silence_limit_s) as client:
            return await LoadGenerator(client, encoder).run(sessions_of(prompts), load)

    return asyncio.run(go())


def ask(address, question, **settings):
    """Returns the result of ``question``, called with a client of the server."""

    async def go():
        async with OpenAIClient(address, **settings) as client:
            return await question(client)

    return asyncio.run(go())
