"""Tests with lm-eval: a task of multiple choice, which scores prompts, and one whose answers are generated."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager

NOTES = (
    "Notes on Kestrel, number 176, by Anton:\n"
    "The code of the golden locker in Station Street is 4748. Lucia keeps the stone helmet in the cellar. "
    "Goran keeps the glass blanket in the stable. Nora keeps the glass clock in the attic. "
    "The garden club of Eastry meets on Sunday. The grocer in Meadow Street opens at 10:00.\n\n"
)
ROOMS = ["cellar", "stable", "attic", "garage"]
KEPT = [("Lucia", "stone helmet", "cellar"), ("Goran", "glass blanket", "stable"), ("Nora", "glass clock", "attic")]
QUESTIONS = [
    {
        "question": f"Question: Where does {name} keep the {thing}?\nAnswer:",
        "answers": [f"{name} keeps the {thing} in the {each}." for each in ROOMS],
        "right": ROOMS.index(room),
        "result": room,
    }
    for name, thing, room in KEPT
]
CHOICE = {
    "task": "rooms_by_choice",
    "output_type": "multiple_choice",
    "doc_to_text": NOTES + "{{question}}",
    "doc_to_choice": "{{answers}}",
    "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "acc"}],
}
GENERATED = {
    "task": "rooms_in_words",
    "output_type": "generate_until",
    "doc_to_text": NOTES + "{{question}}",
    "doc_to_target": "{{result}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 40, "temperature": 0},
    "filter_list": [
        {
            "name": "result",
            "filter": [{"function": "regex", "regex_pattern": "#### (\\w+)"}, {"function": "take_first"}],
        }
    ],
    "metric_list": [{"metric": "exact_match"}],
}


OF_THE_SERVER = {"tokenizer_backend": "remote", "tokenizer": None, "auth_token": os.environ["KEY"]}
"""Settings with which the server tokenizes, and not a tokenizer in a folder."""


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    (tmp_path / "rooms.jsonl").write_text(lines)
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rooms.jsonl")}}}
    for task in (CHOICE, GENERATED):
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump(task | data | {"test_split": "test"}))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokenized_requests": False},
        {"batch_size": 4},
        {"num_concurrent": 3},
        OF_THE_SERVER,
        OF_THE_SERVER | {"tokenized_requests": False},
    ],
)
def test_all_answers_are_right(
    tasks: TaskManager, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", os.environ["KEY"])
    server = {
        "model": "embedded",
        "base_url": os.environ["SERVER"] + "/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": os.environ["MODEL"],
        "max_retries": 1,
    }
    names = [CHOICE["task"], GENERATED["task"]]
    found = lm_eval.simple_evaluate(
        "local-completions", model_args=server | settings, tasks=names, task_manager=tasks, bootstrap_iters=0
    )
    assert found["results"]["rooms_by_choice"]["acc,none"] == 1
    assert found["results"]["rooms_in_words"]["exact_match,result"] == 1
    assert found["n-samples"]["rooms_by_choice"]["effective"] == len(QUESTIONS)
