"""Scores: ``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``."""
