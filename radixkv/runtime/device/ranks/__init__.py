"""A model that several ranks compute together: rank 0 plans and samples, and all execute its plans."""
