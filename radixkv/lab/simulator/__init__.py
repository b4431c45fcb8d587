"""Replays of recorded requests on the production scheduler, page pool and radix tree, without a model."""
