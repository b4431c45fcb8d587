"""Memory tiers behind the KV pool: host memory, disk and stores that servers share."""
