"""How many nodes a step sends: what a step costs, and which nodes are worth it."""
