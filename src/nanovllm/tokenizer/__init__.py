"""Text and token ids, chat templates, conversations and streams of text."""
