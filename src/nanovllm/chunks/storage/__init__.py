"""Chunks in files and in folders of files."""
