"""`nanovllm eval-reuse`: what reuse of KV costs in quality, measured on facts and chats against a full prefill of the same tokens."""
