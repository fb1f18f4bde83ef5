"""Servers under load: latencies of requests that arrive at random."""
