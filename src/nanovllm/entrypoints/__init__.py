"""How people come in: the class `LLM`, conversations, the memory report and the command line."""
