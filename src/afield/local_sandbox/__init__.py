"""Local sandboxes: agents and commands in Linux namespaces on this machine."""
