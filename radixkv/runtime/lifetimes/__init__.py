"""What a client says of how long KV is needed: sessions that end, prompts that are pinned."""
