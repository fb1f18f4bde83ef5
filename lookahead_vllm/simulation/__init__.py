"""Proposers without a model: recorded generations, replayed as the engine would."""
