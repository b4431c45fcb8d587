"""Pauses between turns: conversations are kept by how soon their tools or their users are expected to come back."""
