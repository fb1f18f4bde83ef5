"""The n-gram trie: what texts have told, in spaces of their own."""
