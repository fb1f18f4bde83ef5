"""The time from a command to the first answer."""
