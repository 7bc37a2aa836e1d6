"""The entry points: the class `LLM`, conversations, the memory report and the command line."""
