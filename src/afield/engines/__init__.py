"""Inference engines: vLLM and SGLang servers, embedded torch, scripted replies for tests."""
