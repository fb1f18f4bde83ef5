"""One step: its drafts, rows, samples and accepted paths."""
