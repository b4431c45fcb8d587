"""``radixkv generate``: completion of one prompt, without a server."""

from __future__ import annotations

import argparse

import msgspec

from radixkv.cli.offline import add_sampling_flags, is_utf8, load_llm, sampling_settings
from radixkv.settings.arguments import Parser, add_engine_flags, answering_config, whole_number


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate",
        help=summary,
        description="Run the model in this process and print its answer to a prompt, which the model continues.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    add_sampling_flags(parser)
    parser.add_argument(
        "-n", "--n", type=whole_number, metavar="COUNT", help="number of answers to generate (default: 1)"
    )
    add_engine_flags(parser, has_queue=False)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the answer, or several with a numbered line before each; returns the exit code."""
    config = answering_config(args)
    settings = sampling_settings(args)
    if not is_utf8(args.prompt):
        args.parser.error("the prompt is not UTF-8 text")
    llm = load_llm(config)
    try:
        sampling = msgspec.structs.replace(llm.get_default_sampling_params(), **settings)
        [answer] = llm.generate([args.prompt], sampling)
    finally:
        llm.shutdown()
    for output in answer.outputs:
        if len(answer.outputs) > 1:
            print(f"--- {output.index + 1} of {len(answer.outputs)}")
        print(output.text)
    return 0
