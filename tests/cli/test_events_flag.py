"""The flag ``--kv-events-config``."""

from __future__ import annotations

import json

import pytest

from radixkv.cli.serve import add as add_serve
from radixkv.settings.kv_events import KVEventsConfig
from support.flags import command, refused


def events_of(*flags: str) -> KVEventsConfig | None:
    config: KVEventsConfig | None = command(add_serve, "serve", *flags).kv_events
    return config


def test_events_are_configured_as_in_vllm_and_sglang() -> None:
    assert events_of() is None
    assert events_of("--kv-events-config", '{"enable_kv_cache_events": true}') == KVEventsConfig()
    whole = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:6000",
        "replay_endpoint": "tcp://[::1]:6001",
        "buffer_steps": 10,
        "hwm": 20,
        "max_queue_size": 30,
        "topic": "kv",
    }
    expected = KVEventsConfig("tcp://127.0.0.1:6000", "tcp://[::1]:6001", 10, 20, "kv")
    assert events_of("--kv-events-config", json.dumps(whole)) == expected
    assert events_of("--kv-events-config", '{"publisher": "zmq", "topic": "kv"}') == KVEventsConfig(topic="kv")
    for off in ('{"publisher": "null"}', '{"enable_kv_cache_events": false, "publisher": "zmq"}'):
        assert events_of("--kv-events-config", off) is None
    remote = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "allow_remote": true}'
    assert events_of("--kv-events-config", remote) == KVEventsConfig("tcp://*:5557", allow_remote=True)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("no JSON", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("{}", "enable_kv_cache_events"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events 1"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"publisher": "zmq", "end_point": "x"}', "end_point"),
        ('{"publisher": "zmq", "endpoint": "tcp://*:5557"}', "allow_remote"),
        ('{"publisher": "zmq", "endpoint": "tcp://0.0.0.0:5557"}', "allow_remote"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://[::]:5557"}', "replay_endpoint"),
        ('{"publisher": "zmq", "endpoint": "tcp://router.example:5557"}', "not looked up"),
        ('{"publisher": "zmq", "endpoint": "tcp://127.0.0.1"}', "no endpoint"),
        ('{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0"}', "no endpoint"),
        ('{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:65536"}', "no endpoint"),
        ('{"publisher": "zmq", "endpoint": "inproc://x"}', "no endpoint"),
        ('{"publisher": "zmq", "endpoint": "ipc://"}', "no endpoint"),
        ('{"publisher": "zmq", "endpoint": "ipc://*"}', "no endpoint"),
        ('{"publisher": "zmq", "endpoint": "ipc:///tmp/a\\u0000b"}', "no endpoint"),
        ('{"publisher": "zmq", "endpoint": 5557}', "no endpoint"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://127.0.0.1:5557"}', "another"),
        ('{"publisher": "zmq", "buffer_steps": 0}', "buffer_steps"),
        ('{"publisher": "zmq", "hwm": 0}', "hwm"),
        ('{"publisher": "zmq", "hwm": "many"}', "hwm"),
        ('{"publisher": "zmq", "topic": 1}', "topic"),
        ('{"publisher": "zmq", "allow_remote": "yes"}', "allow_remote"),
        ('{"publisher": "zmq", "salted_token_ids": 1}', "salted_token_ids"),
    ],
)
def test_wrong_configurations_of_events_are_refused(
    capsys: pytest.CaptureFixture[str], text: str, part: str
) -> None:
    assert part in refused(capsys, command, add_serve, "serve", "--kv-events-config", text)


def test_events_without_a_prefix_cache_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--kv-events-config", '{"publisher": "zmq"}', "--no-enable-prefix-caching"
    args = command(add_serve, "serve", *flags)
    assert "enable_prefix_caching" in refused(capsys, args.run, args)
