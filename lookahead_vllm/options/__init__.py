"""The options of a server and of a request: their names, their values and their checks."""
