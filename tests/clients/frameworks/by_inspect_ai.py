"""Tests with inspect-ai over all APIs: an evaluation with its default limit of tokens, and errands with tools."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai import eval as run_eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import Model, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Solver, chain, generate, system_message, use_tools
from inspect_ai.tool import Tool, tool

from support.errands import SYSTEM, TWO_CALLS_IN_A_ROW, Tools

SERVER, KEY = os.environ["SERVER"], os.environ["KEY"]
SUMS = [("What is 41 plus 11?", "52"), ("What is 20 plus 30?", "50")]


def open_model(api: str) -> Model:
    if api == "messages":
        return get_model("anthropic/embedded", base_url=SERVER, api_key=KEY, memoize=False)
    url, is_responses = f"{SERVER}/v1", api == "responses"
    return get_model("openai/embedded", base_url=url, api_key=KEY, responses_api=is_responses, memoize=False)


def evaluate(api: str, samples: list[tuple[str, str]], solver: Solver, folder: Path) -> EvalLog:
    dataset = [Sample(input=question, target=answer) for question, answer in samples]
    task = Task(dataset=dataset, solver=solver, scorer=includes())
    (log,) = run_eval(task, model=open_model(api), temperature=0, display="none", log_dir=str(folder))
    assert log.status == "success", log.error
    return log


pytestmark = pytest.mark.parametrize("api", ["messages", "chat", "responses"])


def test_an_evaluation_with_the_default_limit(api: str, tmp_path: Path) -> None:
    """Over Messages the limit is 32,000 tokens, more than the context."""
    log = evaluate(api, SUMS, generate(), tmp_path)
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1
    for sample in log.samples or []:
        usage = sample.output.usage
        assert usage is not None
        n_read, n_written = usage.input_tokens_cache_read or 0, usage.input_tokens_cache_write or 0
        assert usage.total_tokens == usage.input_tokens + n_read + n_written + usage.output_tokens


def offered(function: Callable[..., str]) -> Tool:
    """Returns an errand's tool as inspect-ai reads it: asynchronous, with a description of each argument."""
    signature = inspect.signature(function)
    about = "\n".join(f"    {name}: The {name}." for name in signature.parameters)

    async def execute(**arguments: str) -> str:
        return function(**arguments)

    execute.__doc__ = f"{function.__doc__}\n\nArgs:\n{about}"
    execute.__signature__ = signature
    execute.__annotations__ = dict(function.__annotations__)

    @tool(name=function.__name__)
    def make() -> Tool:
        return execute

    return make()


def test_an_errand(api: str, tmp_path: Path) -> None:
    tools, errand = Tools(), TWO_CALLS_IN_A_ROW
    solver = chain(system_message(SYSTEM), use_tools([offered(one) for one in tools.functions]), generate())
    log = evaluate(api, [(errand.user, errand.results[0])], solver, tmp_path)
    (sample,) = log.samples or []
    errand.check(tools, sample.output.completion)
