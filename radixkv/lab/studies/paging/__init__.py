"""Memory use of paged KV compared with contiguous reservation."""
