"""Request records and result lines for tests of the reports."""

from array import array

from radixkv.client.chunks import PromptTokensDetails, Usage
from radixkv.lab.bench.load.record import ChoiceRecord, Measurement, Record
from radixkv.lab.bench.report.run_metrics import run_metrics


def record(
    arrivals,
    prompt=(1, 2, 3, 4),
    output=(7, 8),
    *,
    cached=0,
    started=0.0,
    late=None,
    right=None,
    more=(),
    returns_ids=True,
):
    """Returns the record of a request that succeeded.

    ``more`` has arrivals and token ids of further choices; ``late`` is the lateness in an open loop.
    """
    answers = [(arrivals, output), *more]
    n_output = sum(len(ids) for _, ids in answers)
    return Record(
        started=started,
        scheduled=None if late is None else started - late,
        choices=[
            ChoiceRecord(token_ids=list(ids) if returns_ids else None, arrivals=list(times))
            for times, ids in answers
        ],
        usage=Usage(len(prompt), n_output, None if cached is None else PromptTokensDetails(cached)),
        prompt_token_ids=array("i", prompt) if returns_ids else None,
        is_correct=right,
    )


def failed(kind, started=0.0, prompt=None):
    """Returns the record of a request that failed."""
    ids = None if prompt is None else array("i", prompt)
    return Record(started=started, error=f"it broke: {kind}", error_kind=kind, prompt_token_ids=ids)


def line(measurement, cache="on", **keys):
    """Returns a result line with the measurement's metrics, some parameters and ``keys``."""
    extra = {
        "workload": "fewshot",
        "cache": cache,
        "cache_flushed": True,
        "max_concurrency": 8,
        "request_rate": "inf",
    }
    return extra | run_metrics(measurement) | keys


def measured(*records, duration=2.0, **keys):
    """Returns a measurement of these records."""
    return Measurement(list(records), duration, **keys)
