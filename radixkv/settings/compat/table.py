"""The table of what vLLM, SGLang and OpenAI have and radixkv has under another name, always does, or lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto

from radixkv.settings.config import ENGINE_SETTINGS


class Place(Flag):
    """Where a user gives a name."""

    FLAG = auto()
    """A flag of the commands that run an engine, spelled ``--name-with-dashes``; short flags begin with a dash."""
    SERVE_FLAG = auto()
    """A flag of ``radixkv serve`` only."""
    OFFLINE_FLAG = auto()
    """A flag of the commands that run an engine in their own process, ``radixkv generate`` and ``radixkv chat``."""
    LLM = auto()
    LLM_GENERATE = auto()
    LLM_CHAT = auto()
    LLM_EMBED = auto()
    LLM_SCORE = auto()
    SAMPLING = auto()
    """``SamplingParams``."""
    COMPLETIONS = auto()
    CHATS = auto()
    TEXT = auto()
    """Bodies of ``/tokenize``, ``/cache/explain`` and ``/cache/pin``."""
    GENERATE = auto()
    """The body of SGLang's ``/generate``."""
    GENERATE_SAMPLING = auto()
    """``sampling_params`` in that body."""
    RESPONSES = auto()
    """The body of OpenAI's ``/v1/responses``."""
    MESSAGES = auto()
    """The bodies of Anthropic's ``/v1/messages``."""
    EMBEDDINGS = auto()
    """The body of OpenAI's ``/v1/embeddings``."""
    RERANK = auto()
    """The bodies of ``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``."""
    LOAD_ADAPTER = auto()
    """The bodies of ``/v1/load_lora_adapter`` and ``/load_lora_adapter``."""
    ROUTE = auto()
    """A path of the server."""


ENGINE = Place.FLAG | Place.LLM
POOLED_CALLS = Place.LLM_EMBED | Place.LLM_SCORE
CALLS = Place.LLM_GENERATE | Place.LLM_CHAT | POOLED_CALLS
OPENAI = Place.COMPLETIONS | Place.CHATS | Place.TEXT
BODIES = OPENAI | Place.GENERATE
PARAMETERS = Place.SAMPLING | OPENAI
POOLED = Place.EMBEDDINGS | Place.RERANK
SGLANG = Place.GENERATE | Place.GENERATE_SAMPLING


@dataclass(frozen=True)
class Refused:
    """A feature that radixkv lacks, with every name that asks for it. None and empty values ask for nothing."""

    reason: str
    """Why it is refused; empty if ``instead`` says all."""
    names: Mapping[Place, str]
    """By place: names, separated by spaces. ``name=1|2``: the values 1 and 2, as JSON, ask for nothing either."""
    instead: str = ""
    """What to do; empty if the name is to be left out, or another path used."""
    same_as: str | None = None
    """The field of a body whose value also asks for nothing here: some clients send both."""
    implied_by: str | None = None
    """Our setting that does what the name asks for; besides it, the name asks for nothing."""


ALIASES: Mapping[Place, Mapping[str, str]] = {
    ENGINE: {
        alias: name
        for name, one in ENGINE_SETTINGS.items()
        for alias in one.aliases
        if alias != name and not alias.startswith("-")
    }
    | {alias: f"no_{name}" for name, one in ENGINE_SETTINGS.items() for alias in one.opposites},
    Place.LLM: {one.flag: name for name, one in ENGINE_SETTINGS.items() if one.flag != name},
    Place.SAMPLING: {
        "max_new_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "no_stop_trim": "include_stop_str_in_output",
        "guided_decoding": "structured_outputs",
    },
}
"""By place: other names of our settings, those of other engines and, for ``LLM``, of our flags.

``no_`` before ours means that the values are opposite."""

UNITS: Mapping[str, int] = {"kv_offloading_size": 1 << 30, "hicache_size": 10**9}
"""Bytes of one unit of those aliases that are not in bytes: vLLM's are GiB, SGLang's GB."""

ALWAYS_ON_FLAGS: Mapping[Place, str] = {
    Place.FLAG: "enable_chunked_prefill async_scheduling",
    Place.SERVE_FLAG: "enable_auto_tool_choice enable_metrics enable_cache_report enable_prompt_tokens_details "
    "enable_request_id_headers enable_tokenizer_info_endpoint",
}
"""Flags without a value that turn on what radixkv always does."""

REFUSED = (
    Refused(
        "this release divides a model by --tensor-parallel-size alone, on one host",
        {
            ENGINE: "pipeline_parallel_size=1 pp_size=1 -pp=1 nnodes=1 "
            "expert_parallel_size=1 ep_size=1 enable_expert_parallel=false",
        },
    ),
    Refused(
        "one process without a server computes on one replica",
        {
            Place.LLM: "data_parallel_size=1 dp_size=1 dp=1",
            Place.OFFLINE_FLAG: "data_parallel_size=1 dp_size=1 dp=1 -dp=1",
        },
        "use radixkv serve --data-parallel-size",
    ),
    Refused(
        "the server sends a prompt to the replica that has the most of it",
        {BODIES: "data_parallel_rank routed_dp_rank"},
    ),
    Refused(
        "all ranks compute attention for all requests, each with some of the heads",
        {
            ENGINE: "enable_dp_attention=false decode_context_parallel_size=1 -dcp=1 "
            "prefill_context_parallel_size=1 -pcp=1"
        },
        "use tensor_parallel_size (--tensor-parallel-size)",
    ),
    Refused(
        "each rank has a part of every expert",
        {ENGINE: "ep=1 -ep=false enable_eplb=false"},
        "use tensor_parallel_size (--tensor-parallel-size)",
    ),
    Refused(
        "the layers of a model are not divided among devices",
        {ENGINE: "pp=1"},
        "use tensor_parallel_size (--tensor-parallel-size)",
    ),
    Refused(
        "the ranks of a model are processes of one host, which its runtime starts",
        {
            ENGINE: "node_rank=0 dist_init_addr nccl_init_addr master_addr master_port "
            'distributed_executor_backend="mp"|"uni"'
        },
        "use tensor_parallel_size (--tensor-parallel-size) alone",
    ),
    Refused(
        "one process prefills and decodes",
        {ENGINE: 'disaggregation_mode="null"', BODIES: "bootstrap_host bootstrap_port bootstrap_room"},
    ),
    Refused(
        "servers do not send KV to each other",
        {OPENAI: "kv_transfer_params ec_transfer_params"},
    ),
    Refused(
        "servers share KV through a store",
        {ENGINE: "kv_transfer_config"},
        "use cache_url (--cache-url s3://BUCKET/PREFIX, mooncake://HOST:PORT, file:///FOLDER or "
        "shm://NAME?size=SIZE)",
    ),
    Refused(
        "a size turns the host tier on",
        {ENGINE: "enable_hierarchical_cache=false"},
        "give hicache_size or host_memory_bytes (--host-memory)",
        implied_by="host_memory_bytes",
    ),
    Refused(
        "what no longer fits on the device goes to a host tier with a size in bytes",
        {ENGINE: "hicache_ratio swap_space=0"},
        "use host_memory_bytes (--host-memory)",
    ),
    Refused(
        "the place behind the host tier has a name, from which its kind follows",
        {ENGINE: "hicache_storage_backend"},
        "use cache_dir (--cache-dir FOLDER), or cache_url (--cache-url URL) for a store that servers share",
    ),
    Refused("pages are copied in one way", {ENGINE: 'kv_offloading_backend="native"'}),
    Refused(
        "weights stay on the device",
        {ENGINE: "cpu_offload_gb=0"},
        "leave it out (KV in host memory: host_memory_bytes, --host-memory)",
    ),
    Refused(
        "only a server publishes cache events",
        {Place.LLM: "kv_events_config"},
        "use radixkv serve --kv-events-config",
    ),
    Refused("the name of an adapter is a model", {OPENAI: "lora_path"}, "use model, as /v1/models lists it"),
    Refused(
        "this command answers with the model alone",
        {
            Place.OFFLINE_FLAG: "enable_lora=false lora_modules lora_paths max_loras max_loras_per_batch "
            "max_lora_rank max_cpu_loras max_loaded_loras"
        },
        "use radixkv serve --lora-modules NAME=FOLDER, or LLM.generate with lora_request",
    ),
    Refused(
        "an adapter is known by its name", {Place.GENERATE: "lora_id"}, "use lora_path, as /v1/models lists it"
    ),
    Refused(
        "adapters take turns in the device's slots, by their use",
        {Place.LOAD_ADAPTER: "pinned=false"},
        "raise --max-loras to keep all of them there",
    ),
    Refused("this release has LoRA, and no prompt adapters", {Place.LLM_GENERATE: "prompt_adapter_request"}),
    Refused(
        "grammars are compiled by xgrammar",
        {
            ENGINE: 'guided_decoding_backend="auto"|"xgrammar"',
            OPENAI: 'guided_decoding_backend="auto"|"xgrammar"',
        },
    ),
    Refused("structured outputs have one layout, JSON on one line", {OPENAI: "guided_whitespace_pattern"}),
    Refused("", {PARAMETERS: "structural_tag"}, "use structured_outputs"),
    Refused("", {Place.SAMPLING: "json_schema regex ebnf"}, "use structured_outputs"),
    Refused("", {Place.LLM_GENERATE: "guided_options_request"}, "use structured_outputs of SamplingParams"),
    Refused(
        "LLM returns answers as the model writes them",
        {Place.LLM: "enable_auto_tool_choice=false tool_call_parser"},
    ),
    Refused("tools are for chats", {Place.COMPLETIONS: 'tools tool_choice="none"'}, "use /v1/chat/completions"),
    Refused("functions are tools now", {OPENAI: 'functions function_call="none"'}, "use tools and tool_choice"),
    Refused("the server has no tools of its own", {OPENAI: "web_search_options"}),
    Refused("reasoning has no limit of its own", {PARAMETERS: "thinking_token_budget"}, "use max_tokens"),
    Refused(
        "this release supports text only",
        {
            ENGINE: "limit_mm_per_prompt",
            ENGINE | Place.LLM_CHAT | OPENAI: "mm_processor_kwargs",
            Place.LLM_CHAT: 'chat_template_content_format="auto"',
            BODIES: 'modalities=["text"] input_embeds',
            OPENAI: "audio prompt_embeds multi_modal_data multi_modal_uuids",
            Place.GENERATE: "image_data video_data audio_data",
            Place.ROUTE: "/v1/audio/speech /v1/audio/transcriptions /v1/audio/translations",
        },
    ),
    Refused("", {Place.ROUTE: "/v1/moderations /encode /pooling /classify"}),
    Refused(
        "what a model is for has one name",
        {ENGINE: 'runner="generate"|"auto" convert="none"|"auto" is_embedding=false'},
        "use task (--task embed, --task score)",
    ),
    Refused("embeddings are the last token's state", {ENGINE: "pooler_config override_pooler_config"}),
    Refused(
        "there is no model for drafts",
        {
            ENGINE: "speculative_draft_model_path speculative_num_steps speculative_eagle_topk=1 speculative_model "
            "speculative_draft_model_revision num_speculative_tokens"
        },
        'use speculative_config (--speculative-config \'{"method": "tree"}\')',
    ),
    Refused(
        "the drafts of a row are one sequence",
        {ENGINE: "speculative_ngram_min_bfs_breadth=1 speculative_ngram_max_bfs_breadth=1"},
    ),
    Refused(
        "drafts are what followed the longest match",
        {ENGINE: "speculative_ngram_match_type speculative_ngram_branch_length speculative_ngram_capacity"},
    ),
    Refused(
        "scales of the KV cache come with the checkpoint",
        {ENGINE: "calculate_kv_scales=false quantization_param_path"},
    ),
    Refused(
        "what an admission leaves free grows with the running answers",
        {ENGINE: "watermark schedule_conservativeness=1"},
        "use admission, num_reserved_decode_tokens and max_reserved_decode_share",
    ),
    Refused("the defaults of requests are the checkpoint's", {ENGINE: 'generation_config="auto"'}),
    Refused("the tokenizer is always tokenizer.json", {ENGINE: 'tokenizer_mode="auto" skip_tokenizer_init=false'}),
    Refused("code from a checkpoint is never run", {ENGINE: "trust_remote_code=false"}),
    Refused(
        "compilation cannot be configured",
        {ENGINE: "compilation_config -O"},
        "leave it out (CUDA graphs: enforce_eager)",
    ),
    Refused(
        "prompts are always computed in chunks",
        {Place.LLM: "enable_chunked_prefill=true", Place.FLAG: "no_enable_chunked_prefill"},
    ),
    Refused("the next step is always planned while one runs", {Place.LLM: "async_scheduling=true"}),
    Refused("every token is streamed at once", {ENGINE: "stream_interval=1"}),
    Refused("settings are not read from files", {Place.FLAG: "config"}, "give them as flags"),
    Refused("the log has one level", {ENGINE: 'log_level="info" uvicorn_log_level="info"'}),
    Refused("statistics are not logged", {Place.LLM: "disable_log_stats=true|false"}),
    Refused(
        "only a server logs requests",
        {Place.LLM: "log_requests=false enable_log_requests=false"},
        "use radixkv serve --log-requests",
    ),
    Refused(
        "origins of --allowed-origins may use any method and header",
        {Place.FLAG: "allowed_methods allowed_headers"},
    ),
    Refused("the server ignores cookies", {Place.FLAG: "allow_credentials"}, "send the key in Authorization"),
    Refused(
        "the server only speaks plain HTTP",
        {Place.FLAG: "ssl_keyfile ssl_certfile"},
        "put a TLS proxy in front of it",
    ),
    Refused("a step has as many rows as fit", {Place.LLM_GENERATE: "concurrency_limit"}, "set max_num_seqs of LLM"),
    Refused(
        "a beam search goes on while its best beam may still be among the answers",
        {Place.SAMPLING: "early_stopping=false"},
    ),
    Refused(
        "logits are only changed by the sampling parameters",
        {
            PARAMETERS: "bad_words allowed_token_ids logits_processors",
            PARAMETERS | SGLANG: "custom_params",
            BODIES: "custom_logit_processor",
            Place.SAMPLING: "extra_args",
            OPENAI: "vllm_xargs",
        },
        "use logit_bias, or leave it out",
    ),
    Refused(
        "prompts are not truncated",
        {
            PARAMETERS | POOLED | POOLED_CALLS: "truncate_prompt_tokens",
            OPENAI | POOLED: "truncation_side",
            CALLS: "tokenization_kwargs",
            Place.EMBEDDINGS: "truncate",
            Place.RERANK: "max_tokens_per_doc max_chunks_per_doc max_tokens_per_query max_query_tokens",
        },
    ),
    Refused("", {Place.EMBEDDINGS: "messages"}, "use input"),
    Refused("a document is one text", {Place.RERANK: "rank_fields"}, "send the fields in that text"),
    Refused("texts have no types", {Place.EMBEDDINGS: "input_type task"}, "write what the model expects in input"),
    Refused(
        "texts are computed as they are",
        {Place.EMBEDDINGS: "instruction instruct prompt_name", Place.LLM_EMBED: "instruction prompt_name"},
        "write the instruction into the texts",
    ),
    Refused(
        "an embedding is the last token's state",
        {Place.EMBEDDINGS: 'pooling="last"|"lasttoken"|"LAST"', Place.LLM_EMBED: "pooling_params"},
        "use dimensions for a part of it, or leave it out",
    ),
    Refused("", {Place.RERANK: "instruct"}, "use instruction"),
    Refused(
        "the prompt is that of Qwen3-Reranker",
        {Place.RERANK: "chat_template chat_template_kwargs", Place.LLM_SCORE: "chat_template"},
        "use instruction to say what a match is",
    ),
    Refused("", {Place.RERANK: "queries data_1"}, "use query on /v1/rerank, or text_1 on /v1/score"),
    Refused(
        "tasks embed and score have no adapters yet",
        {POOLED_CALLS: "lora_request"},
    ),
    Refused(
        "values are float32",
        {
            Place.EMBEDDINGS: 'embedding_type="float" embedding_types=["float"]|"float" output_dtype="float" '
            'embed_dtype="float32" endianness="native"|"little"'
        },
        "use encoding_format for base64, or leave it out",
        same_as="encoding_format",
    ),
    Refused("", {Place.EMBEDDINGS: "output_dimension"}, "use dimensions", same_as="dimensions"),
    Refused(
        "a vector has the length that the checkpoint gives it",
        {
            Place.EMBEDDINGS: "normalize=true normalized=true normalize_embeddings=true use_activation=true",
            Place.LLM_EMBED: "normalize=true use_activation=true",
        },
    ),
    Refused("each text is computed alone", {Place.EMBEDDINGS: "late_chunking=false"}),
    Refused(
        "a score is the probability of yes",
        {
            Place.RERANK: "use_activation=true activation=true softmax=true raw_scores=false apply_softmax=true "
            "label_token_ids",
            Place.LLM_SCORE: "pooling_params use_activation=true",
        },
    ),
    Refused("a server has one task", {Place.RERANK: "return_embeddings=false"}, "use --task embed for embeddings"),
    Refused(
        "each request stands alone, and the cache finds the common prefix",
        {BODIES: "session_params"},
        "send the whole conversation",
    ),
    Refused("only a server has sessions", {CALLS: "session_id"}),
    Refused(
        "",
        {
            Place.SAMPLING: "detokenize=true flat_logprobs=false skip_reading_prefix_cache=false",
            PARAMETERS | SGLANG: "spaces_between_special_tokens=true",
            BODIES: "return_hidden_states=false return_routed_experts=false",
            Place.GENERATE: "return_sampling_mask=false return_entropy=false return_prompt_token_ids=false",
            Place.ROUTE: "/invocations /sleep /wake_up /pause /resume /start_profile /stop_profile",
        },
    ),
    Refused("answers only continue a prompt", {OPENAI: "suffix", Place.CHATS: "echo=false"}),
    Refused("", {OPENAI: "documents"}, "give them in chat_template_kwargs, if the template reads them"),
    Refused("the template is the server's", {OPENAI: "chat_template"}, "start it with --chat-template"),
    Refused("", {Place.LLM_CHAT: "chat_template"}, "use that of LLM, which takes a file"),
    Refused("", {BODIES: "extra_key"}, "use cache_salt"),
    Refused("", {PARAMETERS | SGLANG: "stop_regex"}, "use stop or stop_token_ids"),
    Refused("", {Place.LLM_GENERATE: "prompt_token_ids"}, "use prompts"),
    Refused("", {OPENAI: "input_ids"}, "use prompt, which takes token ids in completions"),
    Refused("", {OPENAI: "sampling_params extra_body"}, "give its fields at the top level of the body"),
    Refused("", {OPENAI: "max_new_tokens", Place.COMPLETIONS | Place.CHATS: "max_token"}, "use max_tokens"),
    Refused("", {OPENAI: "min_new_tokens=0"}, "use min_tokens"),
    Refused("", {OPENAI: "no_stop_trim=false"}, "use include_stop_str_in_output"),
    Refused("", {Place.COMPLETIONS: "max_completion_tokens"}, "use max_tokens", same_as="max_tokens"),
    Refused("", {Place.COMPLETIONS: "top_logprobs=0|false"}, "use logprobs", same_as="logprobs"),
    Refused("", {Place.COMPLETIONS | Place.CHATS: "best_of=1"}, "set n to the same, or leave it out", same_as="n"),
    Refused("", {Place.SAMPLING: "best_of=1"}, "use n, and choose among the outputs"),
    Refused("", {Place.SAMPLING: "top_logprobs"}, "use logprobs"),
    Refused("", {SGLANG: "max_tokens max_completion_tokens"}, "use max_new_tokens in sampling_params"),
    Refused("", {SGLANG: "min_tokens=0"}, "use min_new_tokens in sampling_params"),
    Refused("", {SGLANG: "include_stop_str_in_output=false"}, "use no_stop_trim in sampling_params"),
    Refused("", {SGLANG: "logprobs=false"}, "use return_logprob and top_logprobs_num"),
    Refused("", {Place.GENERATE: "token_ids_logprob"}, "use top_logprobs_num"),
    Refused(
        "conversations are not stored",
        {Place.RESPONSES: "store=false previous_response_id conversation background=false prompt"},
        "send the whole conversation in input",
    ),
    Refused("tools run at the client", {Place.MESSAGES: "mcp_servers container"}),
    Refused("conversations are not summarized", {Place.MESSAGES: "compaction"}, "ask for a summary in a message"),
    Refused("this API returns no logprobs here", {Place.RESPONSES: "top_logprobs=0"}, "use /v1/chat/completions"),
    Refused("", {Place.RESPONSES: "max_tokens max_completion_tokens"}, "use max_output_tokens"),
    Refused("", {Place.RESPONSES: "messages"}, "use input"),
    Refused("", {Place.RESPONSES: "response_format"}, "use text.format"),
    Refused("", {Place.MESSAGES: "stop"}, "use stop_sequences"),
    Refused("", {Place.MESSAGES: "max_completion_tokens max_output_tokens"}, "use max_tokens"),
    Refused("", {Place.MESSAGES: "output_format response_format"}, "use output_config.format"),
    Refused(
        "this API has one answer, and fewer sampling parameters",
        {
            Place.RESPONSES: "stop top_k",
            Place.RESPONSES | Place.MESSAGES: "n=1 seed min_p presence_penalty=0 frequency_penalty=0 "
            "repetition_penalty=1 logit_bias logprobs=false",
        },
        "use /v1/chat/completions",
    ),
    Refused("", {Place.ROUTE: "/abort_request"}, "close the connection, which ends its request"),
)

EMPTY_OBJECT_ASKS = frozenset({"json_schema", "web_search_options"})
"""Names for which ``{}`` asks for something: any JSON, or a search without options."""
