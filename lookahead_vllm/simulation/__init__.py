"""Simulation of proposers without a model, by replaying recorded generations."""
