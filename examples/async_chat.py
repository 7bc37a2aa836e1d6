"""Many chats at once in one event loop: replies in pieces, a chat that is left early, and a time limit."""

import asyncio

import nanovllm as nv

GREEDY = nv.SamplingParams(temperature=0, max_tokens=48)
QUESTIONS = ("Hello", "What is 27 + 38?", "The capital of Aistonia is Velmora. What is the capital of Aistonia?")


async def ask(llm: nv.AsyncLLM, question: str) -> None:
    """Read a reply piece by piece; meanwhile the other chats go on."""
    prompt = await llm.chat_tokens([{"role": "user", "content": question}], enable_thinking=False)
    text = ""
    async for piece in llm.stream(prompt, GREEDY):
        text += piece.text
        if "Velmora" in text:
            break  # leaving the loop cancels the request
    print(f"{question} - {text}")


async def main() -> None:
    """Ask all questions at once, and give up a long reply."""
    async with nv.AsyncLLM("tiny", num_pages=256) as llm:
        await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))
        try:
            async with asyncio.timeout(0.05):
                await llm.generate("Once upon a time,", nv.SamplingParams(max_tokens=900, ignore_eos=True))
        except TimeoutError:
            print("A long reply was cancelled after 50 ms.")
    state = llm.state
    print(f"{len(state.running)} requests run, {state.pool.num_available} of {state.config.num_pages} pages are available")


asyncio.run(main())
