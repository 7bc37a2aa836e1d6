"""`memory`: the owners of an engine's pages, as figures, text and a picture."""
