"""Chunks in files, and in folders of files with a size limit."""
