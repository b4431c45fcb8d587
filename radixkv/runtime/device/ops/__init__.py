"""Numerical building blocks of the decoder."""
