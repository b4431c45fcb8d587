"""Parses flags as the commands do."""

import pytest

from radixkv.settings.arguments import Parser, add_engine_flags, engine_config


def parse(*flags):
    """Returns the configuration that the engine's flags describe."""
    parser = Parser(prog="radixkv test")
    add_engine_flags(parser)
    parser.set_defaults(parser=parser)
    return engine_config(parser.parse_args(flags))


def command(add, name, *flags):
    """Returns the parsed flags of a command, which ``add`` adds."""
    parser = Parser(prog="radixkv")
    add(parser.add_subparsers(parser_class=Parser), "")
    return parser.parse_args([name, *flags])


def refused(capsys, call, *flags):
    """Returns the one line with which a call ends as wrong usage."""
    with pytest.raises(SystemExit) as stopped:
        call(*flags)
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert ": error: " in text
    assert len(text) < 300
    assert "--help" in text
    return text


def read(config, path):
    """Returns the setting at a path such as ``cache.page_size``."""
    for name in path.split("."):
        config = getattr(config, name)
    return config
