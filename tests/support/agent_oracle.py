"""An agent that understands the errands of the workload by its templates, in place of a model."""

import json
import re

from radixkv.lab.bench.session import Reply, ToolCall
from radixkv.lab.bench.workloads.errands import CHAINS
from radixkv.lab.bench.workloads.tools import TOOLS

QUOTED, WORD = r"[^\"]+", r"[\w:]+"
LINK = re.compile(r" (?:Also: |And: )?")


def next_reply(messages):
    """Returns the right reply to the messages of an agent: calls, or the answer."""
    start = max(index for index, message in enumerate(messages) if message["role"] == "user")
    results = [json.loads(message["content"]) for message in messages[start:] if message["role"] == "tool"]
    planned = plan(messages[start]["content"], results)
    left = planned[len(results) :]
    if left:
        return Reply(
            ("",), tuple(ToolCall(tool.name, json.dumps(values), f"c{n}") for n, (tool, values) in enumerate(left))
        )
    told = zip(planned, results, strict=True)
    return Reply((" ".join(tool.answer.format_map(values | result) for (tool, values), result in told),))


def plan(user, results):
    """Returns tools and arguments of all calls that can be made when these results are known, in order."""
    for chain in CHAINS:
        if match := re.fullmatch(pattern(chain.user), user):
            values = match.groupdict()
            calls = [(chain.first, typed(chain.first, values))]
            if results:
                known = values | results[0]
                wanted = {name: known[source] for name, source in chain.second_arguments.items()}
                calls.append((chain.second, typed(chain.second, wanted)))
            return calls
    calls, position = [], 0
    while position < len(user):
        position = link.end() if (link := LINK.match(user, position)) else position
        tool, match = next(
            (tool, match)
            for tool in TOOLS
            for wording in tool.users
            if (match := re.compile(pattern(wording)).match(user, position))
        )
        calls.append((tool, typed(tool, match.groupdict())))
        position = match.end()
    return calls


def pattern(template):
    """Returns the regular expression of a template's texts; values are single words, except in quotes."""
    first, *parts = re.split(r"\{(\w+)\}", template)
    expression, seen = re.escape(first), set()
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        gap = rf"(?P<{name}>{QUOTED if name == 'text' else WORD})"
        expression += (f"(?P={name})" if name in seen else gap) + re.escape(text)
        seen.add(name)
    return expression


def typed(tool, values):
    """Returns the arguments of a call, integers as such."""
    return {
        name: int(values[name]) if schema["type"] == "integer" else values[name]
        for name, schema in tool.parameters.items()
    }
