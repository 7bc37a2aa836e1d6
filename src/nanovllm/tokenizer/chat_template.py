"""Chat templates: Jinja programs that come with a checkpoint. They run in Jinja's immutable sandbox, within bounds."""

from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any

from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.bounded_jinja import BoundedEnvironment

MAX_SOURCE = 48 << 10  # characters of a template

Render = Callable[[Mapping[str, Any]], str]


def compile_templates(sources: Mapping[str, str]) -> Render:
    """Compile a model's templates to one function from the variables to the prompt text: `tool_use` if tools are given, else `default`.

    The function raises as that of `compile_template`. It also raises `InvalidRequestError` if the model has no template, or no default one.
    """
    if not sources:
        return _refuse("the model has no chat template; pass text or token ids, or add chat_template.jinja to its folder")
    usual = compile_template(sources["default"]) if "default" in sources else None
    with_tools = compile_template(sources["tool_use"]) if "tool_use" in sources else usual
    names = ", ".join(sorted(sources))
    other = _refuse(f"none of the model's chat templates ({names}) is the default one; add chat_template.jinja to its folder")

    def render(variables: Mapping[str, Any]) -> str:
        return ((usual if variables.get("tools") is None else with_tools) or other)(variables)

    return render


def compile_template(source: str) -> Render:
    """Compile a template to a function from its variables to the prompt text.

    Compiling never fails. Calling the function raises `InvalidRequestError` if the template does not compile, if it raises, or if it leaves
    the sandbox or a bound. The message quotes the template's own.

    A render may take half a second, and make strings and lists of 32 MiB in all, at 4 bytes a character and 64 an
    element. Long messages add 64 bytes a character. Filters and methods whose results cannot be bounded are missing, as are
    `include`, `import` and `autoescape`.
    """
    if len(source) > MAX_SOURCE:
        return _refuse(f"the model's chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed")
    environment, one_at_a_time = BoundedEnvironment(), RLock()
    try:
        template = environment.from_string(source)
    except Exception as error:  # from Jinja, from the compilation of its Python code, or from a constant expression
        return _refuse(f"the model's chat template does not compile: {error}")

    def render(variables: Mapping[str, Any]) -> str:
        try:
            with one_at_a_time:
                environment.begin(variables)
                return environment.concat(list(template.root_render_func(template.new_context(dict(variables)))))
        except Exception as error:  # a template may raise anything; it is the request that fails
            raise InvalidRequestError(f"the chat template failed: {type(error).__name__}: {error}") from error

    return render


def _refuse(message: str) -> Render:
    def refuse(variables: Mapping[str, Any]) -> str:
        raise InvalidRequestError(message)

    return refuse
