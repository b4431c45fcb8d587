"""Opening of what drafts, with the sources that the settings ask for."""

from __future__ import annotations

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.drafts.predictions import Predictions
from radixkv.runtime.drafts.recent_answers import RecentAnswers
from radixkv.runtime.drafts.sources import CachedSequences, ForcedText, LongestMatch, OwnText, Source
from radixkv.runtime.drafts.text_drafts import TextDrafts
from radixkv.runtime.protocols.request import RequestBranch
from radixkv.runtime.step.executor import Executor
from radixkv.settings.speculative import SpeculativeConfig


def open_drafts(
    config: SpeculativeConfig, cache: PageCache, executor: Executor
) -> tuple[TextDrafts, tuple[RequestBranch, ...]]:
    """Returns what drafts, and the branches by which its sources follow requests.

    Args:
        config: the sources, and lengths of drafts and of matches.
        cache: the page cache of the requests.
        executor: the device.
    """
    sources, branches = open_sources(config, cache, executor.vocab_size)
    source: Source = LongestMatch(tuple(sources.values()), config.lookup_sizes)
    if config.method == "tree":
        source = ForcedText(source, config.lookup_sizes[-1])
    return TextDrafts(source, config.num_speculative_tokens, overlaps=executor.is_asynchronous), branches


def open_sources(
    config: SpeculativeConfig, cache: PageCache, vocab_size: int
) -> tuple[dict[str, Source], tuple[RequestBranch, ...]]:
    """Returns the sources by the name that their guesses have, and the branches by which they follow requests.

    They are in the order in which they are asked: see docs/decisions/0062-when-drafts-pay.md.

    Args:
        config: the sources, and lengths of matches.
        cache: the page cache of the requests.
        vocab_size: ids are below it.
    """
    sizes = config.lookup_sizes
    predictions = Predictions((sizes[0], sizes[-1]), vocab_size)
    sources: dict[str, Source] = {"prediction": predictions}
    branches = [RequestBranch(lambda message: bool(message.prediction), predictions.follow)]
    if config.method == "tree":
        answers = RecentAnswers(cache, sizes)
        sources = {"tree": CachedSequences(cache.tree, sizes[-1]), **sources, "answers": answers}
        branches.append(RequestBranch(lambda message: True, answers.follow))
    return {**sources, "prompt": OwnText(sizes)}, tuple(branches)
