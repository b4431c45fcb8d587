"""The duration of runs that end early."""

from support.loads import send


def test_the_duration_excludes_the_wait_for_a_server_that_hangs(fake):
    fake.hangs_at = 6
    measurement = send(fake.address, [f"prompt {n}" for n in range(9)], silence_limit_s=3.0, max_concurrency=1)
    assert "has stopped answering" in measurement.aborted
    good = [record for record in measurement.records if record.error is None]
    assert len(good) == 5
    last_answer = max(record.started + record.latency for record in good) - measurement.started
    assert last_answer <= measurement.duration < last_answer + 2.0
