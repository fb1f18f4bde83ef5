"""Engines of one model that learn from each other's answers, through a server for streams."""
