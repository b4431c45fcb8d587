"""Replays recorded chats to see how well each source of drafts guesses the answers, without a model.

The chats of a JSONL file, ``messages`` in OpenAI's format a line, run one after another through a page cache as the
engine would run them: each message of the assistant answers a request whose prompt is all before it. The recorded
tokens are what a model would sample; drafts are accepted while they are equal to these. The first token of an
answer comes with its prompt, so it counts nowhere.

Appends a JSON line for each case, the first two for all chats and for the first trial of each task:

* ``tokens_a_step``: tokens of all decode steps by their number, for each source alone and for choices among them;
* ``acceptance``: by source and length of the match, at every position of an answer: the number of guesses, the
  share whose first token is right, and the mean of right tokens;
* ``guess``: microseconds of a guess, by source, at the chats' lengths;
* ``long_guess``: the same in a request of 32,768 tokens: of the chats, at random, and made to be slow;
* ``remember``: microseconds to take an answer.
"""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import mean
from time import perf_counter_ns
from typing import Any, NamedTuple

from result_lines import report, script_parser
from tokenizers import ByteLevelBPETokenizer

from radixkv.lab.bench.environment import provenance
from radixkv.lab.simulator.draft_replay import DraftReplay, n_right
from radixkv.runtime.drafts.sources import LongestMatch
from radixkv.runtime.request import Request
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 16
N_PAGES = 1 << 17
BEGIN, END = -2, -1
"""Tokens around a message, counted from the end of the vocabulary with two more."""
LONG_TOKENS = 32_768
CHOICES = {
    "first of tree, prompt, answers": ("first", ("tree", "prompt", "answers")),
    "first of tree, answers, prompt": ("first", ("tree", "answers", "prompt")),
    "first of answers, prompt, tree": ("first", ("answers", "prompt", "tree")),
    "longest of prompt, answers": ("longest", ("prompt", "answers")),
    "longest of tree, prompt, answers": ("longest", ("tree", "prompt", "answers")),
    "longest of tree, answers, prompt": ("longest", ("tree", "answers", "prompt")),
    "best in hindsight": ("best", ("tree", "prompt", "answers")),
}


class Turn(NamedTuple):
    """An answer, and what it continues."""

    prompt: list[int]
    answer: list[int]


class Guessed(NamedTuple):
    """What one source guesses at one position of an answer."""

    n_matched: int
    n_tokens: int
    n_right: int
    nanoseconds: int


Place = dict[str, Guessed]
"""By source, what it guesses at one position."""
Choose = Callable[[Place], Guessed]


def read_turns(path: Path, tokenizer: ByteLevelBPETokenizer, *, only_first_trials: bool) -> list[Turn]:
    """Returns the answers of all chats, in order."""
    n_ids = tokenizer.get_vocab_size() + 2
    begin, end = n_ids + BEGIN, n_ids + END
    turns = []
    for line in path.read_text(encoding="utf-8").splitlines():
        chat = json.loads(line)
        if only_first_trials and chat.get("trial"):
            continue
        tokens: list[int] = []
        for message in chat["messages"]:
            tokens += [begin, *tokenizer.encode(message["role"] + "\n").ids]
            body = [*tokenizer.encode(text_of(message)).ids, end]
            if message["role"] == "assistant":
                turns.append(Turn(list(tokens), body))
            tokens += body
    return turns


def text_of(message: dict[str, Any]) -> str:
    """Returns a message as a chat template would render it, with calls of tools."""
    calls = [
        f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
        for function in (call["function"] for call in message.get("tool_calls") or ())
    ]
    return "\n".join(filter(None, [message.get("content"), *calls]))


class TimedReplay(DraftReplay):
    """Asks all sources at each position, and measures how long they take.

    Args:
        config: the sources, and lengths of drafts and of matches.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config, N_PAGES, PAGE_SIZE)
        self._max_tokens = config.num_speculative_tokens
        del self.sources["prediction"]  # the chats have none
        self.sources["all"] = LongestMatch(tuple(self.sources.values()), config.lookup_sizes)
        self.remembered_ns: list[int] = []
        """Time to take each answer."""

    def run(self, turn: Turn) -> list[Place]:
        """Answers a request with the recorded tokens; returns what each source guesses at each position."""
        return [
            {name: self.ask(name, request, following) for name in self.sources}
            for request, following in self.places(pack_tokens(turn.prompt), pack_tokens(turn.answer))
        ]

    def released(self, request: Request) -> None:
        """Tells the sources of an answer."""
        started = perf_counter_ns()
        super().released(request)
        self.remembered_ns.append(perf_counter_ns() - started)

    def ask(self, name: str, request: Request, following: bytes) -> Guessed:
        """Returns what a source guesses, of which ``following`` is right."""
        started = perf_counter_ns()
        guess = self.sources[name].guess(request, self._max_tokens)
        elapsed = perf_counter_ns() - started
        if guess is None:
            return Guessed(0, 0, 0, elapsed)
        n_tokens = len(guess.tokens) // TOKEN_BYTES
        return Guessed(guess.n_matched, n_tokens, n_right(guess.tokens, following), elapsed)


def choice(kind: str, order: Sequence[str]) -> Choose:
    """Returns what chooses among the guesses of several sources."""
    if kind == "first":
        return lambda place: next((place[name] for name in order if place[name].n_tokens), place[order[0]])
    if kind == "longest":
        return lambda place: max((place[name] for name in order), key=lambda guessed: guessed.n_matched)
    return lambda place: max((place[name] for name in order), key=lambda guessed: guessed.n_right)


def tokens_a_step(answers: list[list[Place]], choose: Choose) -> float:
    """Returns the tokens of decode steps by the number of these steps, where ``choose`` says what a step checks."""
    n_steps = 0
    for places in answers:
        place = 0
        while place < len(places):
            place += 1 + choose(places[place]).n_right
            n_steps += 1
    return round(sum(map(len, answers)) / n_steps, 3)


def acceptance(answers: list[list[Place]], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a line for each source and length of a match."""
    for name in names:
        by_length: dict[int, list[Guessed]] = defaultdict(list)
        for places in answers:
            for place in places:
                if place[name].n_tokens:
                    by_length[place[name].n_matched].append(place[name])
        for length, guesses in sorted(by_length.items()):
            yield {
                "source": name,
                "n_matched": length,
                "guesses": len(guesses),
                "first_right": round(mean(one.n_right > 0 for one in guesses), 3),
                "mean_tokens": round(mean(one.n_tokens for one in guesses), 2),
                "mean_right": round(mean(one.n_right for one in guesses), 2),
            }


def times(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Returns median, 99th percentile and maximum in microseconds."""
    ordered = [one / 1e3 for one in sorted(nanoseconds)]
    return {"us": ordered[len(ordered) // 2], "p99_us": ordered[len(ordered) * 99 // 100], "max_us": ordered[-1]}


def long_texts(turns: Sequence[Turn]) -> dict[str, list[int]]:
    """Returns texts of 32,768 tokens, by what they are."""
    random = Random(0)
    chats = [token for turn in turns for token in turn.prompt]
    chats = (chats * (1 + LONG_TOKENS // len(chats)))[:LONG_TOKENS]
    return {
        "chats": chats,
        "random": [random.randrange(50_000) for _ in range(LONG_TOKENS)],
        "one token": [0] * LONG_TOKENS,
        "one token, with an ending that is new": [0] * (LONG_TOKENS - 8) + [256] + [0] * 7,
        "short endings everywhere": [9, 1, 2, 3, *[8, 1, 2, 3] * (LONG_TOKENS // 4 - 2), 9, 1, 2, 3],
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--chats", type=Path, required=True, metavar="FILE", help="messages, a chat a line")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FOLDER", help="has vocab.json and merges.txt"
    )
    parser.add_argument("--drafts", type=int, default=16, help="tokens of a guess (default: %(default)s)")
    parser.add_argument(
        "--lookup", type=int, nargs=2, default=(2, 8), metavar=("MIN", "MAX"), help="of a match (default: 2 8)"
    )
    parser.add_argument("--calls", type=int, default=1000, help="of a long guess (default: %(default)s)")
    arguments = parser.parse_args()
    gc.disable()  # as in the runtime's loop
    folder: Path = arguments.tokenizer
    tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    shortest, longest = arguments.lookup
    config = SpeculativeConfig("tree", arguments.drafts, longest, shortest)
    sizes = {"drafts": config.num_speculative_tokens, "sizes": config.lookup_sizes}
    about = {"chats": arguments.chats.name, **sizes, **provenance()}

    def write(case: str, **line: object) -> None:
        report(arguments.output_file, {"case": case, **line}, about)

    for runs, only_first in (("first trials", True), ("all", False)):
        turns = read_turns(arguments.chats, tokenizer, only_first_trials=only_first)
        replay = TimedReplay(config)
        names = list(replay.sources)
        answers = [replay.run(turn) for turn in turns]
        counts = {"answers": len(turns), "tokens": sum(map(len, answers))}
        choices = {name: choice("first", (name,)) for name in names}
        choices |= {name: choice(*how) for name, how in CHOICES.items()}
        for name, choose in choices.items():
            write("tokens_a_step", runs=runs, source=name, tokens_a_step=tokens_a_step(answers, choose), **counts)
        for line in acceptance(answers, names[:3]):
            write("acceptance", runs=runs, **line)
    for name in names:
        write("guess", source=name, **times([place[name].nanoseconds for places in answers for place in places]))
    write("remember", tokens=round(mean(len(turn.answer) for turn in turns)), **times(replay.remembered_ns))
    for text, tokens in long_texts(turns).items():
        replay.end(replay.begin(pack_tokens(tokens)))  # so that the tree has what follows
        request = replay.begin(pack_tokens(tokens[:-20]))
        request.known_key += pack_tokens(tokens[-20:] if text.startswith("one token,") else tokens[-20:-12])
        for name in names:
            guesses = [replay.ask(name, request, b"") for _ in range(arguments.calls)]
            found = guesses[0].n_matched
            write("long_guess", text=text, source=name, n_matched=found, **times([g.nanoseconds for g in guesses]))
        replay.end(request)


if __name__ == "__main__":
    main()
