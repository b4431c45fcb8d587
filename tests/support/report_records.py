"""Records of requests as tests of the reports write them."""

from array import array

from radixkv.bench.load.chunks import PromptTokensDetails, Usage
from radixkv.bench.load.record import Answer, Measurement, Record
from radixkv.bench.report.run_metrics import figures


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
    """A request that succeeded. ``more`` has arrivals and token ids of further choices; ``late`` is by how much an
    open loop sent it too late."""
    choices = [(arrivals, output), *more]
    n_output = sum(len(ids) for _, ids in choices)
    return Record(
        started=started,
        scheduled=None if late is None else started - late,
        answers=[
            Answer(token_ids=list(ids) if returns_ids else None, arrivals=list(times)) for times, ids in choices
        ],
        usage=Usage(len(prompt), n_output, None if cached is None else PromptTokensDetails(cached)),
        prompt_token_ids=array("i", prompt) if returns_ids else None,
        is_right=right,
    )


def failed(kind, started=0.0, prompt=None):
    ids = None if prompt is None else array("i", prompt)
    return Record(started=started, error=f"it broke: {kind}", error_kind=kind, prompt_token_ids=ids)


def line(measurement, cache="on", **keys):
    """What goes into the JSON line of a run, and what that has besides."""
    extra = {
        "workload": "fewshot",
        "cache": cache,
        "cache_flushed": True,
        "max_concurrency": 8,
        "request_rate": "inf",
    }
    return extra | figures(measurement) | keys


def measured(*records, duration=2.0, **keys):
    return Measurement(list(records), duration, **keys)
