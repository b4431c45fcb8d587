"""OpenAI's ``/v1/embeddings``."""
