"""Methods compared by tokens, time and steps, each in an engine of its own."""
