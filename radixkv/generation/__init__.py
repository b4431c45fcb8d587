"""What the server and ``LLM`` share: from a prompt to ``Submit``, and from tokens to an answer."""
