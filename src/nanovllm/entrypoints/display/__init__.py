"""Common output: terminal styles, tables and SVG."""
