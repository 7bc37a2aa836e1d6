"""The loop of `nanovllm chat`: it reads messages and commands from stdin, whoever answers them."""

import sys
from typing import Protocol, runtime_checkable

from nanovllm.entrypoints.display.terminal import note
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.tokenizer.tokenizer import check_text

RETAIN = "recompute"  # the default of `nanovllm chat --retain`
HELP = """\
Type a message and press Enter. Ctrl-C stops a reply, Ctrl-D leaves.
  /reset      forget the conversation and start a new one
  /no_think   turn thinking off; at the end of a message, it asks the model not to think for that message only
  /think      turn thinking on
  /stats      show how many prompt tokens were run, and how many were reused
  /memory     show the owners of the pages of the KV memory
  /help       show this text
  /exit       leave"""


@runtime_checkable
class Talk(Protocol):
    """A conversation, and the engine or the server that answers."""

    def about(self) -> str:
        """What a user reads first."""
        ...

    def say(self, text: str) -> None:
        """Answer a message, on stdout. A Ctrl-C ends the reply, not the program."""
        ...

    def reset(self) -> None:
        """Forget the conversation."""
        ...

    def think(self, on: bool) -> None:
        """Turn thinking on or off."""
        ...

    def stats(self) -> list[str]:
        """The tokens that were run and reused, as lines."""
        ...

    def memory(self) -> str:
        """The owners of the pages."""
        ...


def talk(with_whom: Talk) -> int:
    """Read messages from stdin until its end or `/exit`. Returns the exit code."""
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
        note(with_whom.about())
    while True:
        try:
            text = input(">>> " if interactive else "").strip()
        except KeyboardInterrupt:
            note("\n(Ctrl-C stops a reply; Ctrl-D or /exit leaves)")
            continue
        except (EOFError, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise InvalidRequestError(f"the input is not valid UTF-8: {error}") from None
            if interactive:
                print()
            return 0
        match text.split():
            case []:
                continue
            case ["/exit" | "/quit"]:
                return 0
            case ["/help"]:
                note(HELP)
            case ["/reset"]:
                with_whom.reset()
                note("A new conversation.")
            case ["/no_think" | "/think" as command]:
                with_whom.think(command == "/think")
                note("Thinking is on." if command == "/think" else "Thinking is off.")
            case ["/stats"]:
                for line in with_whom.stats():
                    note(line)
            case ["/memory"]:
                note(with_whom.memory())
            case [command, *_] if command.startswith("/") and command not in ("/think", "/no_think"):
                note(f"unknown command {command}; /help shows the commands")
            case _:
                try:
                    check_text(text)
                    with_whom.say(text)
                except NanoVLLMError as error:
                    note(f"error: {error}")


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  (its import gives `input` editing and a history)
    except ImportError:
        return
