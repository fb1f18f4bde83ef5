"""Who guessed a node of a draft tree; a source's number is its place here."""

NAMES = ("own", "answers", "reference", "grammar", "window", "recycled")
"""The request's own prompt and output, other requests' answers, a reference that the request was
given, a grammar that allows one text only, the lookahead branch's window and its n-grams, the
model's choices at nodes verified earlier."""

OWN, ANSWERS, REFERENCE, GRAMMAR, WINDOW, RECYCLED = range(len(NAMES))
