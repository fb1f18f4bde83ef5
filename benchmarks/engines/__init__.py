"""Methods compared in engines of their own: tokens, time and steps."""
