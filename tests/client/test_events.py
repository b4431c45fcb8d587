import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from radixkv.client.events import EventReader
from support.cases import examples


def read(pieces):
    reader = EventReader()
    result = [data for piece in pieces for data in reader.push(piece)]
    return result, list(reader.finish())


texts = st.text(alphabet=st.sampled_from("aé\u2028\u0085\x0b😀 :\\"), max_size=8)


@examples(200)
@given(
    st.lists(texts, max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_events_do_not_depend_on_the_split_of_the_bytes(values, newline, comments, cuts):
    events = [json.dumps({"text": value}, ensure_ascii=False) for value in values]
    noise = f": ping{newline}event: message{newline}" if comments else ""
    stream = "".join(f"{noise}data: {event}{newline}{newline}" for event in events).encode()
    offsets = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    result, left = read([stream[a:b] for a, b in itertools.pairwise(offsets)])
    assert [data.decode() for data in result + left] == events


def test_an_event_is_complete_with_its_blank_line():
    reader = EventReader()
    assert list(reader.push(b"data: one\n")) == []
    assert list(reader.push(b"\ndata: tw")) == [b"one"]
    assert list(reader.push(b"o\r\n\r")) == []
    assert list(reader.push(b"\n")) == [b"two"]


def test_data_lines_of_one_event_are_joined_and_only_one_space_is_dropped():
    assert read([b"data:a\ndata:  b\nid: 3\n\n"]) == ([b"a\n b"], [])


def test_an_event_without_its_blank_line_is_read_at_the_end():
    assert read([b"data: [DONE]"]) == ([], [b"[DONE]"])
    assert read([b"data: [DONE]\r\n"]) == ([], [b"[DONE]"])
    assert read([b"data: x\n\n"]) == ([b"x"], [])


def test_an_event_that_ends_in_a_single_cr_is_complete_with_the_next_piece():
    reader = EventReader()
    assert list(reader.push(b"data: one\r\r")) == []  # an LF may follow
    assert list(reader.push(b"data: tw")) == [b"one"]
