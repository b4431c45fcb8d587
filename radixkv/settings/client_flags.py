"""The flags that name a running server and the API key with which it is used."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from radixkv.errors import ConfigError, shortened
from radixkv.settings.checks import check_api_key

KEY_VARIABLE = "RADIXKV_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a running server, which the command needs."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", default=DEFAULT_URL, metavar="URL", help="address of the server (default: %(default)s)"
    )
    add_key_flags(server, "API key of the server")


def add_key_flags(group: argparse._ArgumentGroup, what: str) -> None:
    """Adds ``--api-key`` and ``--api-key-file``, which ``api_key`` reads; ``what`` says whose key it is."""
    key = group.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"{what}; other users of this machine see it in the list of processes, unlike one from --api-key-file "
        f"or the environment variable {KEY_VARIABLE} (default: none)",
    )
    key.add_argument(
        "--api-key-file", metavar="FILE", help="file with the key instead; a final line break is ignored"
    )


def has_key_flag(args: argparse.Namespace) -> bool:
    """Returns whether a flag gives a key, and not only the environment."""
    return args.api_key is not None or args.api_key_file is not None


def api_key(args: argparse.Namespace) -> str | None:
    """Returns the key from ``--api-key`` or ``--api-key-file``, else from ``RADIXKV_API_KEY``; None without any.

    Raises:
        ConfigError: the file cannot be read, file or variable are empty, or a client cannot send the key.
    """
    if args.api_key is not None:
        check_api_key("api_key", args.api_key)
        return str(args.api_key)
    if args.api_key_file is None:
        source, key = f"the environment variable {KEY_VARIABLE}", os.environ.get(KEY_VARIABLE)
    else:
        source = f"--api-key-file {shortened(args.api_key_file)}"
        try:
            key = Path(args.api_key_file).expanduser().read_text("ascii").rstrip("\r\n")
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}; give a file with the key") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{source} is not ASCII; give a file with only the key") from None
    if key == "":
        raise ConfigError(f"{source} is empty; put the API key there, or leave it out for a server without a key")
    if key is not None:
        check_api_key("api_key", key)
    return key
