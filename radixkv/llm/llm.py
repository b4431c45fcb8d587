"""``LLM``: offline inference, with the runtime's loop called directly instead of through sockets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from radixkv.checkpoints import resolve, resolve_tokenizer
from radixkv.errors import ConfigError, InvalidRequest, request_error, shortened
from radixkv.generation.models import GenerationModel
from radixkv.generation.params import check_sampling, default_sampling_params
from radixkv.generation.reranking import DEFAULT_INSTRUCTION, answer_pooling, reranker_prompt, text_pairs
from radixkv.generation.vectors import check_dimensions, embedding, relevance
from radixkv.llm.adapters import Adapters, LoRARequest, LoRARequests
from radixkv.llm.chats import Chats
from radixkv.llm.offline_request import OfflineRequest
from radixkv.llm.offline_runner import OfflineRunner, paused_collector
from radixkv.llm.outputs import (
    BeamSearchOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    beam_search_output,
)
from radixkv.llm.pooled_request import PooledRequest
from radixkv.llm.prompts import Message, Prompt, as_conversation_list, as_prompt_list, broadcast, split_prompt
from radixkv.runtime.device.factory import look_at_machine, resolve_config
from radixkv.runtime.loop import Loop
from radixkv.runtime.open_loop import check_shared_store, open_loop
from radixkv.settings.compat import Place, SettingNames, takes_other_names
from radixkv.settings.config import (
    AdmissionPolicy,
    AttentionBackend,
    CacheConfig,
    Device,
    EngineConfig,
    EvictionPolicyName,
    GrammarBackend,
    KVCacheDtype,
    KVEvictionName,
    LoadFormat,
    LoadPolicy,
    SchedulePolicy,
    SchedulerConfig,
    Task,
    WritePolicy,
)
from radixkv.settings.server_config import ServerConfig
from radixkv.settings.setting import settings_of
from radixkv.settings.speculative import DEFAULT_SPECULATION, SpeculativeConfig
from radixkv.terminal import Progress, shown_download
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.adapter_messages import (
    AdapterLoaded,
    LoadAdapter,
    ServedAdapter,
    UnloadAdapter,
)
from radixkv.wire.cache_messages import (
    CacheCommand,
    CacheReply,
    Explain,
    Explained,
    Flush,
    Flushed,
    Invalidate,
    Invalidated,
    Pin,
    Pinned,
)
from radixkv.wire.messages import Failed, FromRuntime, GetStats, Pooling, Submit
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.request_limits import DEFAULT_TTL_S, check_prefix
from radixkv.wire.sampling import BeamSearchParams, SamplingParams
from radixkv.wire.stats import Stats

ReplyT = TypeVar("ReplyT", bound=CacheReply | AdapterLoaded | Stats)

Size = Any
"""A number, or a text that ``EngineConfig.of`` turns into one, as of a flag: ``4k``, ``80GiB``."""

_SAMPLING_HINTS = {name: f"SamplingParams({name}=...)" for name in SamplingParams.__struct_fields__}
"""Hints for sampling settings that are passed to ``generate`` or ``chat`` by mistake."""
_BEAM_SEARCH_HINTS = {field.name: f"BeamSearchParams({field.name}=...)" for field in fields(BeamSearchParams)}
_SERVER_FLAGS = [
    *(one.flag for one in settings_of(ServerConfig).values()),
    *"api_key_file disable_log_requests enable_metrics enable_cache_report enable_prompt_tokens_details".split(),
]
"""Flags of ``radixkv serve`` that mean nothing without a server."""
_SERVER_HINTS = {name: f"radixkv serve --{name.replace('_', '-')}" for name in _SERVER_FLAGS}
# Other engines have more settings than the table lists, so only what is nearly a known name counts as misspelt.
_LLM_NAMES = SettingNames(Place.LLM, "LLM", ConfigError, hints=_SERVER_HINTS, typo_cutoff=0.8)
_GENERATE_NAMES = SettingNames(Place.LLM_GENERATE, "LLM.generate", ConfigError, hints=_SAMPLING_HINTS)
_EMBED_NAMES = SettingNames(Place.LLM_EMBED, "LLM.embed", ConfigError)
_SCORE_NAMES = SettingNames(Place.LLM_SCORE, "LLM.score", ConfigError)
_BEAM_SEARCH_NAMES = SettingNames(Place.LLM_GENERATE, "LLM.beam_search", ConfigError, hints=_BEAM_SEARCH_HINTS)
_CHAT_NAMES = SettingNames(Place.LLM_CHAT, "LLM.chat", ConfigError, hints=_SAMPLING_HINTS)


class LLM:
    """A model with its KV page pool and prefix cache, for offline use by one thread, one call at a time.

    Args:
        model: a folder, a hub name, or ``tiny`` for the embedded model.
        chat_template: a file with a chat template to use instead of the tokenizer's, or the name of one of those.
        reasoning_parser: how the model writes its reasoning, after which structured outputs of chats begin: a name
            of ``radixkv serve --reasoning-parser``, or ``none``; None finds it out.
        target_itl_ms: limits new prompts while answers run, as in ``radixkv serve``; None and ``off``: no limit.
        show_download: gets the downloaded bytes as a text, from several threads; None: standard error.
        settings: settings under the names of ``radixkv serve``'s flags, of vLLM or SGLang; others of theirs are
            refused unless they change nothing.

    The other keywords are settings, which ``ModelConfig``, ``CacheConfig``, ``SchedulerConfig`` and
    ``AdapterConfig`` define. The
    table in docs/server.md and ``radixkv serve --help`` say what each means.

    Sizes are numbers or texts as of flags: ``max_model_len="4k"``, ``host_memory="80GiB"``. As a context manager,
    an ``LLM`` shuts down at the end of the block.

    Raises:
        CheckpointError: there is no such model, or its files are corrupt.
        ConfigError: a setting is invalid, or given under two names.
        UnsupportedFeature: a setting is for a feature that this release does not have.
    """

    @takes_other_names(_LLM_NAMES)
    def __init__(
        self,
        model: str | Path = "tiny",
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        device: Device | Literal["auto"] = "auto",
        dtype: object = "auto",
        quantization: str | None = None,
        load_format: LoadFormat = "auto",
        enforce_eager: bool = False,
        grammar_backend: GrammarBackend = "xgrammar",
        attention_backend: AttentionBackend = "auto",
        chat_template: str | None = None,
        reasoning_parser: str | None = None,
        tensor_parallel_size: int = 1,
        task: Task = "generate",
        max_model_len: Size | None = None,
        max_num_seqs: Size | None = None,
        max_num_batched_tokens: Size | None = None,
        page_size: Size = 16,
        kv_cache_memory_bytes: Size | None = None,
        max_total_tokens: Size | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = True,
        host_memory_bytes: Size | None = None,
        state_memory_bytes: Size | None = None,
        cache_dir: str | Path | None = None,
        cache_dir_bytes: Size | None = None,
        cache_url: str | None = None,
        write_policy: WritePolicy = "through",
        load_ahead: bool = False,
        load_policy: LoadPolicy = "auto",
        eviction_policy: EvictionPolicyName = "lru",
        ghost_capacity: float = 4.0,
        kv_eviction: KVEvictionName = "none",
        kv_budget: int | None = None,
        pin_budget: float = CacheConfig.pin_budget,
        schedule_policy: SchedulePolicy = "lpm",
        admission: AdmissionPolicy = SchedulerConfig.admission,
        num_reserved_decode_tokens: Size = SchedulerConfig.num_reserved_decode_tokens,
        max_reserved_decode_share: float = SchedulerConfig.max_reserved_decode_share,
        max_queued_requests: Size = SchedulerConfig.max_queued_requests,
        queue_timeout_s: float | None = None,
        target_itl_ms: float | Literal["off"] | None = None,
        lpm_window: Size = SchedulerConfig.lpm_window,
        lpm_max_passes: Size = SchedulerConfig.lpm_max_passes,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | Literal["off"] | None = DEFAULT_SPECULATION,
        enable_lora: bool = False,
        lora_modules: Mapping[str, str | Path] | Sequence[str] = (),
        max_loras: Size | None = None,
        max_lora_rank: Size = 16,
        max_cpu_loras: Size | None = None,
        seed: int = 0,
        show_download: Callable[[str], None] | None = None,
        **settings: object,
    ) -> None:
        config = EngineConfig.of(locals())  # by name: each keyword is a setting, and listed once here
        model, tokenizer, revision = config.model.model, config.model.tokenizer, config.model.revision
        machine = look_at_machine(config.model.device)
        with shown_download(model, show_download) as show:
            tokenizer_folder = None if tokenizer is None else resolve_tokenizer(tokenizer, show_download=show)
            find = partial(resolve, model, revision, tokenizer_folder=tokenizer_folder, task=config.model.task)
            checkpoint = find(load_format="dummy", show_download=show)
        resolved = resolve_config(config, checkpoint, machine)
        folder = tokenizer_folder or checkpoint.folder
        template = ChatTemplate.load(folder, None if chat_template is None else Path(chat_template))
        loaded_tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        if config.model.task == "score":
            answer_pooling(loaded_tokenizer)
        if config.model.load_format == "auto" and not checkpoint.has_weights:
            check_shared_store(config.cache.cache_url)
            with shown_download(model, show_download) as show:
                checkpoint = find(show_download=show)  # the weights, so only after all checks
        self._default_sampling = default_sampling_params(checkpoint.default_sampling)
        loop = open_loop(resolved, checkpoint, folder)
        self._loop: Loop | None = loop
        self._model = GenerationModel(
            ready=loop.ready,
            tokenizer=loaded_tokenizer,
            chat_template=template,
            eos_token_ids=checkpoint.eos_token_ids,
            default_sampling=checkpoint.default_sampling,
        )
        self._adapters = Adapters(loop.ready.adapters, self._load_adapter, self._unload_adapter)
        self._chats = Chats(self._model, folder, reasoning_parser)
        self._runner = OfflineRunner(lambda: self._open_loop, config.scheduler.max_queued_requests)
        self._ids = (f"llm-{number}" for number in itertools.count())
        self._task = config.model.task
        self._normalizes = checkpoint.normalizes
        self._hidden_size = checkpoint.hidden_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @takes_other_names(_GENERATE_NAMES)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequests = None,
        **settings: object,
    ) -> list[RequestOutput]:
        """Answers prompts as a batch; returns all outputs in the order of the prompts.

        Args:
            prompts: texts, lists of token ids, or dictionaries with ``prompt`` or ``prompt_token_ids`` and
                optionally ``cache_salt``; they may be mixed. A single prompt counts as a list of one.
            sampling_params: one for all prompts, or one for each; None takes ``get_default_sampling_params``.
            use_tqdm: whether to show progress on standard error; see ``Progress``.
            priority: one number for each prompt; waiting prompts start in order of priority, lowest first.
            lora_request: one adapter for all prompts, or one for each; None answers with the model alone.
            settings: settings that only vLLM has, as in ``LLM``.

        Raises:
            RequestError: a prompt cannot be answered; all other requests of the call are cancelled.
        """
        self._require("generate")
        prompt_list = as_prompt_list(prompts)
        default = self.get_default_sampling_params()
        sampling = broadcast("sampling_params", SamplingParams, sampling_params, default, prompt_list)
        priorities = broadcast("priority", int, priority, 0, prompt_list)
        adapters = self._adapters.digests(lora_request, prompt_list)
        requests: dict[int, OfflineRequest] = {}

        def by_priority() -> Iterator[OfflineRequest]:
            # Requests are submitted a few at a time, and the loop's queue orders only those it has by priority.
            for position in sorted(range(len(prompt_list)), key=priorities.__getitem__):
                request = self._build_request(
                    prompt_list[position], sampling[position], priorities[position], adapters[position]
                )
                requests[position] = request
                yield request

        progress = Progress("answering prompts", enabled=use_tqdm)
        with paused_collector(), progress, closing(self._runner.run(by_priority())) as run:
            for n_done, n_tokens in run:
                progress.show(f"{n_done}/{len(prompt_list)}, {n_tokens} new tokens", n_tokens)
        return [requests[position].output() for position in range(len(prompt_list))]

    @takes_other_names(_BEAM_SEARCH_NAMES)
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: BeamSearchParams | None = None,
        use_tqdm: bool = False,
        *,
        lora_request: LoRARequests = None,
        **settings: object,
    ) -> list[BeamSearchOutput]:
        """Finds the ``beam_width`` best answers to each prompt by beam search, the best first.

        All beams of a prompt share the pages of their common beginnings. See docs/beam-search.md.

        Args:
            prompts: as in ``generate``.
            params: width and length of the search; for all prompts.
            use_tqdm: as in ``generate``.
            lora_request: as in ``generate``.
            settings: settings that only vLLM has, as in ``LLM``.

        Raises:
            RequestError: as in ``generate``.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(
                f"params is {shortened(params)}; give BeamSearchParams(beam_width=..., max_tokens=...)",
                param="params",
            )
        outputs = self.generate(prompts, params.sampling, use_tqdm, lora_request=lora_request)
        return [beam_search_output(output, self._model.tokenizer) for output in outputs]

    @takes_other_names(_CHAT_NAMES)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequests = None,
        **settings: object,
    ) -> list[RequestOutput]:
        """Answers one conversation or a batch of them, rendered by the checkpoint's chat template.

        Args:
            messages: a list of dictionaries with ``role`` and ``content``, or a list of such conversations.
            sampling_params: as in ``generate``. What ``structured_outputs`` demands begins after the reasoning.
            use_tqdm: as in ``generate``.
            add_generation_prompt: whether the prompt ends with the header of the assistant's answer.
            continue_final_message: whether the answer continues the last message.
            tools: functions in OpenAI's format, which the template shows to the model. Calls are part of the text.
            chat_template_kwargs: further variables of the template.
            lora_request: as in ``generate``, one for all conversations or one for each.
            settings: settings that only vLLM has, as in ``LLM``.

        Raises:
            RequestError: the template rejects a conversation, or as in ``generate``.
        """
        self._require("generate")
        texts = [
            self._chats.text(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in as_conversation_list(messages)
        ]
        default = self.get_default_sampling_params()
        sampling = broadcast("sampling_params", SamplingParams, sampling_params, default, texts)
        constrained = [
            self._chats.constrained(one, text, chat_template_kwargs)
            for one, text in zip(sampling, texts, strict=True)
        ]
        prompts = [self._chats.tokens(text) for text in texts]
        return self.generate(prompts, constrained, use_tqdm, lora_request=lora_request)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of the prompt that ``chat`` makes of a conversation. Raises ``RequestError``."""
        text = self._chats.text(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._chats.tokens(text)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answers one prompt and yields the output so far after each step; the last has ``finished`` set.

        Closing the iterator cancels the request. No other call may be made until the iterator ends or is closed.

        Raises:
            RequestError: the prompt cannot be answered.
        """
        self._require("generate")
        default = self.get_default_sampling_params()
        (sampling,) = broadcast("sampling_params", SamplingParams, sampling_params, default, [prompt])
        if sampling.use_beam_search:
            raise InvalidRequest(
                "a beam search is not streamed, because its answers are known at the end only; use generate",
                param="use_beam_search",
            )
        request = self._build_request(prompt, sampling, 0, self._adapters.digest(lora_request), is_streamed=True)
        with closing(self._runner.run([request])) as run:
            for _ in run:
                yield request.output()

    @takes_other_names(_EMBED_NAMES)
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        **settings: object,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embedding of each prompt, in the order of the prompts. Needs ``task="embed"``.

        The embedding is the last token's state after the last norm, as a vector of length 1: docs/embeddings.md.

        Args:
            prompts: as in ``generate``.
            use_tqdm: as in ``generate``.
            dimensions: how many of the leading values to keep, which then have length 1; None: all.
            settings: settings that only vLLM has, as in ``LLM``.

        Raises:
            RequestError: as in ``generate``.
        """
        self._require("embed")
        check_dimensions(dimensions, self._hidden_size)
        prompt_list = as_prompt_list(prompts)
        outputs = []
        for request in self._pool(map(self._pooled_prompt, prompt_list), len(prompt_list), Pooling(), use_tqdm):
            values = embedding(request.pooled, dimensions, normalizes=self._normalizes)
            output = EmbeddingOutput(values.tolist())
            n_cached = request.cache_use.n_cached
            outputs.append(EmbeddingRequestOutput(request.submit.id, request.prompt_token_ids, n_cached, output))
        return outputs

    @takes_other_names(_SCORE_NAMES)
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        instruction: str = DEFAULT_INSTRUCTION,
        **settings: object,
    ) -> list[ScoringRequestOutput]:
        """Returns how well each document matches its query, in the order of the documents. Needs ``task="score"``.

        Args:
            queries: one text for all documents, or one for each.
            documents: a text or a list of texts.
            use_tqdm: as in ``generate``.
            instruction: says what a match is.
            settings: settings that only vLLM has, as in ``LLM``.

        Raises:
            RequestError: as in ``generate``.
        """
        self._require("score")
        pairs = text_pairs(queries, documents, ("queries", "documents"))
        if not isinstance(instruction, str):
            raise InvalidRequest(f"instruction is {shortened(instruction)}; it must be text", param="instruction")
        tokenizer = self._model.require_tokenizer("queries")
        prompts = (
            (tokenizer.encode(reranker_prompt(query, document, instruction), adds_special_tokens=False), "")
            for query, document in pairs
        )
        return [
            ScoringRequestOutput(
                request.submit.id,
                request.prompt_token_ids,
                request.cache_use.n_cached,
                ScoringOutput(relevance(request.pooled)),
            )
            for request in self._pool(prompts, len(pairs), answer_pooling(tokenizer), use_tqdm)
        ]

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters of calls without any, by the checkpoint's ``generation_config.json``."""
        return self._default_sampling

    def explain(
        self, prompt: Prompt, *, cache_salt: str = "", lora_request: LoRARequest | None = None
    ) -> Explained:
        """Explains how much of a prompt is cached and why no more. Changes nothing. Raises ``RequestError``.

        Args:
            prompt: as in ``generate``.
            cache_salt: the salt if the prompt has none of its own.
            lora_request: the adapter of the prompt.
        """
        content, salt = split_prompt(prompt, cache_salt)
        namespace = self._namespace(salt, lora_request)
        return self._ask(Explain(next(self._ids), self._encode(content), namespace), Explained)

    def invalidate_cache(
        self,
        prompt: Prompt | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Invalidated:
        """Drops what is cached of a prompt and of all that continues it, from every tier; returns how many pages.

        The prompt's last page goes if the prompt fills it, and the pages before it that lead to nothing else.

        Args:
            prompt: as in ``generate``, of at least one page. None: everything with ``cache_salt``, which may be "".
            cache_salt: the salt if the prompt has none of its own.
            lora_request: the only adapter whose pages are dropped. None: those of the model and of all adapters.

        Raises:
            InvalidRequest: the prompt is shorter than a page, or neither prompt nor salt is given.
        """
        if prompt is None and cache_salt is None:
            raise InvalidRequest(
                "give a prompt, or only a cache_salt to drop all that is cached with it; "
                "flush_cache empties the whole cache",
                param="prompt",
            )
        content, salt = split_prompt(prompt or "", "" if cache_salt is None else cache_salt)
        tokens = b"" if prompt is None else self._encode(content)
        if prompt is not None:  # an empty one must not stand for everything
            check_prefix(len(tokens) // 4, self._open_loop.ready.page_size)
        namespace = self._namespace(salt, lora_request)
        query = Invalidate(next(self._ids), tokens, namespace, all_adapters=lora_request is None)
        return self._ask(query, Invalidated)

    def pin_cache(
        self,
        prompt: Prompt,
        ttl_s: float = DEFAULT_TTL_S,
        *,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> Pinned:
        """Pins what is cached of a prompt: for some time, everything else is evicted before it.

        A pin covers whole pages cached now, within ``pin_budget``. Returns what is pinned. Raises ``RequestError``.

        Args:
            prompt: as in ``generate``.
            ttl_s: how long to pin it, in seconds, at most 24 hours; 0 ends the pin of exactly this prompt.
            cache_salt: the salt if the prompt has none of its own.
            lora_request: the adapter of the prompt.
        """
        content, salt = split_prompt(prompt, cache_salt)
        namespace = self._namespace(salt, lora_request)
        return self._ask(Pin(next(self._ids), self._encode(content), ttl_s, namespace), Pinned)

    def flush_cache(self) -> Flushed:
        """Empties the prefix cache; returns how many pages that freed."""
        return self._ask(Flush(next(self._ids)), Flushed)

    def load_lora_adapter(self, lora_name: str, lora_path: str | Path, *, load_inplace: bool = False) -> None:
        """Loads an adapter, which ``LoRARequest(lora_name)`` then asks for. Needs ``enable_lora``.

        Pages of the cache that were computed with the same bytes are found again, and others never.

        Args:
            lora_name: its name.
            lora_path: its folder.
            load_inplace: whether it may replace an adapter of this name; without it such a name is refused.

        Raises:
            InvalidRequest: the name is taken, the folder has no adapter that fits the model, or as many are loaded
                as can be.
        """
        self._adapters.load(lora_name, lora_path, in_place=load_inplace)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Frees an adapter; what was computed with it stays in the cache. Raises ``ModelNotFound`` if unknown."""
        self._adapters.unload(lora_name)

    def get_metrics(self) -> Stats:
        """Returns counters since the start and current gauges."""
        return self._ask(GetStats(next(self._ids)), Stats)

    def shutdown(self) -> None:
        """Frees the memory of the model and the pool. Later calls raise ``ConfigError``.

        With ``cache_dir``, pages that are not on disk yet are written first, for up to 5 s. They are lost if the
        process ends without this call.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    @property
    def max_model_len(self) -> int:
        """Maximum length of a prompt plus its answer, in tokens."""
        return self._open_loop.ready.max_model_len

    @property
    def max_prompt_and_answer(self) -> int:
        """Maximum length of a prompt plus its answer that also fits in the pool, in tokens."""
        return self._open_loop.ready.max_prompt_and_answer

    @property
    def _open_loop(self) -> Loop:
        if self._loop is None:
            raise ConfigError("this LLM was shut down; create a new one")
        return self._loop

    def _require(self, task: Task) -> None:
        """Raises ``InvalidRequest`` if this LLM is for another task."""
        if self._task != task:
            raise InvalidRequest(f"this LLM has task={self._task!r}; make one with task={task!r} for this call")

    def _pooled_prompt(self, prompt: Prompt) -> tuple[bytes, str]:
        """Returns the tokens of a prompt and its cache salt."""
        content, salt = split_prompt(prompt)
        return self._encode(content), salt

    def _pool(
        self, prompts: Iterable[tuple[bytes, str]], n_prompts: int, pooling: Pooling, use_tqdm: bool
    ) -> list[PooledRequest]:
        """Runs prompts without answers to their end; returns them in their order. Raises ``RequestError``."""
        requests: list[PooledRequest] = []

        def submitted() -> Iterator[PooledRequest]:
            for tokens, salt in prompts:
                namespace = self._namespace(salt, None)
                submit = Submit(next(self._ids), tokens, SamplingParams(), namespace, pooling=pooling)
                requests.append(PooledRequest(submit))
                yield requests[-1]

        progress = Progress("computing prompts", enabled=use_tqdm)
        with paused_collector(), progress, closing(self._runner.run(submitted())) as run:
            for n_done, _ in run:
                progress.show(f"{n_done}/{n_prompts}", n_done)
        return requests

    def _namespace(self, cache_salt: str, lora_request: LoRARequest | None) -> CacheNamespace:
        """Returns whose KV a request may share. Raises ``RequestError`` for an adapter, see ``Adapters.digest``."""
        return CacheNamespace(cache_salt=cache_salt, adapter=self._adapters.digest(lora_request))

    def _load_adapter(self, load: str, name: str, path: str) -> ServedAdapter:
        return self._expect(self._runner.answer(LoadAdapter(load, name, path)), AdapterLoaded).adapter

    def _unload_adapter(self, load: str) -> None:
        self._runner.tell(UnloadAdapter(load))

    def _ask(self, query: CacheCommand | GetStats, kind: type[ReplyT]) -> ReplyT:
        """Returns the loop's immediate reply to a query. Raises ``RequestError`` if the loop refuses it."""
        (reply,) = self._open_loop.receive(query)
        return self._expect(reply, kind)

    def _expect(self, reply: FromRuntime, kind: type[ReplyT]) -> ReplyT:
        if isinstance(reply, Failed):
            raise request_error(reply.code, reply.text, param=reply.param)
        assert isinstance(reply, kind)
        return reply

    def _build_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        priority: int,
        adapter: str,
        *,
        is_streamed: bool = False,
    ) -> OfflineRequest:
        content, salt = split_prompt(prompt)
        tokens = self._encode(content)
        check_sampling(sampling, self._model)
        namespace = CacheNamespace(cache_salt=salt, adapter=adapter)
        submit = Submit(next(self._ids), tokens, sampling, namespace, priority=priority)
        text = content if isinstance(content, str) else None
        return OfflineRequest(text, submit, self._model, is_streamed=is_streamed)

    def _encode(self, prompt: str | Sequence[int]) -> bytes:
        """Returns the little-endian int32 ids of a text or of token ids. O(length)."""
        if isinstance(prompt, str):
            return self._model.require_tokenizer("prompt").encode(prompt)
        return self._model.encode_ids(prompt)
