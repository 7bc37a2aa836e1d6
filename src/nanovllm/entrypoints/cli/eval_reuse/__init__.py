"""`nanovllm eval-reuse`: the loss of quality from reused KV, measured on facts and chats against a full prefill of the same tokens."""
