"""Answers questions from documents, and measures how much of the prompts the server's cache shares.

For each question some documents are found, reranked and put into a prompt, which a server answers. All questions
are asked once for each order of documents; the table says how many prompt tokens were cached.

    python examples/rag/rag.py --url http://127.0.0.1:8000
    python examples/rag/rag.py --url http://127.0.0.1:8000 --embeddings http://127.0.0.1:8001 \\
        --reranker http://127.0.0.1:8002
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

HERE = Path(__file__).parent
LIMIT_S = 600.0
INSTRUCTION = (
    "You answer questions of visitors about six towns from the documents below, which a search has found. Answer "
    "with the sentence that says it, and nothing else. If no document says it, say so."
)


class Question(NamedTuple):
    """A question, a text that a right answer has, and the id of the document that says it."""

    question: str
    answer: str
    document: str


@dataclass
class Totals:
    """What the server said of all prompts of one order."""

    n_prompt: int = 0
    n_cached: int = 0
    n_right: int = 0
    n_by_source: Counter[str] = field(default_factory=Counter)
    """Cached tokens by where they came from, of a server with a lower tier: device, host or storage."""


class RunError(Exception):
    """A server or a file is not there, or is not what it should be; the text says which one and why."""


class Server:
    """A server to which bodies are posted.

    Args:
        url: such as http://127.0.0.1:8000.
        role: what errors call it.
        key: its API key; None: it needs none.
    """

    def __init__(self, url: str, role: str, key: str | None) -> None:
        self._name = f"{role} {url}"
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._client = httpx.Client(base_url=url, timeout=LIMIT_S, headers=headers)
        except httpx.InvalidURL as error:
            raise RunError(f"{self._name}: {error}") from error

    def post(self, path: str, body: Mapping[str, Any], *fields: str) -> Any:
        """Returns the JSON of the reply, which must have these fields. Raises ``RunError``."""
        try:
            reply = self._client.post(path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RunError(f"{self._name}: {error}") from error
        try:
            content = reply.json()
        except ValueError:
            content = None
        if reply.status_code == 200 and isinstance(content, dict) and content.keys() >= set(fields):
            return content
        match content:
            case {"error": {"message": str(reason)}}:
                pass
            case _:
                reason = f"{path} answers with status {reply.status_code}, and not as this API does"
        raise RunError(f"{self._name}: {reason}")


def read_documents(folder: Path) -> dict[str, str]:
    """Returns the paragraphs of all text files by their ids: the file's name and the paragraph's number."""
    found = {
        f"{path.stem}-{number}": paragraph
        for path in sorted(folder.glob("*.txt"))
        for number, paragraph in enumerate(re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip()), start=1)
        if paragraph
    }
    if not found:
        raise RunError(f"{folder}: there are no files NAME.txt with text in this folder")
    return found


def read_questions(path: Path) -> list[Question]:
    """Returns the questions of a file, one JSON object a line."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(Question(**json.loads(line)))
        except (ValueError, TypeError) as error:
            names = ", ".join(Question._fields)
            raise RunError(f"{path}:{number}: it is not a JSON object with {names} alone: {error}") from error
    if not found:
        raise RunError(f"{path}: there are no questions in this file")
    return found


def vectors(texts: Sequence[str], server: Server) -> list[list[float]]:
    """Returns the embedding of each text, minus the mean of all, with length 1.

    The mean says nothing about one text, and is most of each vector if the model was not trained for embeddings.
    """
    reply = server.post("/v1/embeddings", {"input": list(texts)}, "data")
    embedded = [one["embedding"] for one in reply["data"]]
    means = [sum(values) / len(values) for values in zip(*embedded, strict=True)]
    found = []
    for one in embedded:
        centred = [value - mean for value, mean in zip(one, means, strict=True)]
        length = math.hypot(*centred) or 1.0
        found.append([value / length for value in centred])
    return found


def word_weights(texts: Sequence[str]) -> list[dict[str, float]]:
    """Returns a vector of length 1 of each text's words: rare words weigh more (TF-IDF)."""
    words = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    n_texts_with = Counter(word for counts in words for word in counts)
    found = []
    for counts in words:
        weights = {word: n * math.log(1 + len(texts) / n_texts_with[word]) for word, n in counts.items()}
        length = math.hypot(*weights.values())
        found.append({word: weight / length for word, weight in weights.items()})
    return found


def similarities(
    documents: Sequence[str], questions: Sequence[str], embeddings: Server | None
) -> list[list[float]]:
    """Returns the cosine of each question with each document: of embeddings, or of words without a server."""
    if embeddings is not None:
        left, right = vectors(documents, embeddings), vectors(questions, embeddings)
        return [[sum(map(float.__mul__, one, other)) for other in left] for one in right]
    weighed = word_weights([*documents, *questions])
    left_words, right_words = weighed[: len(documents)], weighed[len(documents) :]
    return [
        [sum(n * other.get(word, 0.0) for word, n in one.items()) for other in left_words] for one in right_words
    ]


def retrieve(
    documents: Mapping[str, str],
    questions: Sequence[Question],
    top_k: int,
    embeddings: Server | None,
    reranker: Server | None,
) -> list[list[str]]:
    """Returns the ids of the ``top_k`` documents of each question, the best first."""
    ids = list(documents)
    found = []
    scores = similarities(list(documents.values()), [one.question for one in questions], embeddings)
    for question, row in zip(questions, scores, strict=True):
        best = [ids[index] for index in sorted(range(len(ids)), key=lambda index: -row[index])[:top_k]]
        if reranker is not None:
            body = {"query": question.question, "documents": [documents[one] for one in best]}
            results = reranker.post("/v1/rerank", body, "results")["results"]
            best = [best[one["index"]] for one in results]
        found.append(best)
    return found


def by_use(uses: Counter[str]) -> Callable[[str], tuple[int, str]]:
    """Returns the key that sorts documents by how many questions find them, the most frequent first."""
    return lambda one: (-uses[one], one)


def as_found(found: list[str], uses: Counter[str]) -> list[str]:
    """Returns the documents as the reranker or retriever ranks them."""
    return found


def by_id(found: list[str], uses: Counter[str]) -> list[str]:
    """Returns the same documents in the same order for all questions."""
    return sorted(found)


def frequent_first(found: list[str], uses: Counter[str]) -> list[str]:
    """Returns the documents that most questions find first."""
    return sorted(found, key=by_use(uses))


def same_first(found: list[str], uses: Counter[str]) -> list[str]:
    """Returns the most frequent document of all first, found or not, and the others as they are ranked."""
    first = min(uses, key=by_use(uses))
    return [first, *(one for one in found if one != first)]


ORDERS = {"found": as_found, "id": by_id, "frequent": frequent_first, "same-first": same_first}


def messages(documents: Mapping[str, str], ids: Sequence[str], question: str) -> list[dict[str, str]]:
    """Returns the chat: what all prompts share is first, what changes most is last."""
    system = "\n\n".join([INSTRUCTION, *(documents[one] for one in ids)])
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def ask_all(
    server: Server, documents: Mapping[str, str], questions: Sequence[Question], orders: Sequence[Sequence[str]]
) -> Totals:
    """Asks all questions, one after another, in a cache of their own: no other salt shares it."""
    totals, salt = Totals(), uuid.uuid4().hex
    for question, ids in zip(questions, orders, strict=True):
        chat = messages(documents, ids, question.question)
        body = {"messages": chat, "max_tokens": 32, "temperature": 0, "cache_salt": salt}
        reply = server.post("/v1/chat/completions", body, "choices", "usage")
        usage = reply["usage"]
        details = usage.get("prompt_tokens_details") or {}
        if "cached_tokens" not in details:
            raise RunError("the server's usage does not say how many tokens were cached (prompt_tokens_details)")
        totals.n_prompt += usage["prompt_tokens"]
        totals.n_cached += details["cached_tokens"]
        totals.n_by_source.update(details.get("cached_tokens_details") or {})
        totals.n_right += question.answer in (reply["choices"][0]["message"]["content"] or "")
    return totals


def n_repeated(sizes: Mapping[str, int], orders: Sequence[Sequence[str]]) -> int:
    """Returns how many tokens are in documents that an earlier prompt has too, at any place."""
    uses = Counter(one for ids in orders for one in ids)
    return sum(sizes[one] * (n - 1) for one, n in uses.items())


def show(rows: Mapping[str, tuple[Totals, int]], n_questions: int) -> None:
    """Prints the table: tokens of a prompt, and how many of them were cached, computed or repeated."""
    sources = sorted({source for totals, _ in rows.values() for source in totals.n_by_source})
    head = ["order", "prompt", "cached", "cached %", "computed", "repeated %", "right", *sources]
    print("  ".join(f"{name:>10}" for name in head))
    for name, (totals, repeated) in rows.items():
        cells = [
            name,
            f"{totals.n_prompt / n_questions:.0f}",
            f"{totals.n_cached / n_questions:.0f}",
            f"{100 * totals.n_cached / totals.n_prompt:.1f}",
            f"{(totals.n_prompt - totals.n_cached) / n_questions:.0f}",
            f"{100 * repeated / totals.n_prompt:.1f}",
            f"{totals.n_right}/{n_questions}",
            *(f"{totals.n_by_source[source] / n_questions:.0f}" for source in sources),
        ]
        print("  ".join(f"{cell:>10}" for cell in cells))


def positive(text: str) -> int:
    """Returns a number of at least 1. Raises ``ValueError``, which argparse reports."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def run(args: argparse.Namespace) -> None:
    """Finds documents, asks all questions in each order, and prints the table. Raises ``RunError``."""
    documents = read_documents(args.documents)
    questions = read_questions(args.questions)[: args.num_questions]
    server = Server(args.url, "the server", args.api_key)
    embeddings = Server(args.embeddings, "the server for embeddings", args.api_key) if args.embeddings else None
    reranker = Server(args.reranker, "the reranker", args.api_key) if args.reranker else None
    found = retrieve(documents, questions, args.top_k, embeddings, reranker)
    n_found = sum(question.document in ids for question, ids in zip(questions, found, strict=True))
    print(
        f"{len(documents)} documents, {args.top_k} in a prompt; the one with the answer is among them for ", end=""
    )
    print(f"{n_found} of {len(questions)} questions")
    print(f"{len(set(map(tuple, found)))} different lists, {len(set(map(frozenset, found)))} different sets\n")
    uses = Counter(one for ids in found for one in ids)
    sizes = {one: server.post("/tokenize", {"prompt": text}, "count")["count"] for one, text in documents.items()}
    rows = {}
    for name in args.orders:
        orders = [ORDERS[name](ids, uses) for ids in found]
        rows[name] = ask_all(server, documents, questions, orders), n_repeated(sizes, orders)
    show(rows, len(questions))


def main() -> int:
    """Returns 1 after an error, which is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server that answers, or its router")
    parser.add_argument(
        "--embeddings", metavar="URL", help="a server with --task embed (default: words are compared)"
    )
    parser.add_argument("--reranker", metavar="URL", help="a server with --task score (default: none)")
    parser.add_argument("--api-key", metavar="KEY", help="of all servers")
    parser.add_argument("--documents", type=Path, default=HERE / "documents", metavar="FOLDER", help="text files")
    parser.add_argument("--questions", type=Path, default=HERE / "questions.jsonl", metavar="FILE")
    parser.add_argument(
        "--num-questions", type=positive, metavar="N", help="ask only the first ones (default: all)"
    )
    parser.add_argument("--top-k", type=positive, default=4, metavar="K", help="documents in a prompt (default: 4)")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS), help="(default: all)")
    try:
        run(parser.parse_args())
    except (RunError, OSError, UnicodeDecodeError) as error:
        print(f"rag.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
