"""The page ``/ui`` in a headless Chromium, on real servers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.chromium import Tab, open_tab
from support.live import LiveServer, serving
from support.paths import ROOT

pytestmark = pytest.mark.ui

TINY = ROOT / "radixkv" / "checkpoints" / "tiny"
FACT = "The cafe in Mill Street opens at 10:15. The dress of Kenji is green. The bus to the harbour leaves at noon."
HAS_TREE = "document.querySelectorAll('#icicle rect').length > 2"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a host tier that several requests have filled."""
    with serving(TINY, tmp_path_factory.mktemp("s") / "errors", "--host-memory", "16MiB") as live:
        fill(live)
        yield live


@pytest.fixture(scope="session")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a key, which therefore shows no contents."""
    with serving(TINY, tmp_path_factory.mktemp("s") / "errors", key="the-key") as live:
        fill(live)
        yield live


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with open_tab(tmp_path) as tab:
        yield tab
        assert tab.problems == []


def fill(live: LiveServer) -> None:
    questions = ["When does the cafe open?", "Which dress is green?", "When does the bus leave?"]
    for question in questions:
        for salt in ("", "a-secret-salt"):
            prompt = f"{FACT * 4} Question: {question} Answer:"
            live.complete(prompt=prompt, max_tokens=20, temperature=0, cache_salt=salt)


def text(tab: Tab, place: str) -> str:
    shown: str = tab.value(f"document.querySelector('{place}').innerText")
    return shown


def open_page(tab: Tab, server: LiveServer, width: int = 1200, *, dark: bool = False) -> None:
    tab.show(width, dark=dark)
    tab.open(f"{server.base_url}/ui")
    tab.wait("!!document.getElementById('state')")


def test_the_page_shows_the_tree_and_follows_it(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    assert tab.value("document.getElementById('state').innerText") == "live"
    assert "The cafe in Mill" in text(tab, "#icicle")
    tab.wait("latest.joint.nodes.every(node => String(node.tiers) === 'device,host')")
    before = tab.value("latest.tiers.device.pages")
    server.complete(prompt="Something else that is new and fills more than a page of the cache, I hope." * 2)
    tab.wait(f"latest.tiers.device.pages > {before}")
    assert server.http.get("/cache/tree").json()["tiers"]["device"]["pages"] == tab.value(
        "latest.tiers.device.pages"
    )


def test_accepted_drafts_are_beside_the_hit_rate(tab: Tab, server: LiveServer, tmp_path: Path) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    assert "Drafts" not in text(tab, "#tiles")
    config = '{"method": "tree", "num_speculative_tokens": 4}'
    with serving(TINY, tmp_path / "errors", "--speculative-config", config) as drafting:
        open_page(tab, drafting)
        tab.wait("document.querySelectorAll('#tiles .tile').length > 1")
        second = "#tiles .tile:nth-child(2)"
        assert text(tab, second).splitlines()[0] == "Drafts accepted, last 10 s"
        list_of_items = "".join(f"- item {n}: pears, plums, and {n} figs;\n" for n in range(6))
        drafting.complete(prompt=list_of_items * 2, max_tokens=80, temperature=0, ignore_eos=True)
        tab.wait("latest.totals.accepted_tokens > 0")
        counts = tab.value("latest.totals")
        tab.wait(f"document.querySelector('{second}').innerText.includes('%')")
        share = f"{100 * counts['accepted_tokens'] / counts['draft_tokens']:.1f}%"
        assert text(tab, second).splitlines()[1:] == [share, f"{share} since start"]


def test_device_and_host_are_one_tree_and_marks_tell_the_tiers(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    bars, runs = tab.value(
        "[document.querySelectorAll('#icicle g rect.mark').length,"
        " latest.joint.nodes.filter(node => node.parent >= 0).length]"
    )
    assert 0 < bars <= runs
    assert tab.value("latest.joint.pages") == tab.value("latest.tiers.device.pages"), "what both have counts once"
    assert {"device only", "device and host", "host only"} <= set(text(tab, "#legend").split("\n"))
    tab.value(
        "const sets = [['device'], ['host'], ['device', 'host']];"
        "latest.joint.nodes.forEach((node, index) => (node.tiers = sets[index % 3])); showTree()"
    )
    marks = tab.value(
        "Object.fromEntries([...document.querySelectorAll('#icicle g')].filter(g => g.querySelector('.mark'))"
        ".map(g => [/ in (device and host|device|host) ·/.exec(g.getAttribute('aria-label'))[1],"
        " g.querySelector('.mark').style.fill]))"
    )
    assert len(set(marks.values())) == len(marks) == 3


def test_the_trees_of_replicas_are_told_apart(tab: Tab, tmp_path: Path) -> None:
    with serving(TINY, tmp_path / "errors", "--data-parallel-size", "2") as live:
        live.complete(prompt=FACT * 4, max_tokens=2)
        open_page(tab, live)
        tab.wait("!!latest && blocks(latest).children.length === 1")
        roots = tab.value("blocks(latest).children.map(block => block.name)")
        assert roots in (["replica 0, no salt"], ["replica 1, no salt"]), "the other one is empty"
        assert roots[0] in text(tab, "#icicle")
        for n in range(8):
            live.complete(prompt=f"{n} {FACT}" * 4, max_tokens=2)
        tab.wait("blocks(latest).children.length === 2")
        names = "[...document.querySelectorAll('#icicle text')].map(each => each.textContent)"
        roots = [name for name in tab.value(names) if name.startswith("replica")]
        assert roots == ["replica 0, no salt", "replica 1, no salt"]


def test_bars_are_as_wide_as_their_pages(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    widths = tab.value(
        "[...document.querySelectorAll('#icicle rect:not(.mark)')].filter(bar => bar.y.baseVal.value === 0)"
        ".map(bar => bar.width.baseVal.value)"
    )
    roots = tab.value("latest.joint.nodes.filter(node => node.parent < 0).map(node => node.pages)")
    assert sorted(width / sum(widths) for width in widths) == pytest.approx(
        sorted(pages / sum(roots) for pages in roots), rel=0.01
    )


def click(tab: Tab, index: int) -> str:
    """Clicks a bar; returns what its label says."""
    bar = f"document.querySelectorAll('#icicle g')[{index}]"
    label: str = tab.value(f"{bar}.getAttribute('aria-label')")
    tab.value(f"{bar}.dispatchEvent(new MouseEvent('click'))")
    return label


def test_the_text_describes_the_selected_bar_whatever_the_mouse_is_over(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    for index in (2, 1):
        label = click(tab, index)
        tab.value(
            "for (const bar of document.querySelectorAll('#icicle g'))"
            " bar.dispatchEvent(new PointerEvent('pointerenter'))"
        )
        selected = "document.querySelectorAll('#icicle g.selected')"
        assert tab.value(f"{selected}.length") == 1
        assert tab.value(f"{selected}[0].getAttribute('aria-label')") == text(tab, "#detail").split("\n")[-1]
        assert label.split(" · ")[:2] == text(tab, "#detail").split("\n")[-1].split(" · ")[:2]
        tab.value("zoom('')")


def test_the_last_use_is_told_in_seconds(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    server.complete(prompt=f"{FACT * 4} Question: When does the cafe open? Answer:", max_tokens=1, temperature=0)
    tab.wait("latest.joint.nodes.some(node => node.idle_seconds < 3)")
    click(tab, 1)
    assert "s ago" in text(tab, "#detail")
    assert "uses" not in tab.value("document.body.innerText + document.getElementById('largest').innerText")


def test_bars_are_reached_with_the_keyboard(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    focused = "document.activeElement.getAttribute('aria-label')"

    def press(key: str) -> str:
        tab.value(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        label: str = tab.value(focused)
        return label

    assert tab.value("document.querySelectorAll('#icicle g[tabindex=\"0\"]').length") == 1
    tab.value("document.querySelector('#icicle g[tabindex=\"0\"]').focus()")
    first = tab.value(focused)
    below = press("ArrowDown")
    assert below != first
    assert below == text(tab, "#detail").split("\n")[-1]
    assert press("ArrowUp").split(" · ")[0] == first.split(" · ")[0]
    press("ArrowDown")
    press("Enter")
    assert tab.value("document.querySelectorAll('#path button').length") >= 1, "zoomed"
    tab.value("showTree()")
    assert tab.value("document.activeElement.tagName") == "g", "a new snapshot keeps the focus"
    press("Escape")
    assert tab.value("document.querySelectorAll('#path button').length") == 0


def test_a_bar_zooms_and_the_path_leads_back(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    n_bars = tab.value("document.querySelectorAll('#icicle g').length")
    click(tab, 1)
    assert text(tab, "#path").startswith("Everything cached")
    assert tab.value("document.querySelectorAll('#icicle g').length") < n_bars
    tab.value("document.querySelector('#path button').click()")
    assert tab.value("document.querySelectorAll('#icicle g').length") == n_bars


def test_a_column_that_says_nothing_is_not_shown(tab: Tab, server: LiveServer, guarded_server: LiveServer) -> None:
    columns = "[...document.querySelectorAll('#largest th')].map(cell => cell.textContent)"
    open_page(tab, server)
    tab.wait(HAS_TREE)
    assert tab.value(columns) == ["Run", "Tiers", "Pages", "Own", "Last use", "cache_salt"], "lru counts no hits"
    tab.value(
        "latest = {...latest, joint: undefined, tiers: {device: {...latest.tiers.device, nodes:"
        " latest.tiers.device.nodes.map(node => ({...node, hits: 3, namespace: ''}))}}}; showTree()"
    )
    assert tab.value(columns) == ["Run", "Pages", "Own", "Last use", "Hits"]


def test_numbers_fade_while_the_server_is_silent_and_come_back(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    opacity = "getComputedStyle(document.getElementById('tiles')).opacity"
    assert tab.value(opacity) == "1"
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        tab.wait("document.getElementById('state').className === 'lost'")
        assert float(tab.value(opacity)) < 1
        assert "numbers of" in text(tab, "#state")
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    tab.wait("document.getElementById('state').className === 'live'")
    assert tab.value(opacity) == "1"


def test_numbers_fade_when_the_server_is_gone(tab: Tab, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(TINY, tmp_path_factory.mktemp("s") / "errors") as live:
        fill(live)
        open_page(tab, live)
        tab.wait(HAS_TREE)
        live.process.terminate()
        live.process.wait(30)
        tab.wait("document.getElementById('state').className === 'lost'")
        assert tab.value("document.getElementById('main').classList.contains('stale')")
    tab.problems.clear()  # the browser reports each connection that is refused


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": FACT, "max_tokens": 1},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "system", "content": FACT}, {"role": "user", "content": "When?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        "max_tokens": 1,
    },
    "/v1/messages": {
        "model": "tiny",
        "system": FACT,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "max_tokens": 1,
    },
    "/v1/responses": {"model": "tiny", "instructions": FACT, "input": "Who?", "max_output_tokens": 1},
    "/generate": {"text": f"{FACT} Which?", "sampling_params": {"max_new_tokens": 1}},
}


def explained(tab: Tab, given: str, *, kind: str = "any") -> list[str]:
    """Explains what is given; returns the sentences."""
    tab.value("document.getElementById('explained').replaceChildren()")
    tab.value(
        f"document.getElementById('explain-text').value = {json.dumps(given)};"
        f"document.getElementById('explain-kind').value = '{kind}';"
        "document.querySelector('#explain-form button').click()"
    )
    tab.wait("document.getElementById('explained').children.length > 0")
    sentences: list[str] = tab.value(
        "[...document.querySelectorAll('#explained > p:not(.hint)')].map(node => node.textContent)"
    )
    return sentences


@pytest.mark.parametrize("path", BODIES)
def test_the_body_of_a_request_is_explained_as_the_server_reads_it(tab: Tab, server: LiveServer, path: str) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != "model"}
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    usage = reply.json().get("usage") or reply.json()["meta_info"]
    n_prompt = sum(usage.get(name, 0) for name in ("prompt_tokens", "input_tokens", "cache_creation_input_tokens"))
    n_prompt += usage.get("cache_read_input_tokens", 0)
    open_page(tab, server)
    tab.wait(HAS_TREE)
    (sentence,) = explained(tab, json.dumps(BODIES[path], indent=2))
    n_cached, _, n_tokens, *_ = sentence.split()
    assert int(n_tokens) == n_prompt
    assert int(n_cached) >= n_prompt - 16
    assert FACT in tab.value("document.querySelector('#explained .text').textContent")


def test_several_requests_are_explained_and_what_is_none_says_so(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    lines = [
        {"prompt": [FACT, "Something else"]},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODIES["/v1/chat/completions"]},
        {"prompt_token_ids": [5, 6, 7]},
    ]
    found = explained(tab, "\n".join(map(json.dumps, lines)))
    assert [sentence.split(": ")[0] for sentence in found] == ["Line 1", "Line 1", "Line 2", "Line 3"]
    (sentence,) = explained(tab, json.dumps([{"role": "user", "content": "Hi"}]))
    assert "prompt tokens are cached" in sentence
    for given, said in (
        ('{"prompt": "a"', "JSON"),
        ('{"prompt": "a"}\n{"prompt": ', "Line 2"),
        ('{"temperature": 0}', "messages"),
        ('{"prompt": "a", "cache_salt": 5}', "cache_salt"),
        ('{"messages": [null]}', "messages[0]"),
    ):
        (sentence,) = explained(tab, given)
        assert said in sentence
        assert tab.value("!!document.querySelector('#explained .error')")
    (sentence,) = explained(tab, '{"prompt": "a"', kind="text")
    assert "prompt tokens are cached" in sentence
    tab.problems.clear()  # the browser reports the 400


@pytest.mark.parametrize("colouring", ["heat", "tier", "namespace"])
def test_every_colouring_paints_all_bars_and_no_salt_is_shown(tab: Tab, server: LiveServer, colouring: str) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    tab.value(
        f"document.getElementById('colouring').value = '{colouring}';"
        "document.getElementById('colouring').dispatchEvent(new Event('change'))"
    )
    assert not tab.value("!document.getElementById('no-contents').hidden"), "contents are shown"
    fills = tab.value("[...document.querySelectorAll('#icicle rect')].map(bar => getComputedStyle(bar).fill)")
    assert "rgb(0, 0, 0)" not in fills, "the fill of a colour that does not exist"
    assert "secret" not in tab.value("document.documentElement.outerHTML + JSON.stringify(latest)")


def test_an_explanation_marks_the_first_token_that_differs(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    prompt = FACT.replace("Kenji", "Oliver")
    tab.value(
        f"document.getElementById('explain-text').value = {prompt!r};"
        "document.querySelector('#explain-form button').click()"
    )
    tab.wait("!!document.querySelector('#explained mark')")
    explained = server.http.post("/cache/explain", json={"prompt": prompt}).json()
    ids = server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]

    def decoded(start: int, end: int) -> str:
        text: str = server.http.post("/detokenize", json={"tokens": ids[start:end]}).json()["prompt"]
        return text

    position, n_cached = explained["first_difference"]["position"], explained["cached_tokens"]
    assert 0 < n_cached <= position
    spans = "[...document.querySelector('#explained .text').childNodes].map(node => node.textContent)"
    parts = [(0, n_cached), (n_cached, position), (position, position + 1), (position + 1, len(ids))]
    assert tab.value(spans) == [decoded(start, end) for start, end in parts if start < end]
    assert decoded(0, position).endswith("The dress of")


def test_the_doctor_lists_what_it_found(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait("document.querySelectorAll('#doctor li').length > 0")
    report = server.http.get("/cache/doctor").json()
    assert text(tab, "#doctor-summary") == report["text"]


@contextmanager
def running(live: LiveServer, request_id: str, **body: Any) -> Iterator[None]:
    """Streams an answer that goes on."""
    body = {"prompt": FACT * 4, "max_tokens": 4000, "ignore_eos": True, "stream": True, **body}
    with live.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": request_id}) as reply:
        for _ in reply.iter_lines():
            yield
            return


def test_the_block_table_of_a_chosen_request_is_drawn(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    tab.value("document.getElementById('tables').open = true")
    tab.wait("document.getElementById('table-request').innerText.includes('choose one of 0')")
    options = "[...document.querySelectorAll('#table-request option')]"
    with running(server, "one"), running(server, "two", n=2):
        tab.wait(f"{options}.filter(each => /^(one|two): running/.test(each.textContent)).length === 2")
        tab.value(
            f"const option = {options}.find(each => each.textContent.startsWith('two'));"
            "document.getElementById('table-request').value = option.value;"
            "document.getElementById('table-request').dispatchEvent(new Event('change'))"
        )
        tab.wait("document.querySelectorAll('#table table').length === 2")
        columns = tab.value(
            "[...document.querySelectorAll('#table table:first-child th')].map(each => each.textContent)"
        )
        assert columns[:6] == ["Logical page", "Physical page", "Filled", "References", "Tier", "Page"]
        first_rows = (
            "[...document.querySelectorAll('#table table')].map(table =>"
            " [...table.tBodies[0].rows[0].cells].map(cell => cell.textContent))"
        )
        rows = tab.value(first_rows)
        assert rows[0] == rows[1], "both choices begin with the prompt's first page"
        assert rows[0][2:] == ["16 of 16", "3", "device", "shared"]
        assert "Choice 1, running" in text(tab, "#table")
        assert "two: running" in tab.value(
            "document.getElementById('table-request').selectedOptions[0].textContent"
        )
    tab.wait("document.getElementById('table-note').textContent.includes('it has ended')")
    assert tab.value("document.querySelectorAll('#table table').length") == 2, "the last table stays"
    assert "has ended" in tab.value("document.getElementById('table-request').selectedOptions[0].textContent")
    tab.problems.clear()  # the browser reports the 404


def test_a_page_that_is_hidden_closes_its_stream(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    tab.value(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    assert text(tab, "#state") == "paused"
    tab.value("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    tab.wait("document.getElementById('state').innerText === 'live'")


def test_a_server_with_a_key_is_asked_for_it_and_shows_no_contents(tab: Tab, guarded_server: LiveServer) -> None:
    open_page(tab, guarded_server)
    tab.wait("!document.getElementById('key-form').hidden")
    assert tab.value("document.getElementById('main').hidden")
    for key, shown in (("wrong", "document.getElementById('key-error').innerText !== ''"), ("the-key", HAS_TREE)):
        tab.value(
            f"document.getElementById('key').value = '{key}'; document.querySelector('#key-form button').click()"
        )
        tab.wait(shown)
    assert tab.value("document.getElementById('key-form').hidden")
    assert "--explain-contents" in text(tab, "#no-contents")
    assert "cafe" not in tab.value("document.documentElement.innerHTML + JSON.stringify(latest)")
    tab.problems.clear()  # the browser reports each 401


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_fits_and_its_picture_is_taken(
    tab: Tab, server: LiveServer, width: int, dark: bool, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    open_page(tab, server, width, dark=dark)
    tab.wait(HAS_TREE)
    tab.wait("document.querySelectorAll('#doctor li').length > 0")
    assert tab.value(OVERFLOW) <= 0, "nothing is wider than the screen"
    folder = pytestconfig.getoption("screenshots", default=None) or tmp_path
    Path(folder).mkdir(parents=True, exist_ok=True)
    tab.screenshot(Path(folder) / f"ui-{width}-{'dark' if dark else 'light'}.png")
    background = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 300) == dark
