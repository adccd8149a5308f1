"""The gateway: agents speak their dialect to it, it speaks token ids to an engine, and keeps both.

From the outside in: `app` (HTTP) -> `dialects` (one per API) -> `calls` (one model call, start to
end) -> `lineage` (which turn does this extend?), `sessions` (phases, budgets) -> `store` (durable).
"""
