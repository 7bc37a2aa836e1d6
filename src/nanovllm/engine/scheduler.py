"""The scheduler, a pure function: (pool, running, waiting, limits, expected reply) -> plan.

Requests are served in order of their turns: by rank, which is the priority with ageing (`rank_of`), and among equals in order of arrival.
Each step first runs one token of every decoding sequence (`decode_pages.py`), then fills the rest of its token budget with prompts, in
pieces (`prompt_pages.py`): first those of running sequences, then those of requests that it admits (`admission.py`). While replies go on,
prompts have a smaller budget, of which a long prompt leaves a part to a short one (`prompt_room.py`), and pages come out of host memory in
several steps (`allow_loads`). If the pool is full, the running sequence whose turn is last returns to the queue (`preemption.py`).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from nanovllm.config import EngineConfig
from nanovllm.engine.admission import HELD, admit, fits, may_admit, opens, set_stranded_apart, steps_held
from nanovllm.engine.decode_pages import EARLY, lacks_pages, may_grow_early, place_decode
from nanovllm.engine.disk_pages import set_reading_apart
from nanovllm.engine.draft import Draft, id_of, room_of
from nanovllm.engine.meeting import jump
from nanovllm.engine.plan import Plan
from nanovllm.engine.prompt_pages import offer, place_prefill
from nanovllm.engine.prompt_room import PromptRoom
from nanovllm.engine.reuse import load_more
from nanovllm.state.expected_reply import EXPECTED_REPLY
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pool import Pool
from nanovllm.state.request import Queue, Sequence
from nanovllm.state.steady import Steady
from nanovllm.state.vector import joined

ALONE = 4  # one of so many steps that run short prompts copies pages in


def schedule(
    pool: Pool,
    running: Seq[Sequence],
    waiting: Queue,
    config: EngineConfig,
    expected_reply: int = EXPECTED_REPLY,
    num_steps: int = 0,
    gather_until: int = 0,
) -> Plan:
    """Choose the tokens of one step and find pages for them. The arguments do not change.

    Args:
        pool: The pool.
        running: The running sequences, in order of their turns.
        waiting: The queue.
        config: The engine's limits.
        expected_reply: How long a reply is expected to become, in tokens, if its limit is not nearer.
        num_steps: How many steps the engine has run.
        gather_until: The number of steps up to which a few requests wait for others.
    """
    draft = Draft(pool, list(running), waiting, config, expected_reply)
    draft.retire()
    set_reading_apart(draft)
    beside = pool.host is not None and bool(decoding_rows(draft)) and pool.host.loaded_beside(0.0) is not None
    draft.load_room = 0 if beside else None  # until it is known whether prompts run
    came = set[int]()  # requests that this step has looked up, and that have to load pages
    load_more(draft)
    jump(draft)
    decoding = decoding_rows(draft)
    room = PromptRoom.of(config, len(decoding))
    chosen = place_decode(draft, decoding) if decoding else set[int]()
    prefill: dict[int, int] = {}
    prompts = [s for s in draft.running if s.todo > 1 and not s.loading]
    for place, sequence in enumerate(prompts):
        if not room:
            break
        part = room.without_share() if must_share(draft, sequence, prompts[place + 1 :], room) else room
        if part and (count := place_prefill(draft, sequence, part)):
            prefill[id_of(sequence)] = count
            room = room.after(sequence, count)
    offer(draft, [(s, prefill[id_of(s)]) for s in draft.running if id_of(s) in prefill] if prefill else ())
    set_stranded_apart(draft, num_steps)
    admits = bool(prefill) or opens(draft, num_steps, gather_until)
    while admits and room and may_admit(draft):
        if beside and prefill:
            allow_loads(draft, prefill, num_steps)
            load_more(draft, came)  # those that were there before come first
        part = room.without_share() if must_leave_share(draft, room) else room
        admitted = admit(draft, part) if part else None
        if admitted is None:
            break
        sequence, count = admitted
        if sequence.loading:
            came.add(id_of(sequence))
            continue
        if sequence.todo <= 1:
            chosen.add(id_of(sequence))
        else:
            prefill[id_of(sequence)] = count
            offer(draft, [admitted])
        room = room.after(sequence, max(1, count))
    if beside and not (draft.num_preempted or draft.stuck):
        allow_loads(draft, prefill, num_steps)
        load_more(draft, came)
    return draft.finish(chosen, prefill)


def steady(
    pool: Pool,
    running: tuple[Sequence, ...],
    waiting: Queue,
    config: EngineConfig,
    expected_reply: int = EXPECTED_REPLY,
    num_steps: int = 0,
    gather_until: int = 0,
) -> Steady | None:
    """The sequences as a `Steady`, with the number of steps in which `schedule` would only choose one token of each.

    Returns:
        None if there are no such steps: a request could be admitted, or a page to write is missing or shared. The same holds if a
        sequence has a prompt, tokens lost to preemption, or tensors of `process_logits`. A sequence that has all its pages does not limit
        the others.
    """
    size, steps = config.page_size, config.max_model_len
    if not running or len(running) > config.max_num_batched_tokens:
        return None
    draft = Draft(pool, list(running), waiting, config, expected_reply)
    early = EARLY if may_grow_early(draft) else 0
    for s in running:
        request, left = s.request, room_of(s, size) - early
        if s.todo != 1 or s.loading or s.num_filled < max(request.num_prompt, s.most_filled):
            return None
        if request.process_logits is not None and request.process_logits.init is not None:
            return None
        if left < steps and lacks_pages(s, size):
            steps = left
    first = waiting.first()
    if may_admit(draft):
        steps = 0 if opens(draft, num_steps, gather_until) else min(steps, steps_held(draft, num_steps, gather_until))
    elif first is not None and len(running) < config.max_num_seqs and not fits(draft, first):
        steps = min(steps, HELD - num_steps % HELD)  # `schedule` sees whether it can ever run
    if steps <= 0:
        return None
    written = joined([(s.pages, s.num_filled // size, pages_for(s.num_filled + steps, size)) for s in running])
    return Steady.of(running, steps, pool, waiting) if (pool.pages.owners(written) == 1).all() else None


def allow_loads(draft: Draft, prefill: Mapping[int, int], num_steps: int) -> None:
    """Let pages be copied in beside replies that go on, and beside prompts: `prefill` are the numbers of their tokens by request.

    Prompts that leave time for less than a step without prompts has are delayed by few pages as by many. So only one of `ALONE` such steps
    copies.
    """
    host = draft.pool.host
    assert host is not None
    prompts = [s for s in draft.running if id_of(s) in prefill] if prefill else []
    seconds = sum((host.rates.seconds_to_run(s.num_filled, s.num_filled + prefill[id_of(s)]) for s in prompts), 0.0)
    allowed, without = host.loaded_beside(seconds), host.loaded_beside(0.0)
    assert allowed is not None and without is not None
    if prefill and allowed < without and num_steps % ALONE:
        allowed = 0
    draft.load_room = max(0, allowed - draft.num_loaded)


def decoding_rows(draft: Draft) -> list[Sequence]:
    """The sequences that run one token each. More than the budget can decode only after it was lowered; the last then wait.

    If the first sequence has a prompt to run, a token is left for it, so that it always advances.
    """
    most = draft.config.max_num_batched_tokens
    if draft.running and draft.running[0].todo > 1:
        most -= 1
    return [s for s in draft.running if s.todo <= 1 and not s.loading][:most]


def must_share(draft: Draft, sequence: Sequence, behind: Seq[Sequence], room: PromptRoom) -> bool:
    """Whether a prompt leaves a part of the room to a short one: it is long itself, and the next in order that can run is short."""
    if room.bound is None or room.is_short(sequence.todo):
        return False
    if any(room.is_short(s.todo) for s in behind):
        return True
    first = draft.waiting.first()
    return first is not None and room.is_short(first.todo) and may_admit(draft)


def must_leave_share(draft: Draft, room: PromptRoom) -> bool:
    """Whether the first waiting request leaves a part of the room to the second: it is long, and the second is short."""
    first = draft.waiting.first()
    if room.bound is None or first is None or room.is_short(first.todo) or len(draft.running) + 1 >= draft.config.max_num_seqs:
        return False
    second = draft.waiting.pop(id_of(first)).first()
    return second is not None and room.is_short(second.todo)
