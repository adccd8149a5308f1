"""Gateway: model APIs for agents, with a durable record of tokens.

A request passes through `app` (HTTP), `dialects` (one per API), `calls` (one model call), `prompts`
(parent turn and token ids), `sessions` (phases and budgets) and `store` (SQLite).
"""
