"""`ChatNanoVLLM`: a chat model of `nanovllm serve`."""

from collections.abc import Awaitable, Callable

from langchain_core.utils import from_env, secret_from_env
from pydantic import Field, SecretStr

from langchain_nanovllm.base import NanoVLLMOptions

BASE_URL = "http://127.0.0.1:8000/v1"


class ChatNanoVLLM(NanoVLLMOptions):
    """A chat model of `nanovllm serve`.

    The address is `base_url`, the variable `NANOVLLM_BASE_URL` or this machine's port 8000. The key is `api_key` or the variable
    `NANOVLLM_API_KEY`; a server without keys takes any. Everything else is as in `ChatOpenAI`, and beyond it:

    - `top_k`, `min_p`, `chat_template_kwargs` and the other options of nanovllm are arguments.
    - Think blocks stay, as `additional_kwargs["reasoning_content"]` and as blocks of `content_blocks`. Later turns send them back.
    - `chunks` puts chunks of the server before the conversation, and `keep` makes one of it.
      `usage_metadata["input_token_details"]["cache_read"]` says how many tokens were reused, `response_metadata["nanovllm"]` how.

    Examples:
        >>> model = ChatNanoVLLM(model="tiny", temperature=0)
        >>> model.openai_api_base
        'http://127.0.0.1:8000/v1'
        >>> model.invoke("What is 27 + 38?", chunks=["facts"]).content  # doctest: +SKIP
        '27 + 38 = 65.'
    """

    model_name: str = Field(alias="model")
    openai_api_base: str | None = Field(alias="base_url", default_factory=from_env("NANOVLLM_BASE_URL", default=BASE_URL))
    openai_api_key: SecretStr | Callable[[], str] | Callable[[], Awaitable[str]] | None = Field(
        alias="api_key", default_factory=secret_from_env("NANOVLLM_API_KEY", default="none")
    )
