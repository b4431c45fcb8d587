"""``LLM.chat`` shows tools to the model and returns its text as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM
from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.text.tokenizer import Tokenizer

TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather"}}]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    return LLM("tiny", device="cpu", load_format="dummy", chat_template=str(path), max_total_tokens=4096)


def test_the_template_gets_the_tools(llm: LLM) -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[2] / "radixkv" / "checkpoints" / "tiny")
    for tools, expected in ((TOOLS, "weather hello"), (None, "hello"), ([], "hello")):
        assert tokenizer.decode(llm.chat_prompt(MESSAGES, tools=tools)) == expected
    (output,) = llm.chat(MESSAGES, tools=TOOLS, use_tqdm=False)
    assert output.prompt_token_ids == llm.chat_prompt(MESSAGES, tools=TOOLS)
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)


def test_a_template_that_shows_no_tools_is_named(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}")
    template = str(tmp_path / "template.jinja")
    llm = LLM("tiny", device="cpu", load_format="dummy", chat_template=template, max_total_tokens=4096)
    with pytest.raises(UnsupportedFeature, match="chat template") as caught:
        llm.chat(MESSAGES, tools=TOOLS, use_tqdm=False)
    assert caught.value.param == "tools"


def test_malformed_tools_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\]") as caught:
        llm.chat(MESSAGES, tools=[{"type": "function"}], use_tqdm=False)
    assert caught.value.param == "tools"
