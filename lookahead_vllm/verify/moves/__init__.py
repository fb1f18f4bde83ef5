"""Moves of K/V between cache slots, which make the slots of an accepted path contiguous."""
