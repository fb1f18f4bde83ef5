"""What drafts: the live requests, the wait for tokens, the trees, what is learned and reported."""
