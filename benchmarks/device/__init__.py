"""A simulated device: how long it waits for the host between two steps, without a GPU."""
