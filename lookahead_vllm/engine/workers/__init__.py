"""The workers for each device."""
