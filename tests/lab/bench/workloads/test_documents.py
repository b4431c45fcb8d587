"""Workloads with questions about documents."""

from itertools import chain, groupby

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.documents import document_head, generate_documents
from support.sessions import collect_requests, collect_turns, make, said, write_documents


def document_of(prompt):
    return prompt.partition("\n\nQuestion: ")[0]


def test_rubrics_of_an_article_are_sent_together_and_share_the_article():
    sessions = make("judge").sessions
    assert len(sessions) == 8
    articles = set()
    for session in sessions:
        (turn,) = collect_turns(session)
        (article,) = {document_of(request.prompt) for request in turn}
        articles.add(article)
        assert article.count(". ") + article.count(".\n") + 1 == 100
        assert len({request.prompt for request in turn}) == 8
        for request in turn:
            assert request.prompt.startswith(article + "\n\nQuestion: ")
            assert request.prompt.endswith("?\nAnswer:")
    assert len(articles) == 8


def test_questions_about_long_documents_are_shuffled():
    requests = collect_requests(make("long-document-qa").sessions)
    documents = [document_of(request.prompt) for request in requests]
    assert {documents.count(document) for document in documents} == {6}
    assert len(set(documents)) == 6
    assert len(list(groupby(documents))) > 18
    assert documents != [
        document_of(r.prompt) for r in collect_requests(make("long-document-qa", Source(1)).sessions)
    ]
    assert len(documents[0].split()) > 900
    assert len(make("long-document-qa", num_facts=300).sessions[0].turns().send(None)[0].prompt.split()) > 1800


@pytest.mark.parametrize(("name", "shape"), [("judge", (8, 100, 8)), ("long-document-qa", (6, 160, 6))])
def test_the_expected_answer_is_correct_and_that_of_another_question_is_not(name, shape):
    n_documents, n_facts, n_problems = shape
    documents = [
        next(generated) for generated in [generate_documents(0, n_facts, n_problems)] for _ in range(n_documents)
    ]
    answers = {
        f"{document_head(document)}Question: {problem.question}\nAnswer:": problem.answer
        for document in documents
        for problem in document.problems
    }
    requests = collect_requests(make(name).sessions)
    assert {request.prompt for request in requests} == answers.keys()
    for request in requests:
        sentence, result = answers[request.prompt].split("\n#### ")
        assert request.check(said(f" {sentence}\n#### {result}\n\nQuestion: Who?\nAnswer: Nobody.\n#### nobody"))
        assert request.check(said(f" {sentence}"))
        assert request.check(said(f" It is {result.upper()}!"))
        assert not request.check(said(f" It is another.\n{sentence}"))
        assert not request.check(said(f" {sentence}\n#### another"))
        assert not request.check(said(f" It is {result}x."))
        wrong = [answer for answer in answers.values() if answer.split("#### ")[1] != result]
        assert not any(request.check(said(f" {answer}")) for answer in wrong)


def test_a_data_set_gives_its_first_documents_and_questions(tmp_path):
    source = Source(3, write_documents(tmp_path, [3, 1, 2, 2]))
    loaded = make("judge", source, num_documents=3, num_questions=2)
    turns = [[request.prompt for request in turn] for session in loaded.sessions for turn in collect_turns(session)]
    assert turns == [
        [f"Text {number}.\n\nQuestion: q{number}.{n}?\nAnswer:" for n in range(count)]
        for number, count in enumerate([2, 1, 2])
    ]
    assert loaded.counts == {"missing_questions": 1}
    mixed = make("long-document-qa", source, num_documents=3, num_questions=2)
    assert sorted(request.prompt for request in collect_requests(mixed.sessions)) == sorted(
        chain.from_iterable(turns)
    )
    (request, *_) = collect_requests(loaded.sessions)
    assert request.check(said(" I think a0.0, of course."))
    assert request.check(said(" #### A0.0"))
    assert not request.check(said(" a0.01"))


def test_the_seed_decides_the_order_of_a_data_set(tmp_path):
    path = write_documents(tmp_path, [6] * 6)
    orders = {
        tuple(r.prompt for r in collect_requests(make("long-document-qa", Source(n, path)).sessions))
        for n in range(9)
    }
    assert len(orders) == 9
    assert len({frozenset(order) for order in orders}) == 1


@pytest.mark.parametrize("name", ["judge", "long-document-qa"])
def test_a_data_set_that_is_too_short_or_of_another_format_is_refused(tmp_path, name):
    path = write_documents(tmp_path, [2, 2])
    with pytest.raises(ConfigError, match="has 2 documents; the workload needs 3; .* lower num_documents"):
        make(name, Source(0, path), num_documents=3)
    path.write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ConfigError, match="use --workload fewshot"):
        make(name, Source(0, path))
