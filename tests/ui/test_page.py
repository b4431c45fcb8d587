"""The page ``/ui`` in a headless Chromium, on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
    drawn = text(tab, "#icicle")
    assert "device" in drawn
    assert "host" in drawn
    assert "The cafe in Mill" in drawn
    before = tab.value("latest.tiers.device.pages")
    server.complete(prompt="Something else that is new and fills more than a page of the cache, I hope." * 2)
    tab.wait(f"latest.tiers.device.pages > {before}")
    assert server.http.get("/cache/tree").json()["tiers"]["device"]["pages"] == tab.value(
        "latest.tiers.device.pages"
    )


def test_bars_are_as_wide_as_their_pages(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    device, host = tab.value(
        "[...document.querySelectorAll('#icicle rect')].filter(bar => bar.y.baseVal.value === 0)"
        ".map(bar => bar.width.baseVal.value)"
    )
    n_device, n_host = tab.value("[latest.tiers.device.pages, latest.tiers.host.pages]")
    assert device / host == pytest.approx(n_device / n_host, rel=0.01)


def test_a_bar_zooms_and_the_path_leads_back(tab: Tab, server: LiveServer) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    tab.value("document.querySelector('#icicle g').dispatchEvent(new MouseEvent('click'))")
    assert text(tab, "#path").startswith("All tiers")
    assert "device" in text(tab, "#path")
    assert "host" not in text(tab, "#icicle")
    tab.value("document.querySelector('#path button').click()")
    assert "host" in text(tab, "#icicle")


@pytest.mark.parametrize("colouring", ["heat", "tier", "namespace"])
def test_every_colouring_paints_all_bars_and_no_salt_is_shown(tab: Tab, server: LiveServer, colouring: str) -> None:
    open_page(tab, server)
    tab.wait(HAS_TREE)
    tab.value(
        f"document.getElementById('colouring').value = '{colouring}';"
        "document.getElementById('colouring').dispatchEvent(new Event('change'))"
    )
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
    assert "cafe" not in tab.value("document.documentElement.innerHTML + JSON.stringify(latest)")
    tab.problems.clear()  # the browser reports each 401


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 380])
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
