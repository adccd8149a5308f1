"""Demo: agents answer questions about a small shop, for `afield demo`."""
