"""A server that real AgentCore clients can talk to, on this machine."""
