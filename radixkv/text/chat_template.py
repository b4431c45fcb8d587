"""A conversation to the text that the model continues, by the checkpoint's chat template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from radixkv.errors import CheckpointError, ContextLengthExceeded, InvalidRequest

MAX_RENDERED_CHARACTERS = 1 << 24
"""A longer text is not finished."""
MAX_STEPS = 1 << 22
"""Turns of loops and calls in one rendering: some for each of many messages, but not for each pair of them."""
_STEPS = "steps left"
"""Where a rendering counts them; no template can name a variable with a space."""

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the final message ends; with a space, to see whether the template strips one there."""


class ChatTemplate:
    """A Jinja template in a sandbox, as Transformers renders them. Safe to use from several threads.

    Args:
        source: the template's text.
        tokens: the special tokens that it may name, such as ``bos_token``.
        origin: where it comes from, as errors name it.

    Raises:
        CheckpointError: it is no template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str) -> None:
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"{origin} is not a chat template: {error}; give another with --chat-template"
            ) from error
        except RecursionError:
            raise CheckpointError(
                f"{origin} is nested too deeply for a chat template; give another with --chat-template"
            ) from None

    @classmethod
    def load(cls, folder: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template of a checkpoint's folder: ``chat_template.jinja``, ``chat_template.json``, or
        ``chat_template`` in ``tokenizer_config.json``; None if it has none.

        Args:
            folder: also says the special tokens.
            override: a file with the template to use instead.

        Raises:
            CheckpointError: a file cannot be read, or holds no template.
        """
        config = _read_json(folder / "tokenizer_config.json")
        tokens = _special_tokens(config, folder)
        if override is not None:
            return cls(_read_text(override), tokens, str(override))
        path = folder / "chat_template.jinja"
        if path.exists():
            return cls(_read_text(path), tokens, str(path))
        for name, content in (
            ("chat_template.json", _read_json(folder / "chat_template.json")),
            ("tokenizer_config.json", config),
        ):
            path = folder / name
            if (found := content.get("chat_template")) is not None:
                return cls(_default(found, path), tokens, f"{path}: chat_template")
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation, special tokens included: encode it without those of the tokenizer's own.

        Args:
            messages: with ``role``, ``content`` and whatever else the template reads; of JSON's types.
            add_generation_prompt: whether the text ends with the beginning of the assistant's answer.
            continue_final_message: whether it ends with the last message's content, which the answer goes on.
            variables: more that the template may read.

        Raises:
            InvalidRequest: the template refuses the messages.
            ContextLengthExceeded: the text has more than ``MAX_RENDERED_CHARACTERS``, or takes more than
                ``MAX_STEPS``.

        Cost: the template's; usually O(messages' length).
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message excludes add_generation_prompt; set add_generation_prompt to false",
                param="continue_final_message",
            )
        if continue_final_message:
            messages, final = _marked(messages)
        # As in Transformers; variables of the request go before special tokens.
        known = {"tools": None, "documents": None, **self._tokens, **variables}
        known |= {"messages": messages, "add_generation_prompt": add_generation_prompt, _STEPS: _Steps(MAX_STEPS)}
        text = self._text(known)
        return _up_to_the_mark(text, final) if continue_final_message else text

    def _text(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        n_characters = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                n_characters += len(piece)
                if n_characters > MAX_RENDERED_CHARACTERS:
                    raise ContextLengthExceeded(
                        f"the chat template makes more than {MAX_RENDERED_CHARACTERS} characters of the messages; "
                        "shorten them",
                        param="messages",
                    )
        except _Refusal as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from error
        except InvalidRequest:
            raise
        except Exception as error:  # whatever an expression of the template may raise; its text can hold messages
            raise InvalidRequest(
                f"the chat template cannot render the messages ({type(error).__name__}); check roles, contents and "
                "chat_template_kwargs",
                param="messages",
            ) from error
        return "".join(pieces)


class _Refusal(jinja2.TemplateError):
    """What a template raises itself."""


class _Steps:
    """Those that a rendering may still take."""

    def __init__(self, count: int) -> None:
        self._count = count

    def take(self) -> None:
        """Takes one. Raises ``ContextLengthExceeded`` if none is left."""
        self._count -= 1
        if self._count < 0:
            raise ContextLengthExceeded(
                f"the chat template takes more than {MAX_STEPS} steps for the messages; shorten them",
                param="messages",
            )


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates come to an end: turns of loops and calls are counted."""

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _STEPS, [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *arguments, **options)

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **values: Any) -> Any:  # noqa: N805
        """Calls what a template calls, if it may."""
        # The first names are jinja2's: a template may give values of any other name.
        __context[_STEPS].take()
        return super().call(__context, __obj, *arguments, **values)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each a step."""
    steps: _Steps = context[_STEPS]
    for item in items:
        steps.take()
        yield item


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; the text is the same without it."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Without names that mean something to Python."""

    def __init__(*arguments: Any, **values: Any) -> None:
        # ``self`` is no parameter here, so that a template may set a value of that name.
        self, *pairs = arguments
        named = dict(*pairs, **values)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise _Refusal("it sets a name that begins with an underscore")


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters[_STEPS] = _counted
    environment.filters["tojson"] = _to_json
    names: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    environment.globals |= names
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what means something in HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The messages with a mark at the end of the last one's content, and that content."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequest(
            "continue_final_message needs a last message with text to continue", param="continue_final_message"
        )
    return [*messages[:-1], {**messages[-1], "content": content + _CONTINUED}], content


def _up_to_the_mark(text: str, final: str) -> str:
    mark = text.rfind(_CONTINUED.strip())
    if mark < 0 or final.strip() not in text:
        raise InvalidRequest(
            "the chat template changes the last message, so that it cannot be continued; leave "
            "continue_final_message out",
            param="continue_final_message",
        )
    is_kept = text.startswith(_CONTINUED, mark)
    return text[:mark] if is_kept else text[:mark].rstrip()


def _default(found: object, path: Path) -> str:
    """The template to use, of one or of several with names."""
    if isinstance(found, str):
        return found
    named = {}
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        named = {item.get("name"): item.get("template") for item in found}
    template = named.get("default")
    if not isinstance(template, str):
        raise CheckpointError(
            f"{path}: chat_template is neither a text nor a list of named ones with a 'default'; choose one with "
            "--chat-template"
        )
    return template


def _special_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Special tokens by name, from texts or objects with ``content``."""
    # Older checkpoints, without ``added_tokens_decoder``, have the right ones in a file of their own.
    older = {} if "added_tokens_decoder" in config else _read_json(folder / "special_tokens_map.json")
    tokens = {}
    for name, value in {**config, **older}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}; fetch the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object; fetch the checkpoint again")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check the file") from error
