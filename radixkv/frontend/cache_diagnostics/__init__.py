"""Cache diagnostics: what has changed since an earlier request of the same client, in no API's words."""
