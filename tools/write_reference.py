"""The generated parts of docs/reference: the command line, the options, the table of models, and the lists of public names.

    python tools/write_reference.py            # or `make reference`: writes the parts that are out of date
    python tools/write_reference.py --check    # writes nothing; the exit code is 1 where a part is out of date

A part lies between `<!-- generated: NAME -->` and `<!-- /generated -->`. NAME is a key of `PARTS`, and may have an argument after a space.
"""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nanovllm
from nanovllm import LLM, SamplingParams, init_state, load_model, testing
from nanovllm.entrypoints.cli.main import build_parser
from nanovllm.entrypoints.cli.models.command import markdown
from nanovllm.entrypoints.cli.models.listing import listed, shared_lines
from nanovllm.models import REGISTRY

PAGES = Path(__file__).resolve().parents[1] / "docs/reference"
PART = re.compile(r"(<!-- generated: (\w+)(?: (.*?))? -->\n).*?(<!-- /generated -->)", re.S)
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|Warning):$", re.M)
ARGUMENT = re.compile(r"^(\w+)(?: \([^)]*\))?: ")


def cell(text: object) -> str:
    """A text as the cell of a table: one line, its bars escaped."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    names = list(head)
    return "\n".join(f"| {' | '.join(map(cell, row))} |" for row in (names, ["---"] * len(names), *rows))


def arguments_of(documented: Any) -> dict[str, str]:
    """What the section `Args` or `Attributes` of a docstring in Google style says of each name."""
    parts = SECTION.split(inspect.getdoc(documented) or "")
    found: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Args", "Attributes"):
            name = ""
            for line in inspect.cleandoc("\n" + body).splitlines():
                if begins := ARGUMENT.match(line):
                    name = begins[1]
                    found[name] = line[begins.end() :]
                elif name:
                    found[name] += " " + line.strip()
    return found


def summary(documented: Any) -> str:
    """The first sentence of a docstring, and the second if the first only says what is donated."""
    first = (inspect.getdoc(documented) or "").split("\n\n")[0]
    sentences = re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z`])", cell(first))
    return " ".join(sentences[: 2 if sentences[0].startswith("Donate") else 1])


def options(name: str) -> str:
    """The options of a function or a dataclass, by the name of `OPTIONS`, with defaults and meanings."""
    of, elsewhere = OPTIONS[name]
    told = {option: text for each in (*elsewhere, of) for option, text in arguments_of(each).items()}
    if dataclasses.is_dataclass(of):
        defaults = {field.name: field.default for field in dataclasses.fields(of)}
    else:
        taken = inspect.signature(of).parameters.values()
        defaults = {each.name: each.default for each in taken if each.kind is each.KEYWORD_ONLY or each.name in ("device", "dtype")}
    missing = [option for option in defaults if option not in told]
    if missing:
        raise SystemExit(f"the docstring of {name} says nothing of {', '.join(missing)}")
    rows = [(f"`{option}`", f"`{default!r}`", told[option]) for option, default in defaults.items()]
    return table(("option", "default", "meaning"), rows)


OPTIONS: MappingProxyType[str, tuple[Any, tuple[Any, ...]]] = MappingProxyType(
    {
        "load_model": (load_model, ()),
        "init_state": (init_state, ()),
        "LLM": (LLM.__init__, (load_model, init_state)),
        "SamplingParams": (SamplingParams, ()),
    }
)


def command_line(_: str) -> str:
    """Every command with its options, as `--help` lists them."""
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    about = {action.dest: action.help for action in commands._choices_actions}
    parts = [table(("command", "what it does"), [(f"[`nanovllm {name}`](#nanovllm-{name})", about[name]) for name in commands.choices])]
    for name, each in commands.choices.items():
        parts += [f"## nanovllm {name}", *_command(each, about[name] or "")]
    return "\n\n".join(parts)


def _command(parser: argparse.ArgumentParser, about: str) -> list[str]:
    parts = [(parser.description or f"{about[:1].upper()}{about[1:]}.").strip()]
    for group in parser._action_groups:
        rows = [(_spelled(action), _meaning(action, parser)) for action in group._group_actions if action.help != argparse.SUPPRESS]
        rows = [row for row in rows if row[0] != "`-h`, `--help`"]
        if rows:
            title = {"positional arguments": "argument", "options": "option"}.get(group.title or "", f"{group.title} option")
            parts += [cell(group.description)] if group.description else []
            parts.append(table((title, "meaning"), rows))
    return [*parts, f"```text\n{parser.epilog.strip()}\n```"] if parser.epilog else parts


def _spelled(action: argparse.Action) -> str:
    takes = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    return ", ".join(f"`{name}`" if action.nargs == 0 else f"`{name} {takes}`" for name in action.option_strings)


def _meaning(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    told = (action.help or "") % {**vars(action), "prog": parser.prog}
    shows = action.default not in (None, False, [], argparse.SUPPRESS) and "default" not in told
    return f"{told} (default: {action.default})" if shows else told


def models(_: str) -> str:
    """The table of the architectures that are built in."""
    return f"{markdown([listed(name) for name in REGISTRY])}\n\nThe files share {shared_lines()} more lines of code."


def names(group: str) -> str:
    """A list of public names of `nanovllm`, or of `nanovllm.testing` where the first word says so, then the reference of each."""
    module, wanted = (testing, group.split()[1:]) if group.startswith("testing ") else (nanovllm, group.split())
    rows = [(f"[`{name}`][{module.__name__}.{name}]", summary(getattr(module, name))) for name in wanted]
    brief = ["    options:", "      members: false"] if module is testing else []
    entries = ["\n".join([f"::: {module.__name__}.{name}", *brief]) for name in wanted]
    return "\n\n".join([table(("name", "what it is"), rows), *entries])


PARTS: MappingProxyType[str, Callable[[str], str]] = MappingProxyType(
    {"options": options, "command_line": command_line, "models": models, "names": names}
)


def filled(text: str) -> str:
    """A page with its generated parts made anew."""

    def part(found: re.Match[str]) -> str:
        begin, name, argument, end = found.groups()
        return f"{begin}{PARTS[name](argument or '')}\n{end}"

    return PART.sub(part, text)


def main() -> int:
    """Write the pages, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    check = parser.parse_args().check
    stale = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (made := filled(text)) != text:
            stale.append(page.name)
            if not check:
                page.write_text(made, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
