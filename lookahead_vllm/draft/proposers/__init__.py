"""What a proposer is, and those that a server can choose."""
