"""Replicas: several runtimes behind one server, each with a cache of its own (``--data-parallel-size``)."""
