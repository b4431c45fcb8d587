"""The runtime process: scheduler, page cache and device."""
