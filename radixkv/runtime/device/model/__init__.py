"""Decoder models of the supported checkpoints."""
