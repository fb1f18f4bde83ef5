"""vLLM's Model Runner V2 with drafts."""
