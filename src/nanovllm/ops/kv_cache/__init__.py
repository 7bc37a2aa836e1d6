"""Writing, copying and moving KV."""
