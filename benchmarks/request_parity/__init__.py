"""Request options of vLLM's OpenAI server, compared with and without lookahead."""
