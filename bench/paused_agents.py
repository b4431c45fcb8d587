"""Agents whose tools take their time, at a server: with and without what it learns of their pauses.

The sessions are those of ``pauses.py``, in real time and over HTTP: chats with a system prompt in common, whose
every answer calls a tool that ``tool_choice`` names. So also a model without weights calls tools. The result comes
after the tool's time, or never, and then another session begins. Each policy gets a server that starts anew, and
the same sessions. Without ``--load-format`` a checkpoint is served; with it, the shape of Llama 3.1 8B with the
tokenizer and the chat template of the embedded model.

Prints a JSON line for each policy: prompt tokens found of all and of returning turns, the time to their first
token, turns and output tokens a second, and how many returns found all of their conversation on the device.

    python bench/paused_agents.py --output-file bench/results/paused_agents.jsonl
    python bench/paused_agents.py --case mixed --pool-tokens 400000 --sessions 64 --device cuda --load-format dummy
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from pauses import CASES, MAX_TOKENS, SYSTEM_TOKENS, USER, Case
from result_lines import report, script_parser
from shapes import LLAMA_8B

from radixkv.checkpoints import resolve
from radixkv.client.errors import BadReply
from radixkv.client.events import EventReader
from radixkv.client.http import HTTPClient
from radixkv.lab.bench.environment import provenance
from radixkv.lab.bench.report.run_metrics import percentile
from radixkv.processes.server_process import running_server

POLICIES = ("none", "learnt")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Samples:
    """What the clients have measured since the end of the warm-up."""

    ttft_s: list[float] = field(default_factory=list)
    """Of returning turns."""
    n_prompt: int = 0
    n_found: int = 0
    n_prompt_returning: int = 0
    n_found_returning: int = 0
    n_output: int = 0
    n_turns: int = 0
    errors: list[str] = field(default_factory=list)


class Agents:
    """Clients that go on with their sessions after each tool's time.

    Args:
        args: sizes.
        case: the tools and their times.
        server: client of HTTP.
        tokens_per_word: mean tokens of a random word.
    """

    def __init__(self, args: argparse.Namespace, case: Case, server: HTTPClient, tokens_per_word: float) -> None:
        self.samples = Samples()
        self._args = args
        self._case = case
        self._server = server
        self._tokens_per_word = tokens_per_word
        self._random = Random(args.seed)
        self._system = self._text(self._random, args.scale * SYSTEM_TOKENS)
        self._begin = self._end = inf

    async def run(self) -> None:
        """Runs for the time that was asked for; requests that run then are cut off."""
        now = time.perf_counter()
        self._begin, self._end = now + self._args.seconds / 4, now + self._args.seconds
        try:
            async with asyncio.timeout(self._args.seconds), asyncio.TaskGroup() as clients:
                for _ in range(self._args.sessions):
                    clients.create_task(self._follow(Random(self._random.random())))
        except TimeoutError:
            pass

    async def _follow(self, rng: Random) -> None:
        """Has one session after the other."""
        await asyncio.sleep(rng.uniform(0, self._args.seconds / 10))
        while True:
            await self._session(rng)

    async def _session(self, rng: Random) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}]
        messages.append({"role": "user", "content": self._text(rng, self._args.scale * rng.randint(2000, 6000))})
        is_user, is_returning, n_tokens = rng.random() < self._case.users, False, 0
        while n_tokens < self._args.scale * MAX_TOKENS:
            tools = self._case.tools
            (name,) = rng.choices(list(tools), [tool.share for tool in tools.values()])
            answer, n_tokens = await self._answered(messages, None if is_user else name, rng, is_returning)
            if answer is None:
                return
            tool = USER if is_user else tools[name]
            if rng.random() < tool.lost:
                await asyncio.sleep(rng.expovariate(1 / 20))
                return
            await asyncio.sleep(self._args.time_scale * tool.seconds(rng))
            result = self._text(rng, self._args.scale * rng.randint(100, 1500))
            messages.append(answer)
            if is_user:
                messages.append({"role": "user", "content": result})
            else:
                call = answer["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": call, "content": result})
            is_returning = True

    async def _answered(
        self, messages: list[dict[str, Any]], tool: str | None, rng: Random, is_returning: bool
    ) -> tuple[dict[str, Any] | None, int]:
        """Returns the message of the answer, None if it failed, and the tokens of the conversation."""
        names = self._case.tools
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "stream": True}
        body |= {
            "stream_options": {"include_usage": True},
            "max_tokens": 64,
            "tools": [_tool(name) for name in names],
        }
        if tool is not None:
            body["tool_choice"] = {"type": "function", "function": {"name": tool}}
        else:
            body |= {"tool_choice": "none", "ignore_eos": True, "max_tokens": rng.randint(40, 250)}
        answer: dict[str, Any] = {"role": "assistant", "content": ""}
        sent, first, usage, events = time.perf_counter(), None, {}, EventReader()
        try:
            async for piece in self._server.stream("/v1/chat/completions", json.dumps(body).encode()):
                for event in events.push(piece):
                    if event == b"[DONE]":
                        continue
                    chunk = json.loads(event)
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        first = first or time.perf_counter()
                        answer["content"] += choice["delta"].get("content") or ""
                        if calls := choice["delta"].get("tool_calls"):
                            _add_calls(answer, calls)
        except BadReply as error:
            self.samples.errors.append(str(error))
            return None, 0
        if tool is not None and not answer.get("tool_calls"):
            self.samples.errors.append(f"no call in {answer}")
            return None, 0
        assert first is not None, "an answer has a chunk"
        if self._begin < first < self._end:
            self._count(usage, first - sent, is_returning)
        return answer, usage["total_tokens"]

    def _count(self, usage: dict[str, Any], ttft_s: float, is_returning: bool) -> None:
        samples, n_found = self.samples, usage["prompt_tokens_details"]["cached_tokens"]
        samples.n_turns += 1
        samples.n_output += usage["completion_tokens"]
        samples.n_prompt += usage["prompt_tokens"]
        samples.n_found += n_found
        if is_returning:
            samples.n_prompt_returning += usage["prompt_tokens"]
            samples.n_found_returning += n_found
            samples.ttft_s.append(ttft_s)

    def _text(self, rng: Random, n_tokens: float) -> str:
        return random_words(rng, round(n_tokens / self._tokens_per_word))


def random_words(rng: Random, n_words: int) -> str:
    return " ".join("".join(rng.choices(LETTERS, k=4)) for _ in range(n_words))


def _tool(name: str) -> dict[str, Any]:
    """Returns a tool without parameters, so that any model can call it."""
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def _add_calls(answer: dict[str, Any], deltas: list[dict[str, Any]]) -> None:
    """Adds the pieces of calls to a message."""
    calls = answer.setdefault("tool_calls", [])
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for key in ("name", "arguments"):
            calls[delta["index"]]["function"][key] += delta["function"].get(key) or ""


def write_chat_model(folder: Path) -> Path:
    """Writes the shape of Llama 3.1 8B with the embedded model's tokenizer, for a server without weights."""
    tiny = resolve("tiny").folder
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    tokens = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | tokens), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny / name, folder)
    return folder


async def measure(args: argparse.Namespace, policy: str, model: str) -> dict[str, Any]:
    """Starts a server and runs the sessions; returns the line."""
    flags = ["--model", model, "--device", args.device, "--max-total-tokens", str(args.pool_tokens), *args.flags]
    if args.load_format is not None:
        flags += ["--load-format", args.load_format]
    if policy == "none":
        flags.append("--no-learn-pauses")
    variables = {"OMP_NUM_THREADS": "1"} if args.device == "cpu" else {}
    async with running_server(flags, environment=variables) as address, HTTPClient(address) as server:
        words = random_words(Random(0), 500)
        reply = json.loads(await server.request("POST", "/tokenize", json.dumps({"prompt": words}).encode()))
        agents = Agents(args, CASES[args.case], server, reply["count"] / 500)
        await agents.run()
        doctor = json.loads(await server.request("GET", "/cache/doctor"))
    samples = agents.samples
    if not samples.ttft_s:
        sys.exit(f"nothing is measured: {samples.errors[:1] or 'run it longer'}")
    ttft = sorted(samples.ttft_s)
    seconds = 0.75 * args.seconds
    return {
        "found_pct": round(100 * samples.n_found / samples.n_prompt, 2),
        "found_returning_pct": round(100 * samples.n_found_returning / samples.n_prompt_returning, 2),
        **{f"ttft_p{part}_s": round(percentile(ttft, part) or 0.0, 4) for part in (50, 90, 99)},
        "returning_turns": len(ttft),
        "turns_per_s": round(samples.n_turns / seconds, 3),
        "output_tokens_per_s": round(samples.n_output / seconds, 1),
        "errors": samples.errors[:3],
        "n_errors": len(samples.errors),
        "pauses": doctor.get("pauses"),
    }


async def main() -> None:
    """Measures the policies in turn, as often as asked."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="a checkpoint, for a server with weights")
    parser.add_argument("--load-format", choices=("dummy",), help="serve the shape of Llama 3.1 8B without weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", choices=tuple(CASES), default="agents")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--rounds", type=int, default=1, help="of all policies, in turn")
    parser.add_argument("--pool-tokens", type=int, default=400_000)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=100.0, help="of which a quarter is warm-up")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the tokens of messages")
    parser.add_argument("--time-scale", type=float, default=1.0, help="factor of the times of tools")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of the server, after --")
    args = parser.parse_args()
    about = provenance()
    settings = {
        name: value for name, value in vars(args).items() if name not in ("output_file", "policies", "rounds")
    }
    with tempfile.TemporaryDirectory() as folder:
        model = args.model if args.load_format is None else str(write_chat_model(Path(folder)))
        for number in range(args.rounds):
            for policy in args.policies if number % 2 == 0 else reversed(args.policies):
                line = await measure(args, policy, model)
                line = {"benchmark": "paused_agents", "policy": policy, **line, "settings": settings}
                report(args.output_file, line, about)


if __name__ == "__main__":
    asyncio.run(main())
