"""Flags shared by several commands, made of the settings, with the aliases of other engines."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from radixkv.errors import ConfigError, RadixKVError
from radixkv.settings.compat import ALWAYS_ON_FLAGS, UNITS, Place, Refusal, refusals, renamed
from radixkv.settings.compat.sglang_speculation import ALGORITHM, FIELDS, TWO_SPECULATIONS, speculation_of
from radixkv.settings.config import AdapterConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.settings.setting import SWITCH, Kind, Setting, settings_of
from radixkv.settings.speculative import DEFAULT_SPECULATION
from radixkv.settings.values import as_bytes, parse_bytes, parse_count, parse_number, parse_whole_number

ValueT = TypeVar("ValueT")

_FLAGS = re.compile(r"--[\w-]+(?:/--?[\w-]+)*")
"""A flag, or argparse's list of the flags of one setting."""


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line and exits with code 2. Flags cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._aliases: dict[str, str] = {}
        """By setting, by its first flag and by argparse's list of its flags: the alias that the user typed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Does what argparse does, but rejects unknown flags first, so their values never pass for positionals."""
        typed: dict[str, str] = {}
        for flag in self._flags_before_subcommand(args or ()):
            action = self._option_string_actions.get(flag)
            if action is None:
                close = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.8)
                self.error(f"unknown flag {flag}{f'; did you mean {close[0]}?' if close else ''}")
            ours = action.option_strings[0]
            if typed.setdefault(ours, flag) != flag and not isinstance(action, argparse.BooleanOptionalAction):
                self._aliases.clear()  # the text has both spellings as typed
                self.error(f"{typed[ours]} and {flag} are the same setting; give one of them")
            if flag != ours:
                self._aliases |= dict.fromkeys((action.dest, ours, "/".join(action.option_strings)), flag)
        return super().parse_known_args(args, namespace)

    def _flags_before_subcommand(self, args: Sequence[str]) -> Iterator[str]:
        """Yields the flags before a subcommand, which parses its own."""
        below = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        for arg in args:
            if arg == "--" or any(arg in action.choices for action in below):
                return
            if arg.startswith("--") and " " not in arg:  # argparse treats an argument with a space as a positional
                yield arg.partition("=")[0]

    def with_typed_flags(self, message: str) -> str:
        """Returns an error message as one line, with settings replaced by the aliases that the user typed."""
        text = re.sub(_FLAGS, lambda flags: self._aliases.get(flags[0], flags[0]), " ".join(message.split()))
        return renamed(text, self._aliases)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {self.with_typed_flags(message)}; see '{self.prog} --help'\n")


def flag_type(parse: Callable[[str], ValueT]) -> Callable[[str], ValueT]:
    """Returns a type of argparse that parses a flag's value as ``parse`` does, and shows its errors."""

    def parsed(text: str) -> ValueT:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


whole_number = flag_type(parse_whole_number)
number = flag_type(parse_number)
count = flag_type(parse_count)
"""A number of tokens or other things, such as ``4096`` or ``4k``."""
byte_size = flag_type(parse_bytes)
"""A size in bytes, such as ``64GiB``, ``500MB`` or ``1048576``."""


def add_flags(group: argparse._ActionsContainer, settings: Mapping[str, Setting]) -> None:
    """Adds the flags of settings. The parsed values have the settings' names."""
    for name, one in settings.items():
        flags = spelled(dict.fromkeys((one.flag, *one.aliases)))
        if one.kind is not SWITCH:
            group.add_argument(
                *flags,
                dest=name,
                action=_Value,
                kind=one.kind,
                nargs=one.kind.nargs,
                default=one.default,
                metavar=one.metavar,
                help=one.help,
            )
        elif one.default is None:
            group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, help=one.help)
        else:
            group.add_argument(*flags, dest=name, action="store_true", default=one.default, help=one.help)
        if one.opposites:
            group.add_argument(*spelled(one.opposites), dest=name, action="store_false", help=one.opposites_help)


def add_engine_flags(parser: Parser, *, has_queue: bool = True) -> None:
    """Adds the flags of the model, the page pool and the scheduler, which ``engine_config`` reads.

    Args:
        parser: the command's parser.
        has_queue: whether the command has a request queue and therefore its flags.
    """
    for title, config in (
        ("model", ModelConfig),
        ("prefix cache and memory", CacheConfig),
        ("scheduler", SchedulerConfig),
    ):
        settings = {name: one for name, one in settings_of(config).items() if has_queue or not one.needs_queue}
        add_flags(parser.add_argument_group(title), settings)
    if has_queue:
        add_flags(parser.add_argument_group("adapters"), settings_of(AdapterConfig))
    for name in FIELDS:
        kind = str if name == ALGORITHM else whole_number
        parser.add_argument(_flag(name), type=kind, help=argparse.SUPPRESS)
    parser.set_defaults(model=None)  # so that a model which is given twice is seen
    add_always_on_flags(parser, Place.FLAG)
    add_refused_flags(parser, Place.FLAG)
    if not has_queue:
        add_refused_flags(parser, Place.OFFLINE_FLAG)


def engine_config(args: argparse.Namespace, *, model: str | None = None, seed: int = 0) -> EngineConfig:
    """Returns the configuration that the flags describe. Wrong values end as wrong usage, with exit code 2.

    Args:
        args: the parsed flags.
        model: the command's positional model, if it has one.
        seed: the engine's seed.
    """
    parser: Parser = args.parser
    if model is not None and args.model is not None:
        parser.error(f"the model is given twice, as {model!r} and as --model {args.model!r}; give it once")
    given = model if model is not None else args.model
    if args.host_memory_bytes is None:
        check_implied_flags(parser, args, "host_memory_bytes")
    try:
        values = vars(args) | {"model": "tiny" if given is None else given, "seed": seed}
        if (speculation := speculation_of(values)) is not None:
            if args.speculative_config is not DEFAULT_SPECULATION:
                raise ConfigError(TWO_SPECULATIONS)
            values["speculative_config"] = speculation
        return EngineConfig.of(values)
    except RadixKVError as error:
        parser.error(str(error))


def answering_config(args: argparse.Namespace, *, model: str | None = None, seed: int = 0) -> EngineConfig:
    """Returns ``engine_config`` of a command that asks for answers, which other tasks do not give."""
    config = engine_config(args, model=model, seed=seed)
    if (task := config.model.task) != "generate":
        parser: Parser = args.parser
        parser.error(f"--task {task} gives no answers; use radixkv serve --task {task}, or LLM.{task} in Python")
    return config


def engine_flags(config: EngineConfig) -> list[str]:
    """Returns flags that reproduce a configuration, but for events and tenants. Default values are left out."""
    flags: list[str] = []
    for part in (config.model, config.cache, config.scheduler, config.adapters):
        for name, one in settings_of(type(part)).items():
            value = vars(part)[name]
            if value == one.default:
                continue
            if one.kind.nargs is not None:
                flags += [*spelled([one.flag]), *map(str, value)]
            elif one.kind is SWITCH:
                flags += spelled([one.flag] if value else one.opposites[:1])
            else:
                flags += [f"{flag}={'off' if value is None else value}" for flag in spelled([one.flag])]
    return flags


def add_always_on_flags(parser: argparse.ArgumentParser, place: Place) -> None:
    """Adds the flags that turn on what radixkv always does; they have no effect."""
    parser.add_argument(
        *spelled(ALWAYS_ON_FLAGS[place].split()),
        dest="always_on",
        action="store_true",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def add_refused_flags(parser: argparse.ArgumentParser, place: Place) -> None:
    """Adds the flags of features that radixkv lacks, which are refused by name unless they ask for nothing."""
    for name, refusal in refusals(place).items():
        if refusal.implied_by is None:
            parser.add_argument(_flag(name), action=_RefusedFlag, refusal=refusal)
        else:
            parser.add_argument(_flag(name), action="store_true", help=argparse.SUPPRESS)


def check_implied_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, setting: str) -> None:
    """Refuses flags that ask for what one of our settings does. For when that setting is not given."""
    for name, refusal in refusals(Place.FLAG).items():
        if refusal.implied_by == setting and vars(args)[name]:
            parser.error(str(refusal.error(name=_flag(name))))


def spelled(names: Iterable[str]) -> list[str]:
    """Returns the flags of names with underscores."""
    return [_flag(name) for name in names]


def _flag(name: str) -> str:
    return name if name.startswith("-") else "--" + name.replace("_", "-")


class _Value(argparse.Action):
    """Takes the value of a setting, under another engine's flag also a number in its unit."""

    def __init__(self, *args: Any, kind: Kind, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kind = kind

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        unit = UNITS.get(str(option_string).lstrip("-").replace("-", "_"))
        try:
            if unit is not None:
                values = as_bytes(values, unit)
            elif self.nargs is None:
                values = self._kind.of_text(values)
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, values)


class _RefusedFlag(argparse.Action):
    """Ends the command with wrong usage, unless the value is one of the accepted ones."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, refusal: Refusal) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._refusal = refusal
        self._accepted = {str(value) for value in refusal.accepts if not isinstance(value, bool)}

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if values not in self._accepted:
            parser.error(str(self._refusal.error(name=option_string)))
