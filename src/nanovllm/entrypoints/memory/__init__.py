"""`memory`: who holds the pages of an engine, as figures, text and a picture."""
