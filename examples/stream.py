"""Print replies while they are generated. Leaving the loop early cancels the request and frees its pages."""

import nanovllm as nv

llm = nv.LLM("tiny", num_pages=256)
messages = [{"role": "user", "content": "The capital of Aistonia is Velmora. What is the capital of Aistonia?"}]
for piece in llm.stream(llm.chat_tokens(messages), nv.SamplingParams(temperature=0, max_tokens=128)):
    print(piece.text, end="", flush=True)
print(f"\n[{piece.finish_reason}: {len(piece.output.token_ids)} tokens]")

for piece in llm.stream("Once upon a time,", nv.SamplingParams(temperature=0, max_tokens=500)):
    print(piece.text, end="", flush=True)
    if "." in piece.text:
        break
pool = llm.state.pool
print(f"\n[left early: {len(llm.state.running)} requests run, {pool.num_available} of {pool.pages.num_pages} pages are available]")
