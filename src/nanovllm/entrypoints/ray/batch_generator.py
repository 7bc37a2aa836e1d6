"""`BatchGenerator`: the class that `map_batches` of Ray Data makes in each of its actors."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from nanovllm.entrypoints.async_llm import AsyncLLM
from nanovllm.entrypoints.ray.batch_rows import columns_of, plain, rows_of, with_changes
from nanovllm.errors import EngineClosedError, EngineDeadError, InvalidRequestError, NanoVLLMError
from nanovllm.sampling.params import SamplingParams, from_generation_config
from nanovllm.state.request import RequestOutput


class BatchGenerator:
    """Generates replies to the rows of batches.

    It works without Ray, too: it is a function from columns to columns. Several threads may call it, and their rows run together. With
    `compute=ActorPoolStrategy(size=n, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True)` Ray has two threads that do so.
    The engine then has the rows of the next batch while the last ones of a batch end.

    References:
        https://docs.ray.io/en/latest/data/transforming-data.html#stateful-transforms

    Examples:
        >>> generate = BatchGenerator("tiny", sampling=SamplingParams(temperature=0, max_tokens=8, stop="."), device="cpu", num_pages=64)
        >>> rows = generate({"prompt": ["The cat", "Once upon a time"], "id": [1, 2]})
        >>> rows["id"], rows["reply"]
        ([1, 2], [' is the national animal of Poner', ', a boy named Jonas lived in a'])
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        sampling: SamplingParams | None = None,
        prompt_column: str | None = None,
        messages_column: str | None = None,
        sampling_column: str | None = None,
        enable_thinking: bool = True,
        **options: Any,
    ) -> None:
        """Load a model and create its engine. Ray calls this once in each actor, with `fn_constructor_kwargs`.

        Args:
            model: As in `LLM`.
            sampling: The options of all rows. None: the model's `generation_config`.
            prompt_column: The column of prompts: texts, or lists of token ids. None: `"prompt"`, if there are no messages.
            messages_column: The column of conversations, each a list of messages as in `LLM.chat`. Only one of the two can be given.
            sampling_column: A column of mappings, whose options replace those of `sampling` for their row. None: there is none.
            enable_thinking: As in `LLM.chat`.
            **options: The options of `LLM`, such as `tensor_parallel_size`.

        Raises:
            CheckpointError: The model cannot be loaded.
            InvalidRequestError: An option is invalid.
            OutOfPagesError: The KV memory does not fit into the device.
        """
        if prompt_column is not None and messages_column is not None:
            raise InvalidRequestError("prompt_column and messages_column are both given: a row has a prompt or a conversation")
        options.setdefault("max_step_ms", math.inf)  # nobody waits for a single token
        self._llm = AsyncLLM(model, **options)
        self._sampling = from_generation_config(self._llm.model.generation_config) if sampling is None else sampling
        self._column = messages_column or prompt_column or "prompt"
        self._chats, self._thinking, self._sampling_column = messages_column is not None, enable_thinking, sampling_column

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Generate the replies to the rows of a batch.

        Args:
            batch: Columns by name, as lists or arrays.

        Returns:
            The same columns and four more: `reply`, a text; `reply_token_ids`; `finish_reason`, which is `"error"` for a row that failed;
            and `error`, which is None for the others. A row that fails does not keep the others from running.

        Raises:
            InvalidRequestError: A column is missing, or has the name of a result.
            EngineDeadError: The engine has failed, and all rows with it.

        Examples:
            >>> some = SamplingParams(temperature=0, max_tokens=40)
            >>> generate = BatchGenerator("tiny", sampling=some, messages_column="chat", device="cpu", num_pages=64)
            >>> rows = generate({"chat": [[{"role": "user", "content": "Hello"}], [{"role": "user"}]]})
            >>> rows["finish_reason"]
            ['stop', 'error']
        """
        prompts = rows_of(batch, self._column)
        changes = [None] * len(prompts) if self._sampling_column is None else rows_of(batch, self._sampling_column)
        return {**batch, **columns_of(asyncio.run(self._all(prompts, changes)))}

    async def _all(self, prompts: list[Any], changes: list[Any]) -> list[RequestOutput | Exception]:
        rows = (self._row(prompt, plain(changed)) for prompt, changed in zip(prompts, changes, strict=True))
        return list(await asyncio.gather(*rows))

    async def _row(self, prompt: Any, changes: Any) -> RequestOutput | Exception:
        try:
            params = with_changes(self._sampling, changes)
            if self._chats:
                prompt = await self._llm.chat_tokens(prompt, enable_thinking=self._thinking)
            elif not isinstance(prompt, str | list):
                raise InvalidRequestError(f"a prompt must be a text or a list of token ids, not {type(prompt).__name__}")
            (output,) = await self._llm.generate([prompt], params)
            return output
        except (EngineDeadError, EngineClosedError):
            raise
        except (NanoVLLMError, TypeError, ValueError) as error:  # the last two from values that no template or tokenizer takes
            return error
