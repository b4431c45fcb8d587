"""The five synthetic workloads of the study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from radixkv.errors import ConfigError
from radixkv.lab.studies.paging.lengths import ChatLengths, LengthDistribution, LengthPair, WorkloadLengths
from radixkv.lab.studies.paging.schemes import Pool
from radixkv.lab.studies.paging.sequences import (
    SimulatedConversation,
    SimulatedSequence,
    TokenRange,
    TokenRangeSource,
    Turn,
)

N_PREFIXES = 4
"""Number of different sets of worked examples."""
N_SHOTS = 8
"""Worked examples per set."""
N_SAMPLES = 4
"""Answers per prompt."""
LOAD_FACTOR = 1.25
"""Arrival rate relative to the rate that a pool without waste could serve."""
POOL_FILLS = 4
"""How often the default number of sequences fills the pool."""
MAX_REJECTED = 10_000
"""Consecutive samples that are too long before generation fails."""


@dataclass(frozen=True)
class StudyWorkload:
    """The requests of a workload, the same for every scheme."""

    name: str
    lengths: str
    """Origin of the lengths."""
    conversations: list[SimulatedConversation]
    arrivals: list[int]
    """The step before which each conversation's first turn arrives, ascending."""
    n_left_out: int
    """Requests, chat turns and sets of worked examples that were drawn but exceed the maximum length."""
    tokenizer: str | None = None
    """Name of the tokenizer that counted the lengths; None if they did not come from texts."""

    @property
    def n_sequences(self) -> int:
        """Number of answers of all turns."""
        return sum(len(turn.sequences) for conversation in self.conversations for turn in conversation)

    @property
    def n_answer_tokens(self) -> int:
        """Tokens of all answers."""
        turns = (turn for conversation in self.conversations for turn in conversation)
        return sum(sequence.answer.n_tokens for turn in turns for sequence in turn.sequences)

    def pool(self, n_slots: int, max_model_len: int, page_size: int) -> Pool:
        """Returns the pool that serves the workload, without granules."""
        return Pool(
            n_slots,
            max_model_len,
            self.n_answer_tokens / self.n_sequences,
            page_size,
            has_choices=any(
                len(turn.sequences) > 1 for conversation in self.conversations for turn in conversation
            ),
        )


@dataclass
class RequestGenerator:
    """Draws random lengths and builds requests from them."""

    lengths: WorkloadLengths
    max_model_len: int
    rng: Random
    token_ranges: TokenRangeSource
    n_left_out: int = 0

    def draw_fitting(self, draw: Callable[[Random], LengthPair], n_before: int = 0) -> LengthPair:
        """Returns the next pair that fits the context after ``n_before`` tokens; counts rejected pairs."""
        for _ in range(MAX_REJECTED):
            pair = draw(self.rng)
            if n_before + pair.prompt + pair.answer <= self.max_model_len:
                return pair
            self.n_left_out += 1
        raise self.nothing_fits_error("prompts with their answers")

    def draw_examples(self, draw: Callable[[Random], LengthPair]) -> TokenRange:
        """Returns the next set of worked examples that leaves room for an average problem; counts rejected sets."""
        for _ in range(MAX_REJECTED):
            n_tokens = sum(sum(draw(self.rng)) for _ in range(N_SHOTS))
            if n_tokens + n_tokens / N_SHOTS <= self.max_model_len:
                return self.token_ranges.new(n_tokens)
            self.n_left_out += 1
        raise self.nothing_fits_error(f"sets of {N_SHOTS} worked examples with a problem behind them")

    def nothing_fits_error(self, what: str) -> ConfigError:
        """Returns the error for a maximum length that nothing fits."""
        return ConfigError(
            f"--max-model-len {self.max_model_len} holds none of {MAX_REJECTED} {what}; give a larger one"
        )

    def turn(self, prompt: tuple[TokenRange, ...], *answers: int) -> Turn:
        """Builds a turn of a prompt and answers of the given numbers of tokens."""
        return Turn(tuple(SimulatedSequence(prompt, self.token_ranges.new(n_tokens)) for n_tokens in answers))


class GeneratedConversation(NamedTuple):
    """A conversation and the length of its shared prefix."""

    conversation: SimulatedConversation
    n_shared: int = 0
    """Tokens at its start that other conversations share."""


def uniform_short(generator: RequestGenerator) -> Iterator[GeneratedConversation]:
    """Yields short questions with short answers, without sharing."""
    return _single_turns(generator, generator.lengths.problems.draw)


def variable_length(generator: RequestGenerator) -> Iterator[GeneratedConversation]:
    """Yields requests of varying lengths, without sharing."""
    return _single_turns(generator, generator.lengths.requests.draw)


def shared_prefix(generator: RequestGenerator) -> Iterator[GeneratedConversation]:
    """Yields short questions, each after one of a few sets of worked examples."""
    draw = generator.lengths.problems.draw
    prefixes = [generator.draw_examples(draw) for _ in range(N_PREFIXES)]
    while True:
        prefix = generator.rng.choice(prefixes)
        pair = generator.draw_fitting(draw, prefix.n_tokens)
        question = generator.token_ranges.new(pair.prompt)
        yield GeneratedConversation((generator.turn((prefix, question), pair.answer),), prefix.n_tokens)


def multi_turn(generator: RequestGenerator) -> Iterator[GeneratedConversation]:
    """Yields chats whose prompts contain all previous turns; a chat ends before it exceeds the maximum length."""
    systems: dict[str, TokenRange] = {}
    n_rejected = 0
    while n_rejected < MAX_REJECTED:
        chat = generator.lengths.chats.draw(generator.rng)
        system = systems.get(chat.system)
        if system is None:
            system = systems[chat.system] = generator.token_ranges.new(chat.n_system)
        history: tuple[TokenRange, ...] = (system,)
        n_tokens = chat.n_system
        turns: list[Turn] = []
        for added, answer in chat.turns:
            n_tokens += added + answer
            if n_tokens > generator.max_model_len:
                break
            history = (*history, generator.token_ranges.new(added))
            turns.append(generator.turn(history, answer))
            history = (*history, turns[-1].sequences[0].answer)
        generator.n_left_out += len(chat.turns) - len(turns)
        n_rejected = 0 if turns else n_rejected + 1
        if turns:
            yield GeneratedConversation(tuple(turns), chat.n_system)
    raise generator.nothing_fits_error("chats' first turns")


def parallel_sampling(generator: RequestGenerator) -> Iterator[GeneratedConversation]:
    """Yields requests of varying lengths, each with several answers of independent lengths within the context."""
    draw = generator.lengths.requests.draw
    while True:
        pair = generator.draw_fitting(draw)
        longest = generator.max_model_len - pair.prompt
        others = [min(longest, draw(generator.rng).answer) for _ in range(N_SAMPLES - 1)]
        yield GeneratedConversation(
            (generator.turn((generator.token_ranges.new(pair.prompt),), pair.answer, *others),)
        )


WORKLOADS: Mapping[str, Callable[[RequestGenerator], Iterator[GeneratedConversation]]] = {
    "uniform-short": uniform_short,
    "variable-length": variable_length,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "parallel-sampling": parallel_sampling,
}


def generate_workload(
    name: str,
    lengths: WorkloadLengths,
    *,
    pool_tokens: int,
    max_model_len: int,
    n_conversations: int | None = None,
    seed: int = 0,
) -> StudyWorkload:
    """Generates a workload whose requests arrive faster than any scheme serves them.

    Args:
        name: one of ``WORKLOADS``.
        lengths: distributions of prompt and answer lengths.
        pool_tokens: token slots of the pool.
        max_model_len: maximum tokens of a prompt and answer together.
        n_conversations: number of requests or chats; None takes enough to fill the pool ``POOL_FILLS`` times.
        seed: equal seeds give equal workloads.

    Raises:
        ConfigError: no lengths fit ``max_model_len``.
    """
    generator = RequestGenerator(lengths, max_model_len, Random(seed), TokenRangeSource())
    conversations: list[SimulatedConversation] = []
    slots = slot_steps = 0.0
    for conversation, n_shared in WORKLOADS[name](generator):
        conversations.append(conversation)
        demands = [_slot_demand(turn, n_shared) for turn in conversation]
        slots += sum(demand.slots for demand in demands) / len(demands)
        slot_steps += sum(demand.slots * demand.steps for demand in demands)
        is_enough = slots >= POOL_FILLS * pool_tokens
        if len(conversations) == n_conversations or (n_conversations is None and is_enough):
            break
    steps_between = slot_steps / len(conversations) / pool_tokens / LOAD_FACTOR
    source = _lengths_for(name, lengths)
    return StudyWorkload(
        name,
        source.source,
        conversations,
        _arrivals(generator.rng, len(conversations), steps_between),
        generator.n_left_out,
        source.tokenizer,
    )


class _SlotDemand(NamedTuple):
    """The demand of a turn in a pool without waste."""

    slots: float
    """Average slots while it runs."""
    steps: float
    """Steps that it runs."""


def _slot_demand(turn: Turn, n_shared: int) -> _SlotDemand:
    answers = [sequence.answer.n_tokens for sequence in turn.sequences]
    steps = max(answers)
    own = turn.sequences[0].n_prompt - n_shared
    return _SlotDemand(own + sum(n * n / 2 for n in answers) / steps, steps)


def _arrivals(rng: Random, n: int, steps_between: float) -> list[int]:
    """Returns the steps of ``n`` Poisson arrivals."""
    arrivals: list[int] = []
    time = 0.0
    for _ in range(n):
        arrivals.append(int(time))
        time += rng.expovariate(1 / steps_between)
    return arrivals


def _single_turns(
    generator: RequestGenerator, draw: Callable[[Random], LengthPair]
) -> Iterator[GeneratedConversation]:
    while True:
        pair = generator.draw_fitting(draw)
        yield GeneratedConversation((generator.turn((generator.token_ranges.new(pair.prompt),), pair.answer),))


def _lengths_for(
    name: str, lengths: WorkloadLengths
) -> LengthDistribution[LengthPair] | LengthDistribution[ChatLengths]:
    if name in ("uniform-short", "shared-prefix"):
        return lengths.problems
    return lengths.chats if name == "multi-turn" else lengths.requests
