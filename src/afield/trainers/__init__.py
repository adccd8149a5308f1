"""Trainers: embedded GRPO, FSDP, tinker-style loop, frozen control."""
