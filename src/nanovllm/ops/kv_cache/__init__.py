"""Operations that write, copy and move KV."""
