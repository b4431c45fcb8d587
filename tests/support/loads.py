"""What tests of the load generator send, and how."""

import asyncio

from radixkv.bench.load.arrivals import Load
from radixkv.bench.load.client import Client
from radixkv.bench.load.generator import LoadGenerator
from radixkv.bench.session import Request, Session, lone
from support.live import LIMIT_S

OUTPUT_LEN = 4


def chat(*said):
    """A session of texts, each behind the answer to the one before."""

    def turns():
        text = ""
        for piece in said:
            text += piece
            (reply,) = yield (Request(text, OUTPUT_LEN),)
            text += reply.texts[0]

    return Session(turns, n_requests=len(said))


def sessions_of(prompts):
    """Texts, requests and sessions, as sessions."""
    made = []
    for prompt in prompts:
        if isinstance(prompt, Session):
            made.append(prompt)
        else:
            made.append(lone(prompt if isinstance(prompt, Request) else Request(prompt, OUTPUT_LEN)))
    return made


def send(address, prompts, *, encoder=None, silence_limit_s=LIMIT_S, **settings):
    """What came of it."""
    load = Load(**{"model": "fake-model", "max_concurrency": 8} | settings)

    async def go():
        async with Client(address, silence_limit_s=silence_limit_s) as client:
            return await LoadGenerator(client, encoder).run(sessions_of(prompts), load)

    return asyncio.run(go())


def ask(address, question, **settings):
    """What a client of this server says."""

    async def go():
        async with Client(address, **settings) as client:
            return await question(client)

    return asyncio.run(go())
