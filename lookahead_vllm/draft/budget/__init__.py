"""The draft budget: the cost of a step, and the choice of the nodes that are worth it."""
