"""Adapters that come and go while the loop runs."""
