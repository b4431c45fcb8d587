"""Workload of questions behind documents that a search has found."""

import re
from collections import Counter

from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.documents import generate_corpus
from radixkv.lab.bench.workloads.rag import INSTRUCTION
from support.sessions import collect_requests, make, said, write_documents


def chunks_of(prompt):
    """Returns the documents of a prompt, in order."""
    *chunks, question = prompt.removeprefix(INSTRUCTION).split("\n\n")
    assert prompt.startswith(INSTRUCTION)
    assert re.fullmatch(r"Question: .*\?\nAnswer:", question)
    return chunks


def test_each_prompt_has_the_document_with_the_answer_among_others_in_changing_order():
    corpus = generate_corpus(0, 16, 20, 3)
    answering = {problem.question: document for document in corpus for problem in document.problems}
    answers = {problem.question: problem.answer for document in corpus for problem in document.problems}
    assert len(answering) == 48
    requests = collect_requests(make("rag").sessions)
    orders, places = set(), Counter()
    for request in requests:
        chunks = chunks_of(request.prompt)
        assert len(set(chunks)) == len(chunks) == 6
        assert set(chunks) <= {document.text for document in corpus}
        question = request.prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        places[chunks.index(answering.pop(question).text)] += 1
        sentence, result = answers[question].split("\n#### ")
        assert request.prompt.count(sentence) == 1, "only one document answers the question"
        assert request.check(said(f" {sentence}\n#### {result}"))
        assert not request.check(said(f" {sentence}\n#### another"))
        orders.add(tuple(chunks))
    assert answering == {}
    assert len(orders) == 48
    assert set(places) == set(range(6))


def test_the_first_documents_are_found_most_often():
    corpus = [document.text for document in generate_corpus(3, 10, 4, 2)]
    requests = collect_requests(
        make("rag", Source(3), num_documents=10, num_facts=4, num_questions=2, num_chunks=4).sessions
    )
    n_found = Counter(corpus.index(chunk) for request in requests for chunk in chunks_of(request.prompt))
    assert sum(n_found[index] for index in range(3)) > 1.5 * sum(n_found[index] for index in range(7, 10))
    assert all(n_found[index] >= 2 for index in range(10)), "each has its own questions"


def test_a_data_set_gives_the_documents(tmp_path):
    path = write_documents(tmp_path, [1] * 4)
    made = make("rag", Source(1, path), num_documents=4, num_questions=2, num_chunks=2)
    assert made.counts == {"missing_questions": 4}
    requests = collect_requests(made.sessions)
    assert sorted(request.prompt[-14:] for request in requests) == [f" q{n}.0?\nAnswer:" for n in range(4)]
    for request in requests:
        number = request.prompt[-12]
        assert f"Text {number}." in chunks_of(request.prompt)
        assert request.check(said(f" It is a{number}.0."))
