"""An agent with tools. When a tool fails, the conversation goes back to where it was before the call, and so does the world.

A call is JSON under a grammar, so it can always be read, but what it asks for may be impossible. `truncate` then takes the call out of
the context: no token runs again, and the model never sees its own mistake. The call is struck from what the grammar allows there, so the
next try is another one. If nothing is left to try, the step before is taken back too. The world is a value like the engine's state: going
back is assignment. Grammars need the extra `grammar`: `pip install "nanovllm[grammar]"`.
"""

import json
from dataclasses import dataclass, replace

import nanovllm as nv

TASK = (
    "Jonas wants to sail to the island. He needs a lamp, a rope and bread. He has 3 coins and two baskets of fish. "
    "On the market a lamp costs 4 coins, a rope 3, bread 1 and a hat 2. A basket of fish brings 3 coins.\n"
)
PRICES, FISH, NEEDED = {"lamp": 4, "rope": 3, "bread": 1, "hat": 2}, 3, frozenset({"lamp", "rope", "bread"})
SEED = 200


class ToolError(Exception):
    """A tool could not do what it was asked for."""


@dataclass(frozen=True)
class World:
    """What Jonas has."""

    coins: int = 3
    baskets: int = 2
    things: frozenset[str] = frozenset()


def buy(world: World, thing: str) -> tuple[World, str]:
    """Buy a thing."""
    if thing in world.things:
        raise ToolError(f"he has the {thing} already")
    if PRICES[thing] > world.coins:
        raise ToolError(f"the {thing} costs {PRICES[thing]} coins, and he has {world.coins}")
    world = replace(world, coins=world.coins - PRICES[thing], things=world.things | {thing})
    return world, f"Jonas bought the {thing}. Coins left: {world.coins}."


def sell(world: World, thing: str) -> tuple[World, str]:
    """Sell a basket of fish."""
    if not world.baskets:
        raise ToolError(f"he has no {thing} left")
    world = replace(world, coins=world.coins + FISH, baskets=world.baskets - 1)
    return world, f"Jonas sold a basket of {thing}. Coins: {world.coins}."


TOOLS = {"buy": buy, "sell": sell}
CALLS = [*(("buy", thing) for thing in PRICES), ("sell", "fish")]


@dataclass
class Step:
    """A place to which the agent can go back: how long the context was, the world, and the calls that have failed there."""

    length: int
    world: World
    failed: set[tuple[str, str]]


def grammar_of(calls: list[tuple[str, str]]) -> nv.Grammar:
    """One of some calls, as JSON."""
    forms = [{"properties": {"tool": {"const": tool}, "thing": {"const": thing}}, "required": ["tool", "thing"]} for tool, thing in calls]
    return nv.Grammar.json_schema({"anyOf": [{"type": "object", "additionalProperties": False, **form} for form in forms]})


def main() -> None:
    """Let the agent work until Jonas has what he needs, and print each call."""
    model = nv.load_model("tiny")
    state = nv.init_state(model, num_pages=128)
    state, context = nv.prefill(model, state, TASK)
    world, steps, tries, naive = World(), list[Step](), 0, 0
    here = Step(len(context), world, set())
    while not world.things >= NEEDED:
        allowed = [call for call in CALLS if call not in here.failed]
        if not allowed:  # a dead end: the call that led here is struck where it was made
            here = steps.pop()
            world = here.world
            state, context = shortened(state, context, here.length)
            print("    a dead end: one step back")
            continue
        params = nv.SamplingParams(temperature=1.0, seed=SEED + tries, max_tokens=32, grammar=grammar_of(allowed))
        state, gen = nv.generate(model, state, [context, "Action: "], params)
        state, tries, naive = nv.release(state, context), tries + 1, naive + len(gen.chunk)
        call = json.loads(gen.text)
        here.failed.add((call["tool"], call["thing"]))  # tried, so it is not tried here again
        try:
            world, told = TOOLS[call["tool"]](world, call["thing"])
        except ToolError as error:
            state, context = shortened(state, gen.chunk, here.length)
            print(f"NO  {gen.text}  {error}")
            continue
        state, context = nv.prefill(model, state, f"\n{told}\n", after=gen.chunk)
        state = nv.release(state, gen.chunk)
        steps.append(here)
        here = Step(len(context), world, set())
        print(f"ok  {gen.text}  {told}")
    stats = state.stats
    print(
        f"{len(steps)} calls, {tries} tries; {stats.prefill_tokens + stats.decode_tokens} tokens ran, {naive} if every try sent all again"
    )
    state = nv.release(state, context)
    nv.check(state)
    assert nv.memory(state).num_held == 0


def shortened(state: nv.EngineState, chunk: nv.Chunk, length: int) -> tuple[nv.EngineState, nv.Chunk]:
    """The beginning of a chunk in its place."""
    state, start = nv.truncate(state, chunk, length)
    return nv.release(state, chunk), start


if __name__ == "__main__":
    main()
