"""Tests with Claude Code, which is inside Anthropic's package for agents, with its default limit of tokens."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    Message,
    ResultMessage,
    SdkMcpTool,
    create_sdk_mcp_server,
    tool,
)

from support.errands import SYSTEM, Tools

SERVER, KEY = os.environ["SERVER"], os.environ["KEY"]
NOTE = "The garden club of Eastry meets on Sunday. " * 20
"""Makes the first turn long, so that what the second one has from the cache shows."""


def offered(function: Callable[..., str]) -> SdkMcpTool[Any]:
    names = inspect.signature(function).parameters

    @tool(function.__name__, function.__doc__ or "", dict.fromkeys(names, str))
    async def call(arguments: dict[str, str]) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": function(**arguments)}]}

    return call


def options(tools: Tools, folder: Path) -> ClaudeAgentOptions:
    """Returns settings as docs/agents.md has them, with a short system prompt, and only the tools of errands."""
    return ClaudeAgentOptions(
        model="embedded",
        system_prompt=SYSTEM,
        tools=[],
        mcp_servers={"errands": create_sdk_mcp_server("errands", tools=[offered(one) for one in tools.functions])},
        permission_mode="bypassPermissions",
        setting_sources=[],
        max_turns=4,
        cwd=str(folder),
        env={
            "ANTHROPIC_BASE_URL": SERVER,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": "embedded",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "embedded",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        },
    )


async def ask(client: ClaudeSDKClient, question: str) -> list[Message]:
    await client.query(question)
    return [message async for message in client.receive_response()]


def test_two_turns(tmp_path: Path) -> None:
    """What the model says and calls is not checked: it does not know these prompts."""

    async def run() -> tuple[list[Message], list[Message]]:
        async with ClaudeSDKClient(options(Tools(), tmp_path)) as client:
            return await ask(client, NOTE), await ask(client, "What is 41 plus 11?")

    first, second = asyncio.run(run())
    for messages in (first, second):
        result = messages[-1]
        assert isinstance(result, ResultMessage)
        assert "too long" not in str(result.result), result
        assert result.usage is not None
        assert result.usage["output_tokens"] > 0
    assert isinstance(second[-1], ResultMessage)
    assert second[-1].usage is not None
    assert second[-1].usage["cache_read_input_tokens"] > 200, "the first turn is cached"
