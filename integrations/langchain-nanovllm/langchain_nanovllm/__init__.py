"""LangChain chat models for nanovllm.

`ChatNanoVLLM` speaks to a server. `ChatNanoVLLMInProcess` runs the model in this process, and needs the extra `engine`.
"""

from langchain_nanovllm.chat_models import ChatNanoVLLM
from langchain_nanovllm.in_process import ChatNanoVLLMInProcess

__all__ = ["ChatNanoVLLM", "ChatNanoVLLMInProcess"]
