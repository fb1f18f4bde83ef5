"""What a step costs: measured at start-up and by every step."""
