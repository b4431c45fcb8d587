"""Conversations with recorded answers, as token ids: what ``drafts.py`` replays.

Those of a tokens file are texts: ``tokenize`` makes it, so that a machine with a GPU needs neither the texts nor a
tokenizer. The others are random.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from token_workloads import VOCAB, agents

from radixkv.tree.node import TOKEN_BYTES

Message = Mapping[str, Any]

FIRST_NAMES = (
    "Amara Bjorn Chidi Dolores Emeka Fatima Greta Hiroshi Ines Jamal Katya Liam Mei Noor Olga Pablo".split()
)
LAST_NAMES = (
    "Abebe Baptiste Castellano Dubois Eriksson Fitzgerald Gonzalez Hakimi Ivanova Jorgensen Kowalski".split()
)
STREETS = ("Sunset Drive", "Willow Lane", "Old Mill Road", "Harbour Street", "Cedar Avenue", "Station Square")
CITIES = ("Rotterdam", "Gothenburg", "Thessaloniki", "Albuquerque", "Yokohama", "Wellington", "Montevideo", "Leeds")
COLOURS = ("red", "navy blue", "charcoal", "ivory", "olive green", "turquoise")
GOODS = (
    "kettle",
    "desk lamp",
    "rain jacket",
    "garden hose",
    "picture frame",
    "cutting board",
    "wool blanket",
    "mug",
)


class Turn(NamedTuple):
    """A prompt and its recorded answer, little-endian int32."""

    prompt: bytes
    """All tokens before the answer: the last turn's prompt and answer, and more."""
    answer: bytes


Conversation = Sequence[Turn]
Workload = Sequence[Conversation]


class _Recorded(NamedTuple):
    """A conversation as messages."""

    workload: str
    is_first_trial: bool
    messages: Sequence[Message]


def load(path: Path) -> dict[str, Workload]:
    """Reads a tokens file; returns its workloads by name. ``first_trials`` are those of ``taubench``."""
    with np.load(path) as file:
        tokens = file["tokens"].astype("<i4").tobytes()
        lengths, n_turns = file["lengths"].tolist(), file["n_turns"].tolist()
        names, are_first = file["workloads"].tolist(), file["are_first_trials"].tolist()
    pieces = _split(tokens, lengths)
    workloads: dict[str, list[Conversation]] = {}
    for name, is_first, n in zip(names, are_first, n_turns, strict=True):
        conversation = _turns([(next(pieces), next(pieces)) for _ in range(n)])
        workloads.setdefault(name, []).append(conversation)
        if name == "taubench" and is_first:
            workloads.setdefault("first_trials", []).append(conversation)
    return {name: list(conversations) for name, conversations in workloads.items()}


def random_answers(n: int = 768, prompt: int = 128, output: int = 256, seed: int = 1) -> Workload:
    """Generates random answers to random prompts: there is nothing to draft."""
    rng = random.Random(seed)
    return [
        [Turn(_pack(_ids(rng, _around(rng, prompt))), _pack(_ids(rng, _around(rng, output))))] for _ in range(n)
    ]


def agent_answers(sizes: Mapping[str, int], piece: int = 16, seed: int = 2) -> Workload:
    """Generates answers to the prompts of ``token_workloads.agents``: random pieces, and pieces of the prompt."""
    rng = random.Random(seed)
    found = []
    for prompt, n_new in (request for phase in agents(**sizes) for request in phase):
        answer: list[int] = []
        while len(answer) < n_new:
            start, n = rng.randrange(len(prompt) - 2 * piece), _around(rng, piece)
            answer += [*_ids(rng, n), *prompt[start : start + n]]
        found.append([Turn(_pack(prompt), _pack(answer[:n_new]))])
    return found


def fitting(workload: Workload, vocab_size: int, max_length: int) -> Workload:
    """Returns a workload for a small model: without turns that are too long, and with ids modulo the vocabulary's
    size, so that different texts may become the same."""

    def smaller(tokens: bytes) -> bytes:
        ids = np.frombuffer(tokens, "<i4")
        return tokens if ids.max() < vocab_size else (ids % vocab_size).tobytes()

    conversations = [
        [
            Turn(smaller(turn.prompt), smaller(turn.answer))
            for turn in conversation
            if len(turn.prompt) + len(turn.answer) <= max_length * TOKEN_BYTES
        ]
        for conversation in workload
    ]
    return [conversation for conversation in conversations if conversation]


def tokenize(arguments: Sequence[str]) -> None:
    """Writes a tokens file. ``arguments`` are those of the command line."""
    parser = argparse.ArgumentParser(prog="drafts.py tokenize", description="Writes a file for --tokens.")
    parser.add_argument("--messages", type=Path, required=True, help="JSON lines with task_id, trial, messages")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with question, answer")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with its files")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.npz")
    chosen = parser.parse_args(arguments)
    runs = sorted(_json_lines(chosen.messages), key=lambda run: (run["task_id"], run["trial"]))
    recorded = [_Recorded("taubench", run["trial"] == 0, run["messages"]) for run in runs]
    recorded += [_Recorded("extraction", False, messages) for messages in _extractions()]
    recorded += [_Recorded("chats", False, messages) for messages in _chats(_json_lines(chosen.questions))]
    n_tokens = _write(chosen.output, recorded, _load_tokenizer(chosen.tokenizer))
    print(f"{len(recorded)} conversations, {n_tokens} tokens, {chosen.output.stat().st_size} bytes")


def _chats(questions: Sequence[Mapping[str, str]], n_turns: int = 4) -> Iterator[list[Message]]:
    """Yields chats that ask one question after another, without the marks of a calculator in the answers."""
    system = {"role": "system", "content": "You are a patient teacher. Solve each problem step by step."}
    for start in range(0, len(questions), n_turns):
        chat: list[Message] = [system]
        for one in questions[start : start + n_turns]:
            chat.append({"role": "user", "content": one["question"]})
            chat.append({"role": "assistant", "content": re.sub("<<.*?>>", "", one["answer"])})
        yield chat


def _extractions(n: int = 256, seed: int = 3) -> Iterator[list[Message]]:
    """Yields letters that order something, and the order as JSON, which quotes the letter."""
    rng = random.Random(seed)
    keys = "order_id, ordered_on, customer, email, street, city, items (name, quantity, unit_price), total, is_gift"
    system = {"role": "system", "content": f"Answer with the order as a JSON object with these keys: {keys}."}
    for _ in range(n):
        first, last = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
        email = f"{first}.{last}{rng.randrange(10, 99)}@{rng.choice(('example.com', 'mail.example.org'))}".lower()
        number = "".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ23456789", k=10))
        day, month = rng.randint(1, 28), rng.randint(1, 12)
        street, city = f"{rng.randint(1, 999)} {rng.choice(STREETS)}", rng.choice(CITIES)
        items = [
            {
                "name": f"{rng.choice(COLOURS)} {name}",
                "quantity": rng.randint(1, 9),
                "unit_price": rng.randint(3, 400) + 0.95,
            }
            for name in rng.sample(GOODS, rng.randint(2, 5))
        ]
        is_gift = rng.random() < 0.5
        wishes = [f"{one['quantity']} of the {one['name']}, at {one['unit_price']} each" for one in items]
        sentences = [
            f"I ordered on {date(2026, month, day).strftime('%B %d')} and the number of the order is {number}.",
            f"Please send it to {street} in {city}.",
            f"If there are questions, my address is {email}, and I read it in the evening only.",
            "It is a present, so please leave the bill out." if is_gift else "The bill can come with the parcel.",
            "The last parcel was a week late, which I hope does not happen again.",
            "My neighbour takes parcels when nobody opens the door.",
        ]
        rng.shuffle(sentences)
        letter = ["Hello,", "I want " + "; ".join(wishes) + ".", *sentences, f"Kind regards, {first} {last}"]
        order = {
            "order_id": number,
            "ordered_on": date(2026, month, day).isoformat(),
            "customer": f"{first} {last}",
            "email": email,
            "street": street,
            "city": city,
            "items": items,
            "total": round(sum(one["quantity"] * one["unit_price"] for one in items), 2),
            "is_gift": is_gift,
        }
        user = {"role": "user", "content": "\n".join(letter)}
        yield [system, user, {"role": "assistant", "content": json.dumps(order)}]


def _write(path: Path, recorded: Sequence[_Recorded], tokenizer: tokenizers.Tokenizer) -> int:
    """Writes a tokens file; returns how many tokens it has."""
    texts = [list(_pieces(one.messages)) for one in recorded]
    encoded = tokenizer.encode_batch([text for pieces in texts for text in pieces], add_special_tokens=False)
    tokens = np.array([token for piece in encoded for token in piece.ids])
    np.savez_compressed(
        path,
        tokens=tokens.astype(np.uint16 if tokens.max() < 1 << 16 else np.int32),
        lengths=np.array([len(piece.ids) for piece in encoded], np.int32),
        n_turns=np.array([len(pieces) // 2 for pieces in texts], np.int32),
        workloads=np.array([one.workload for one in recorded]),
        are_first_trials=np.array([one.is_first_trial for one in recorded]),
    )
    return len(tokens)


def _pieces(messages: Sequence[Message]) -> Iterator[str]:
    """Yields what comes before the first answer, that answer, what comes before the second, and so on."""
    before = ""
    for message in messages:
        before += f"{message['role']}:\n"
        if message["role"] == "assistant":
            yield before
            yield _text(message)
            before = ""
        else:
            before += _text(message)


def _text(message: Message) -> str:
    """Writes a message as a model would, with its tool calls as JSON."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [json.dumps({"name": call["name"], "arguments": json.loads(call["arguments"])}) for call in calls]
    return "\n".join([*filter(None, [message.get("content")]), *lines, ""])


def _load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Reads ``tokenizer.json``, or GPT-2's ``vocab.json`` and ``merges.txt``."""
    if (folder / "tokenizer.json").exists():
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _turns(pieces: Iterable[tuple[bytes, bytes]]) -> Conversation:
    prompt, turns = b"", []
    for before, answer in pieces:
        prompt += before
        turns.append(Turn(prompt, answer))
        prompt += answer
    return turns


def _split(tokens: bytes, lengths: Iterable[int]) -> Iterator[bytes]:
    end = 0
    for length in lengths:
        start, end = end, end + length * TOKEN_BYTES
        yield tokens[start:end]


def _json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _pack(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, VOCAB) for _ in range(n)]


def _around(rng: random.Random, n: int) -> int:
    """Returns a random length from half of ``n`` to one and a half."""
    return rng.randint(n // 2, n * 3 // 2)
