"""What runs in the API server's process."""
