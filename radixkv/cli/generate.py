"""``radixkv generate``: one answer, without a server."""

from __future__ import annotations

import argparse

from radixkv.cli.arguments import Parser, add_engine_flags, engine_config, number, whole_number
from radixkv.errors import RadixKVError
from radixkv.sampling import SamplingParams


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt, without a server",
        description="Continue a prompt in this process and print the answer.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    plain = SamplingParams()
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens",
        type=whole_number,
        default=plain.max_tokens,
        help="most tokens of the answer (default: %(default)s)",
    )
    sampling.add_argument(
        "--temperature", type=number, default=plain.temperature, help="0 is greedy (default: %(default)s)"
    )
    sampling.add_argument(
        "--top-p",
        type=number,
        default=plain.top_p,
        help="sample from the likeliest tokens up to this probability (default: %(default)s)",
    )
    sampling.add_argument(
        "--top-k",
        type=whole_number,
        default=plain.top_k,
        help="sample from this many likeliest tokens, 0 for all (default: %(default)s)",
    )
    sampling.add_argument("--seed", type=whole_number, help="the same seed gives the same answer")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    add_engine_flags(parser, has_queue=False)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the answer; the exit code."""
    config = engine_config(args)
    sampling = sampling_params(args)
    if any("\ud800" <= character <= "\udfff" for character in args.prompt):
        args.parser.error("the prompt is not UTF-8 text")
    from radixkv.llm import LLM  # only now: it brings torch

    llm = LLM(
        config.model.model,
        revision=config.model.revision,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        page_size=config.cache.page_size,
        kv_cache_memory_bytes=config.cache.kv_cache_memory_bytes,
        max_total_tokens=config.cache.max_total_tokens,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        schedule_policy=config.scheduler.schedule_policy,
    )
    try:
        [answer] = llm.generate([args.prompt], sampling)
    finally:
        llm.shutdown()
    print(answer.outputs[0].text)
    return 0


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the flags say; wrong values end as wrong usage."""
    parser: Parser = args.parser
    try:
        return SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
            stop=tuple(args.stop),
            ignore_eos=args.ignore_eos,
        )
    except RadixKVError as error:
        parser.error(str(error))
