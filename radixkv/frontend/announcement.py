"""The lines that a server prints once it is ready."""

from __future__ import annotations

import socket

from radixkv.frontend.metrics.log import log_line
from radixkv.frontend.served_model import ServedModel


def announce(served_model: ServedModel, listener: socket.socket, *, needs_key: bool, n_replicas: int) -> None:
    """Prints what is served where, and logs warnings about the model.

    Args:
        served_model: what is served.
        listener: has the address.
        needs_key: whether clients must send a key.
        n_replicas: runtimes that serve it.
    """
    for line in served_model.warnings:
        log_line(line)
    host, port = listener.getsockname()[:2]
    ready = served_model.ready
    kv = f" with KV in {ready.kv_cache_dtype}" if ready.kv_cache_dtype else ""
    replicas = f", in each of {n_replicas} replicas" if n_replicas > 1 else ""
    here = _url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
    print(
        f"radixkv ready on {_url(host, port)} "
        f"(model {served_model.name}, {ready.n_pages} pages of {ready.page_size} tokens, "
        f"{ready.dtype}{kv} on {ready.devices}{replicas})\n"
        f"  the cache in a browser: {here}/ui\n"
        f"  a first request: {_first_request(served_model, here, needs_key=needs_key)}",
        flush=True,
    )


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _first_request(served_model: ServedModel, url: str, *, needs_key: bool) -> str:
    """Returns a command that asks the server for an answer, in a form that the model takes."""
    if served_model.task == "score":
        path, body = "rerank", '{"query": "Who lays eggs?", "documents": ["Hens lay eggs.", "Cows give milk."]}'
    elif served_model.task == "embed":
        path = "embeddings"
        body = '{"input": [1, 2, 3]}' if served_model.tokenizer is None else '{"input": "Hens lay eggs."}'
    elif served_model.tokenizer is None:
        path, body = "completions", '{"prompt": [1, 2, 3]}'
    elif served_model.chat_template is None:
        path, body = "completions", '{"prompt": "The capital of France is"}'
    else:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is 41 plus 11?"}]}'
    key = ' -H "Authorization: Bearer $RADIXKV_API_KEY"' if needs_key else ""
    glob = "-g " if "[" in url else ""  # curl would take the brackets of an IPv6 address for a range
    return f"curl -s {glob}{url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'"
