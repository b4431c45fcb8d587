"""Cache events: which pages each tier has, for routers."""
