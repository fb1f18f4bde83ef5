"""The sources of draft nodes. A node's source is stored as an index into NAMES."""

NAMES = ("own", "answers", "reference", "grammar", "window", "recycled", "drafter")
"""The names, which are also values of a metrics label:

own        the request's own prompt and output
answers    answers to other requests
reference  a reference that came with the request
grammar    a grammar that allows only one text
window     the lookahead branch's window and its n-grams
recycled   the model's choices at nodes verified in earlier steps
drafter    a trained drafter
"""

OWN, ANSWERS, REFERENCE, GRAMMAR, WINDOW, RECYCLED, DRAFTER = range(len(NAMES))
