"""What the servers of `kv_faults.py` do before they are hurt, what the next server is asked, and how its answers are judged."""

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import nanovllm as nv
from benchmarks.short_lives import ENGINE, Client, Points, RefusedError, Tell, lived, serving
from nanovllm.executor.executor import runtime_of
from nanovllm.files import TEMPORARY
from nanovllm.state.engine_state import EngineState

REPLY, TAIL = 5, [5, 6, 7]  # tokens of each reply; what follows a chunk in a prompt
GIB = 24 * 65632 / 2**30  # the size limit of the pages of a folder: that of 24 files
OLD = 120.0  # seconds
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(300, 4000) for _ in range(33)] for _ in range(10)]
CONTENTS = {length: [DRAW.randrange(300, 4000) for _ in range(length)] for length in (37, 45, 29, 52, 21)}  # of chunks, by their length
KING, NEW_KING, TALK, NEW = 37, 45, 29, 21
BEFORE = [["saved", "king", KING], ["saved", "talk", TALK]]  # what is known of a folder after a `first` life
BAD = ("wrong", "crashes", "lost", "stale", "unnoticed")

Right = dict[tuple[int, ...], list[int]]
Act = Callable[[Client, Tell], None]


def right_replies(model: nv.Model) -> Right:
    """The replies of an engine that keeps nothing, by prompt."""

    def act(tell: Tell) -> None:
        params = nv.SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True)
        options: dict[str, Any] = ENGINE | {"host_kv_gib": 0.0}
        state = nv.init_state(model, **options)
        for prompt in (*PROMPTS, *([*content, *TAIL] for content in CONTENTS.values())):  # no two of which begin with the same tokens
            state, reply = nv.generate(model, state, prompt, params)
            tell([prompt, [*reply.token_ids]])

    ended = lived(act)
    if ended.code:
        raise SystemExit(ended.errors)
    return {tuple(prompt): reply for prompt, reply in ended.told}


def asked(client: Client, tell: Tell, prompt: list[int]) -> None:
    """Ask for a reply, and tell it."""
    tell(["reply", prompt, client.reply(prompt, REPLY)[0]])


def named(client: Client, tell: Tell, name: str, length: int) -> None:
    """Give a name to a chunk, and tell it before and after."""
    tell(["will", name, length])
    status, said = client.call("POST", "/v1/chunks", {"name": name, "token_ids": CONTENTS[length], "replace": True})
    tell(["is", name, length] if status == 200 else ["refused", name, said["error"]["code"]])


def saved(client: Client, tell: Tell, name: str, length: int) -> None:
    """Save a chunk, and tell it."""
    status, said = client.call("POST", f"/v1/chunks/{name}/save", {})
    tell(["saved", name, length] if status == 200 else ["refused", name, said["error"]["code"]])


def begun(client: Client, tell: Tell) -> None:
    """Serve nothing: the server starts and ends."""
    tell(["begun", len(client.loop.named.spaces)])


def first(client: Client, tell: Tell) -> None:
    """Serve prompts and name chunks. One of them is saved twice when a client asks for it, the other one at the end."""
    for prompt in PROMPTS[:2]:
        asked(client, tell, prompt)
    named(client, tell, "king", KING)
    named(client, tell, "talk", TALK)
    for _ in range(2):
        saved(client, tell, "king", KING)


def later(client: Client, tell: Tell) -> None:
    """Read pages, write more than the folder has room for, replace one chunk and delete another."""
    for prompt in PROMPTS[:4]:
        asked(client, tell, prompt)
    named(client, tell, "king", NEW_KING)
    saved(client, tell, "king", NEW_KING)
    tell(["will", "talk", None])
    client.call("DELETE", "/v1/chunks/talk")
    tell(["is", "talk", None])
    named(client, tell, "new", NEW)


def busy(client: Client, tell: Tell) -> None:
    """Do all this again and again, with pauses in which an idle server writes."""
    draw = random.Random(time.time_ns())
    tell(["begun", 0])
    while True:
        asked(client, tell, draw.choice(PROMPTS))
        name, length = draw.choice(("king", "talk", "new")), draw.choice([*CONTENTS])
        named(client, tell, name, length)
        if draw.random() < 0.5:
            saved(client, tell, name, length)
        if draw.random() < 0.3:
            time.sleep(0.15)


def life(model: nv.Model, act: Act, folder: Path, fault: Callable[[], Any], tell: Tell) -> None:
    """A server that meets a fault, from its start to its end."""
    fault_of = fault()
    try:
        with serving(model, folder, GIB) as client:
            act(client, tell)
    except RefusedError as error:
        tell(["no start", str(error)])
        return
    tell(["errors", _disk(client.loop.state).counts.errors])
    if isinstance(fault_of, Points):
        tell(["points", fault_of.count])


def questions(model: nv.Model, folder: Path, prompts: list[list[int]], names: list[str], tell: Tell) -> None:
    """Start a server in a folder, and tell what it has and what it replies. A client whose chunk is missing sends the whole prompt."""
    begin, replies, refusals = time.perf_counter(), list[Any](), dict[str, str | None]()
    try:
        with serving(model, folder, GIB, ends=False) as client:
            start = time.perf_counter() - begin
            found = {each["name"]: each["tokens"] for each in client.call("GET", "/v1/chunks")[1]["data"]}
            for name in names:
                whole = [*CONTENTS[found.get(name, KING)], *TAIL]
                reply, refusals[name] = client.reply(TAIL, REPLY, name) if name in found else (None, None)
                replies.append([whole, *((reply, None) if reply is not None else client.reply(whole, REPLY))])
            replies += [[prompt, *client.reply(prompt, REPLY)] for prompt in prompts]
            state = client.loop.state
            told = {"start_s": start, "chunks": found, "refusals": refusals, "read_tokens": state.stats.read_tokens}
            tell(told | {"replies": replies, "counts": asdict(_disk(state).counts), "temporary": len(_temporaries(folder))})
            nv.check(client.loop.state)
    except RefusedError as error:
        tell({"refused": str(error)})


def _disk(state: EngineState) -> Any:
    return runtime_of(state).disk


def _temporaries(folder: Path) -> list[Path]:
    return [*folder.rglob(TEMPORARY)]


def judged(model: nv.Model, right: Right, folder: Path, told: list[Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Start the next server in a folder. Compare what it has and says with what servers before it have told."""
    left, allowed, sure = _temporaries(folder), dict[str, set[int | None]](), dict[str, int]()
    for path in left:
        os.utime(path, (time.time() - OLD, time.time() - OLD))
    for kind, name, length in (each for each in told if each[0] in ("will", "is", "saved")):
        if kind == "will":
            allowed[name] = {*allowed.get(name, {None}), length}
            sure.pop(name, None)  # the old one may have gone, and the new one has no file yet
        else:
            allowed[name] = {length, None}
        if kind == "saved":
            sure[name] = length
    ended = lived(partial(questions, model, folder, prompts, [*allowed]))
    row: dict[str, Any] = dict.fromkeys(("wrong", "lost", "stale", "unnoticed", "replies", "right", "restarts"), 0)
    row |= {"crashes": int(ended.code != 0 or "Traceback" in ended.errors), "temporary_left": len(left), "says": ended.errors.strip()}
    row["wrong"] = sum(reply != right[tuple(prompt)] for prompt, reply in (each[1:] for each in told if each[0] == "reply"))
    if not ended.told:
        return row
    (after,) = ended.told
    if "refused" in after:
        return row | after
    row["restarts"] = 1
    for prompt, reply, code in after["replies"]:
        row["replies"] += 1
        row["right"] += reply == right[tuple(prompt)]
        row["wrong"] += reply is not None and reply != right[tuple(prompt)]
        row["crashes"] += code is not None
    row["stale"] = sum(length not in allowed[name] for name, length in after["chunks"].items() if name in allowed)
    row["lost"] = sum(after["chunks"].get(name) != length or after["refusals"][name] is not None for name, length in sure.items())
    return row | {"temporary_after": after["temporary"], **{key: after[key] for key in after if key not in ("replies", "temporary")}}


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several restarts together."""
    counts = ("restarts", "replies", "right", *BAD, "read_tokens", "temporary_left", "temporary_after")
    found: dict[str, Any] = {key: sum(row.get(key, 0) for row in rows) for key in counts}
    if starts := [row["start_s"] for row in rows if "start_s" in row]:
        found |= {"start_ms": round(1e3 * statistics.median(starts)), "longest_start_ms": round(1e3 * max(starts))}
    says = [*dict.fromkeys(row["says"][-500:] for row in rows if any(row.get(key) for key in BAD))]
    return found | ({"says": says[:3]} if says else {})
