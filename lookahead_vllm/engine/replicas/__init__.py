"""Lookahead parallelism: replicas of the model share the rows of a step."""
