"""How the trees of a step lie in tensors: for attention, for captured graphs, for logits rows."""
