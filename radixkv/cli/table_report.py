"""The block table of a running request as text, as the literature draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

_NOTHING = "-"


class Page(msgspec.Struct):
    """An entry of a block table."""

    logical: int
    physical: int | None
    filled: int
    kind: str
    references: int
    tier: str | None
    slot: int | None = None
    window_page: int | None = None
    state_slot: int | None = None


class Choice(msgspec.Struct):
    """A choice of a request, with its block table."""

    index: int
    phase: str
    prompt_tokens: int
    tokens: int
    pages: int
    in_tree: int
    shared: int
    own: int
    table: list[Page]
    waits_for: str | None = None
    freed: int = 0
    skipped: int = 0
    window_pages: int = 0
    batch_slot: int | None = None


class RunningRequest(msgspec.Struct):
    """A prompt that a runtime works on."""

    id: str
    choices: list[Choice]
    request_id: str = ""
    replica: int | None = None


class TablesResponse(msgspec.Struct):
    """The response of ``/cache/tables`` for one request."""

    page_size: int
    requests: list[RunningRequest]
    more: int = 0


def table_lines(response: TablesResponse) -> list[str]:
    """Returns the lines that show the block table of each choice. O(entries)."""
    lines: list[str] = []
    for request in response.requests:
        where = "" if request.replica is None else f" in replica {request.replica}"
        lines.append(f"request {request.id}{where}, {response.page_size} tokens a page")
        for choice in request.choices:
            lines.append(_summary(choice))
            if choice.table:
                lines += _aligned(_rows(choice.table, response.page_size))
            if (n_more := choice.pages - len(choice.table)) > 0 and choice.table:
                lines.append(f"  {_count(n_more, 'further page')} not shown")
    if response.more:
        lines.append(f"{_count(response.more, 'further prompt')} of this request not shown")
    return lines


def _summary(choice: Choice) -> str:
    parts = [f"{_count(choice.tokens, 'token')}, {choice.prompt_tokens:,} of the prompt"]
    if choice.waits_for is not None:
        parts.append(f"it waits for {choice.waits_for}")
    parts.append(
        f"{_count(choice.pages, 'page')}: {choice.in_tree:,} in the tree, {choice.shared:,} of these shared "
        f"with other block tables, {choice.own:,} own"
    )
    if choice.freed:
        parts.append(f"{choice.freed:,} freed")
    if choice.skipped:
        parts.append(f"{choice.skipped:,} of those in the tree not read, as its kv_budget asks")
    if choice.window_pages:
        parts.append(_count(choice.window_pages, "window page"))
    if choice.batch_slot is not None:
        parts.append(f"batch slot {choice.batch_slot}")
    return f"choice {choice.index}, {choice.phase}: {'; '.join(parts)}"


def _rows(table: Sequence[Page], page_size: int) -> list[list[str]]:
    """Returns the rows with their head, without columns that have nothing to say."""
    columns = {
        "logical": [str(page.logical) for page in table],
        "physical": [_number(page.physical) for page in table],
        "filled": [f"{page.filled}/{page_size}" for page in table],
        "references": [str(page.references) for page in table],
        "tier": [page.tier or _NOTHING for page in table],
        "page": [page.kind for page in table],
    }
    optional = {
        "host slot": [_number(page.slot) for page in table],
        "window page": [_number(page.window_page) for page in table],
        "state slot": [_number(page.state_slot) for page in table],
    }
    columns |= {name: cells for name, cells in optional.items() if set(cells) != {_NOTHING}}
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def _number(number: int | None) -> str:
    return _NOTHING if number is None else str(number)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yields the rows with columns of one width each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
