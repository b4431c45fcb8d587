"""The five workloads: what is asked, how long it is, and when it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from radixkv.errors import ConfigError
from radixkv.studies.paging.lengths import AllLengths, Chat, Lengths, Pair
from radixkv.studies.paging.sequences import Conversation, Segment, Segments, Sequence, Turn

N_PREFIXES = 4
"""Different sets of worked examples."""
N_SHOTS = 8
"""Worked examples in a set."""
N_SAMPLES = 4
"""Answers to a prompt."""
LOAD = 1.25
"""What arrives, in times of what a pool without any waste could serve."""
GENERATIONS = 4
"""How many pools full of sequences are asked for in all, where their number is not given."""
MAX_MISFITS = 10_000
"""So many in a row that are too long: nothing fits."""


@dataclass(frozen=True)
class Workload:
    """The same requests for every scheme."""

    name: str
    lengths: str
    """Where the lengths come from."""
    conversations: list[Conversation]
    arrivals: list[int]
    """The step before which each conversation's first turn arrives, ascending."""
    n_left_out: int
    """Requests, turns of chats, or sets of worked examples, that were drawn and are too long for the context."""
    tokenizer: str | None = None
    """Counted the lengths; None if these did not come from texts."""

    @property
    def n_sequences(self) -> int:
        """Answers of all turns."""
        return sum(len(turn.sequences) for conversation in self.conversations for turn in conversation)

    @property
    def n_answer_tokens(self) -> int:
        """Of all answers."""
        turns = (turn for conversation in self.conversations for turn in conversation)
        return sum(sequence.answer.n_tokens for turn in turns for sequence in turn.sequences)


@dataclass
class Drawing:
    """What the makers of workloads draw from."""

    lengths: AllLengths
    max_model_len: int
    rng: Random
    segments: Segments
    n_left_out: int = 0

    def fitting(self, draw: Callable[[Random], Pair], n_before: int = 0) -> Pair:
        """The next pair of lengths that fits the context behind so many tokens; counts the others."""
        for _ in range(MAX_MISFITS):
            pair = draw(self.rng)
            if n_before + pair.prompt + pair.answer <= self.max_model_len:
                return pair
            self.n_left_out += 1
        raise self.nothing_fits("prompts with their answers")

    def examples(self, draw: Callable[[Random], Pair]) -> Segment:
        """The next worked examples behind which a problem of their average length fits; counts the other sets."""
        for _ in range(MAX_MISFITS):
            n_tokens = sum(sum(draw(self.rng)) for _ in range(N_SHOTS))
            if n_tokens + n_tokens / N_SHOTS <= self.max_model_len:
                return self.segments.new(n_tokens)
            self.n_left_out += 1
        raise self.nothing_fits(f"sets of {N_SHOTS} worked examples with a problem behind them")

    def nothing_fits(self, what: str) -> ConfigError:
        """What is wrong if that goes on."""
        return ConfigError(
            f"--max-model-len {self.max_model_len} holds none of {MAX_MISFITS} {what}; give a larger one"
        )

    def turn(self, prompt: tuple[Segment, ...], *answers: int) -> Turn:
        """A prompt, and answers of so many tokens."""
        return Turn(tuple(Sequence(prompt, self.segments.new(n_tokens)) for n_tokens in answers))


class Drawn(NamedTuple):
    """A conversation."""

    conversation: Conversation
    n_shared: int = 0
    """Tokens at its beginning that others have too."""


def uniform_short(drawing: Drawing) -> Iterator[Drawn]:
    """Short questions, short answers, nothing shared."""
    return _lone(drawing, drawing.lengths.problems.draw)


def variable_length(drawing: Drawing) -> Iterator[Drawn]:
    """Requests of all lengths, nothing shared."""
    return _lone(drawing, drawing.lengths.requests.draw)


def shared_prefix(drawing: Drawing) -> Iterator[Drawn]:
    """Short questions, each behind one of a few sets of worked examples."""
    draw = drawing.lengths.problems.draw
    prefixes = [drawing.examples(draw) for _ in range(N_PREFIXES)]
    while True:
        prefix = drawing.rng.choice(prefixes)
        pair = drawing.fitting(draw, prefix.n_tokens)
        question = drawing.segments.new(pair.prompt)
        yield Drawn((drawing.turn((prefix, question), pair.answer),), prefix.n_tokens)


def multi_turn(drawing: Drawing) -> Iterator[Drawn]:
    """Chats whose turns have all that was said before as their prompt; they end where the context does."""
    systems: dict[str, Segment] = {}
    n_misfits = 0
    while n_misfits < MAX_MISFITS:
        chat = drawing.lengths.chats.draw(drawing.rng)
        system = systems.get(chat.system)
        if system is None:
            system = systems[chat.system] = drawing.segments.new(chat.n_system)
        said: tuple[Segment, ...] = (system,)
        n_said = chat.n_system
        turns: list[Turn] = []
        for added, answer in chat.turns:
            n_said += added + answer
            if n_said > drawing.max_model_len:
                break
            said = (*said, drawing.segments.new(added))
            turns.append(drawing.turn(said, answer))
            said = (*said, turns[-1].sequences[0].answer)
        drawing.n_left_out += len(chat.turns) - len(turns)
        n_misfits = 0 if turns else n_misfits + 1
        if turns:
            yield Drawn(tuple(turns), chat.n_system)
    raise drawing.nothing_fits("chats' first turns")


def parallel_sampling(drawing: Drawing) -> Iterator[Drawn]:
    """Requests of all lengths with several answers each, of lengths of their own within the context."""
    draw = drawing.lengths.requests.draw
    while True:
        pair = drawing.fitting(draw)
        longest = drawing.max_model_len - pair.prompt
        others = [min(longest, draw(drawing.rng).answer) for _ in range(N_SAMPLES - 1)]
        yield Drawn((drawing.turn((drawing.segments.new(pair.prompt),), pair.answer, *others),))


WORKLOADS: Mapping[str, Callable[[Drawing], Iterator[Drawn]]] = {
    "uniform-short": uniform_short,
    "variable-length": variable_length,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "parallel-sampling": parallel_sampling,
}


def make_workload(
    name: str,
    lengths: AllLengths,
    *,
    pool_tokens: int,
    max_model_len: int,
    n_conversations: int | None = None,
    seed: int = 0,
) -> Workload:
    """A workload for a pool: enough requests to fill it a few times, arriving faster than any scheme serves them.

    Args:
        name: one of ``WORKLOADS``.
        lengths: of prompts and answers.
        pool_tokens: token slots of the pool.
        max_model_len: longest prompt and answer together.
        n_conversations: how many requests or chats; None takes as many as fill the pool ``GENERATIONS`` times.
        seed: equal ones give equal workloads.

    Raises:
        ConfigError: no length fits the context.
    """
    drawing = Drawing(lengths, max_model_len, Random(seed), Segments())
    conversations: list[Conversation] = []
    slots = slot_steps = 0.0
    for conversation, n_shared in WORKLOADS[name](drawing):
        conversations.append(conversation)
        needs = [_needs(turn, n_shared) for turn in conversation]
        slots += sum(need.slots for need in needs) / len(needs)
        slot_steps += sum(need.slots * need.steps for need in needs)
        is_enough = slots >= GENERATIONS * pool_tokens
        if len(conversations) == n_conversations or (n_conversations is None and is_enough):
            break
    steps_between = slot_steps / len(conversations) / pool_tokens / LOAD
    source = _lengths_of(name, lengths)
    return Workload(
        name,
        source.source,
        conversations,
        _arrivals(drawing.rng, len(conversations), steps_between),
        drawing.n_left_out,
        source.tokenizer,
    )


class _Need(NamedTuple):
    """Of a turn in a pool without waste."""

    slots: float
    """On average while it runs."""
    steps: float


def _needs(turn: Turn, n_shared: int) -> _Need:
    answers = [sequence.answer.n_tokens for sequence in turn.sequences]
    steps = max(answers)
    own = turn.sequences[0].n_prompt - n_shared
    return _Need(own + sum(n * n / 2 for n in answers) / steps, steps)


def _arrivals(rng: Random, n: int, steps_between: float) -> list[int]:
    """Poisson."""
    arrivals: list[int] = []
    time = 0.0
    for _ in range(n):
        arrivals.append(int(time))
        time += rng.expovariate(1 / steps_between)
    return arrivals


def _lone(drawing: Drawing, draw: Callable[[Random], Pair]) -> Iterator[Drawn]:
    while True:
        pair = drawing.fitting(draw)
        yield Drawn((drawing.turn((drawing.segments.new(pair.prompt),), pair.answer),))


def _lengths_of(name: str, lengths: AllLengths) -> Lengths[Pair] | Lengths[Chat]:
    if name in ("uniform-short", "shared-prefix"):
        return lengths.problems
    return lengths.chats if name == "multi-turn" else lengths.requests
