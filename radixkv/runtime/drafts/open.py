"""Opening of what drafts, with the sources that the settings ask for."""

from __future__ import annotations

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.drafts.predictions import Predictions
from radixkv.runtime.drafts.recent_answers import RecentAnswers
from radixkv.runtime.drafts.sources import CachedSequences, LongestMatch, OwnText, Source
from radixkv.runtime.drafts.text_drafts import TextDrafts
from radixkv.runtime.protocols import RequestBranch
from radixkv.runtime.step.executor import Executor
from radixkv.settings.speculative import SpeculativeConfig


def open_drafts(
    config: SpeculativeConfig, cache: PageCache, executor: Executor
) -> tuple[TextDrafts, tuple[RequestBranch, ...]]:
    """Returns what drafts, and the branches by which its sources follow requests.

    ``bench/draft_sources.py`` has measured in which order the sources are asked.

    Args:
        config: the sources, and lengths of drafts and of matches.
        cache: the page cache of the requests.
        executor: the device.
    """
    sizes = config.lookup_sizes
    predictions = Predictions((sizes[0], sizes[-1]), executor.vocab_size)
    sources: tuple[Source, ...] = predictions, OwnText(sizes)
    branches = [RequestBranch(lambda message: bool(message.prediction), predictions.follow)]
    if config.method == "tree":
        answers = RecentAnswers(cache, sizes)
        sources = CachedSequences(cache.tree, sizes[-1]), *sources, answers
        branches.append(RequestBranch(lambda message: True, answers.follow))
    source = LongestMatch(sources, sizes[-1])
    drafts = TextDrafts(source, config.num_speculative_tokens, overlaps=executor.is_asynchronous)
    return drafts, tuple(branches)
