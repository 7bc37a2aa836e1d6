"""The life of a request: queued, scheduled, run and post-processed."""
