"""Hit rate of a real server, or of its replicas, beside what the simulator predicts with answers and without.

Clients take the chats of a list in turn, as those of ``radixkv simulate --concurrency`` take requests. The server
has the embedded model. Chats begin with documents, some with the same, and each turn sends the answers back.

Appends one JSON line for each size of the pool: cached tokens in percent of prompt tokens, as the server's usage
says, and as the simulator says for the same prompts in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import msgspec
from result_lines import report, script_parser

from radixkv.client.http import HTTPClient
from radixkv.lab.bench.environment import provenance
from radixkv.lab.simulator.answers import RecordedAnswers
from radixkv.lab.simulator.caches import CacheSettings
from radixkv.lab.simulator.concurrent_replay import ConcurrentReplay
from radixkv.lab.simulator.traffic import TokenTraffic
from radixkv.processes.server_process import running_server
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 2048
N_DOCUMENTS, N_QUESTION = 24, 20
VOCABULARY = 2900
Chat = tuple[list[int], list[list[int]]]
"""A document, and the question of each turn."""


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument("--chats", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of a chat (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="requests in flight (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=60, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--pools", default="8192,12288,32768", help="sizes in tokens (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="each with such a pool (default: %(default)s)")
    arguments = parser.parse_args()
    for pool in map(int, arguments.pools.split(",")):
        chats = _chats(arguments.chats, arguments.turns)
        line = asyncio.run(measure(pool, chats, arguments.clients, arguments.answer, arguments.replicas))
        report(arguments.output_file, line, provenance())


async def measure(
    pool: int, chats_asked: list[Chat], n_clients: int, n_answer: int, n_replicas: int
) -> dict[str, object]:
    """Returns the line of one pool."""
    flags = ["--max-total-tokens", str(pool), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)]
    flags += ["--data-parallel-size", str(n_replicas)]
    prompts: list[list[int]] = []
    cached: list[int] = []
    chats = iter(chats_asked)
    async with running_server(flags) as address, HTTPClient(address) as client:

        async def ask() -> None:
            for document, questions in chats:
                prompt = document
                for question in questions:
                    prompt = [*prompt, *question]
                    index = len(prompts)
                    prompts.append(prompt)
                    cached.append(0)
                    body = {
                        "prompt": prompt,
                        "max_tokens": n_answer,
                        "ignore_eos": True,
                        "temperature": 0,
                        "return_token_ids": True,
                    }
                    reply = await client.request("POST", "/v1/completions", msgspec.json.encode(body))
                    answer: dict[str, Any] = msgspec.json.decode(reply)
                    cached[index] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    prompt = [*prompt, *answer["choices"][0]["token_ids"]]

        await asyncio.gather(*(ask() for _ in range(n_clients)))
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    n_prompt = sum(traffic.n_tokens)

    def simulated_pct(answers: RecordedAnswers | None) -> float:
        settings = CacheSettings(pool // PAGE_SIZE)
        replay = ConcurrentReplay(
            traffic, settings, n_clients, MAX_NUM_BATCHED_TOKENS, answers=answers, n_replicas=n_replicas
        )
        return round(100 * sum(replay.run().n_cached_tokens) / n_prompt, 2)

    answers = RecordedAnswers(traffic, [n_answer] * len(prompts), are_limited=True)
    return {
        "benchmark": "simulated_hits",
        "pool_tokens": pool,
        "replicas": n_replicas,
        "clients": n_clients,
        "turns": len(chats_asked[0][1]),
        "requests": len(prompts),
        "prompt_tokens": n_prompt,
        "answer_tokens": n_answer,
        "server_pct": round(100 * sum(cached) / n_prompt, 2),
        "simulated_pct": await asyncio.to_thread(simulated_pct, answers),
        "simulated_without_answers_pct": await asyncio.to_thread(simulated_pct, None),
    }


def _chats(n_chats: int, n_turns: int) -> list[Chat]:
    """Returns the document and the questions of each chat."""
    random = Random(1)
    documents = [
        [random.randrange(VOCABULARY) for _ in range(random.randrange(100, 500))] for _ in range(N_DOCUMENTS)
    ]
    weights = [1 / (1 + rank) for rank in range(N_DOCUMENTS)]
    return [
        (
            random.choices(documents, weights)[0],
            [[random.randrange(VOCABULARY) for _ in range(N_QUESTION)] for _ in range(n_turns)],
        )
        for _ in range(n_chats)
    ]


if __name__ == "__main__":
    main()
