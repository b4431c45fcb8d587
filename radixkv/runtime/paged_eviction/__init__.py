"""Answers that read a bounded part of their KV: pages of low scores are dropped while a request runs."""
