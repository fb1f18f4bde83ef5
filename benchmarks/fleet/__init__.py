"""A fleet: engines behind a load balancer that learn from each other, or alone."""
