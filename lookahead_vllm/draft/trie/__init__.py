"""The n-gram trie: candidates from earlier text, their acceptance rates, trees grown from them."""
