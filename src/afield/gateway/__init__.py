"""The gateway: model APIs for agents, token ids for engines, a durable record of both.

A request passes through `app` (HTTP), `dialects` (one per API), `calls` (one model call), `prompts`
(parent turn and token ids), `sessions` (phases and budgets) and `store` (SQLite).
"""
