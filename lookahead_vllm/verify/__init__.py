"""Verification of drafts: tree attention, acceptance, KV moves. Imports PyTorch, not vLLM."""
