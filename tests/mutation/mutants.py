"""Small bugs that tests must find: each is one changed line of the package, with the tests that should notice it.

They are of four kinds that tests miss easily: inputs that are too symmetric, work in vain that leaves the tokens right, exact boundaries,
and branches that only raise.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug: in `file` of the package, the text `old` becomes `new`. `tests` are pytest's names of files or tests that should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PAGES = ("tests/state/test_pages.py",)
PREFIX = ("tests/state/test_prefix.py",)
SEQUENCE_PAGES = ("tests/state/test_sequence_pages.py",)
FRAMES = ("tests/state/test_frames.py",)
WINDOWS = ("tests/test_windows.py",)
STEADY = ("tests/state/test_steady.py",)
REQUEST = ("tests/state/test_request.py",)
SCHEDULER = ("tests/test_schedule.py",)
ENGINE = ("tests/test_engine.py",)
GENERATE = ("tests/test_generate.py",)
SESSION = ("tests/test_session.py", "tests/test_donation.py")
OUTPUT = ("tests/test_settle.py",)
SAMPLE = ("tests/test_sample.py",)
OPTIONS = ("tests/test_sampling_params.py",)
COMPOSE = ("tests/test_compose.py",)
CHUNKS = ("tests/test_chunks.py",)
CHUNK_FILES = ("tests/test_chunk_file.py",)
STORE = ("tests/state/test_store.py",)
TOKENIZER = ("tests/test_tokenizer.py",)
TOKENIZER_FILES = ("tests/test_tokenizer_files.py",)
THINKING = ("tests/test_thinking.py",)
WEIGHTS = ("tests/test_weights.py",)
HEADERS = ("tests/test_headers.py",)
CONFIG = ("tests/test_config.py",)
SHARING = ("tests/test_sharing.py",)
AHEAD = ("tests/test_ahead.py",)
CASCADE = ("tests/ops/test_cascade.py",)
DECODE = ("tests/test_compile_decode.py",)
CONTEXT = ("tests/test_context.py",)
HUB = ("tests/test_checkpoint_folder.py",)

MUTANTS: tuple[Mutant, ...] = (
    # Pages
    Mutant(
        name="pages given back twice in sorted order",
        file="state/pages.py",
        old="        left = counts.get(unique)\n",
        new="",
        tests=PAGES,
    ),
    Mutant(
        name="a page retained twice by one call counts once", file="state/pages.py", old="owners + times", new="owners + 1", tests=PAGES
    ),
    Mutant(
        name="a page released twice by one call counts once",
        file="state/pages.py",
        old="left = pages.owners(unique) - times",
        new="left = pages.owners(unique) - 1",
        tests=PAGES,
    ),
    Mutant(
        name="all pages at once are refused",
        file="state/pages.py",
        old="if count > pages.num_free:",
        new="if count >= pages.num_free:",
        tests=PAGES,
    ),
    Mutant(
        name="neighbours alone are compared for doubles",
        file="state/pages.py",
        old="ordered = np.sort(held)",
        new="ordered = held",
        tests=PAGES,
    ),
    # Prefix index
    Mutant(
        name="evicts past the count",
        file="state/prefix.py",
        old="due = due[index.contains(due)][: index.num_idle - wanted]",
        new="due = due[index.contains(due)]",
        tests=PREFIX,
    ),
    Mutant(
        name="an eviction looks for idle pages from the newest group",
        file="state/prefix.py",
        old="time = index.oldest",
        new="time = max(index.idle)",
        tests=PREFIX,
    ),
    Mutant(
        name="a page behind an indexed one may hold the same tokens twice",
        file="state/prefix.py",
        old="if key in index.heads or key[1] == _behind(index, run.parent):",
        new="if key in index.heads:",
        tests=PREFIX,
    ),
    Mutant(
        name="a match ends before a page at its very end",
        file="state/prefix.py",
        old="while len(tokens) >= size:",
        new="while len(tokens) > size:",
        tests=PREFIX,
    ),
    Mutant(
        name="a released run becomes evictable from its beginning",
        file="state/pool.py",
        old="    backwards = held[::-1]\n",
        new="    backwards = held\n",
        tests=PREFIX,
    ),
    Mutant(
        name="an eighth of the pool is not left over",
        file="state/pool.py",
        old="(0 if only_free else self.prefix.num_idle) - self.pages.num_pages // 8",
        new="(0 if only_free else self.prefix.num_idle)",
        tests=SCHEDULER,
    ),
    # Sequences and their pages
    Mutant(
        name="a full page that others hold is copied",
        file="state/sequence_pages.py",
        old="return filled % page_size != 0 and pool.pages",
        new="return filled // page_size < len(sequence.pages) and pool.pages",
        tests=SEQUENCE_PAGES,
    ),
    Mutant(
        name="equal matches are taken",
        file="state/sequence_pages.py",
        old="if len(matched) * page_size <= sequence.num_filled:",
        new="if len(matched) * page_size < sequence.num_filled:",
        tests=SEQUENCE_PAGES,
    ),
    Mutant(
        name="matches that cost pages are taken",
        file="state/sequence_pages.py",
        old="num_busy(pool, matched) >= held",
        new="num_busy(pool, matched) >= held - 1",
        tests=SEQUENCE_PAGES,
    ),
    Mutant(
        name="approximate KV enters the index on preemption",
        file="state/sequence_pages.py",
        old="tokens = sequence.tokens.array(0, sequence.num_exact)",
        new="tokens = sequence.tokens.array(0, sequence.num_filled)",
        tests=(*SEQUENCE_PAGES, *ENGINE),
    ),
    Mutant(
        name="the next oldest is found from zero",
        file="state/request.py",
        old="items, head = self.items.delete(request_id), self.head",
        new="items, head = self.items.delete(request_id), 0",
        tests=REQUEST,
    ),
    Mutant(
        name="a pushed back request is not first",
        file="state/request.py",
        old="head=min(self.head, rid) if self.items else rid",
        new="head=self.head if self.items else rid",
        tests=REQUEST,
    ),
    # Frames
    Mutant(
        name="a window retires a page too early",
        file="state/frames.py",
        old="- window + 1) // page_size",
        new="- window + 2) // page_size",
        tests=WINDOWS,
    ),
    Mutant(
        name="a window retires a page too late",
        file="state/frames.py",
        old="- window + 1) // page_size",
        new="- window) // page_size",
        tests=WINDOWS,
    ),
    Mutant(
        name="one frame too few for a window",
        file="state/frames.py",
        old="return 1 + -(-(window - 1) // page_size)",
        new="return 1 + -(-(window - 2) // page_size)",
        tests=WINDOWS,
    ),
    Mutant(
        name="one frame too many for a window",
        file="state/frames.py",
        old="return 1 + -(-(window - 1) // page_size)",
        new="return 1 + -(-window // page_size)",
        tests=WINDOWS,
    ),
    Mutant(
        name="spare frames are taken youngest first",
        file="state/ages.py",
        old="pages = ages.groups.get(time, NO_PAGES)[:missing]",
        new="pages = ages.groups.get(time, NO_PAGES)[-missing:]",
        tests=WINDOWS,
    ),
    Mutant(
        name="a retired page is not reused",
        file="state/pool.py",
        old="served = np.flatnonzero(behind <= retired)",
        new="served = np.flatnonzero(behind < retired)",
        tests=WINDOWS,
    ),
    # Scheduler
    Mutant(
        name="the copy of a shared tail needs no page",
        file="schedule.py",
        old="spare = self.pool.num_available - shares_tail(self.pool, sequence, size)",
        new="spare = self.pool.num_available",
        tests=(*SCHEDULER, *ENGINE),
    ),
    Mutant(
        name="a request waits on after a row ended",
        file="engine.py",
        old="steps=0 if state.waiting else after.steps)",
        new="steps=after.steps)",
        tests=ENGINE,
    ),
    Mutant(
        name="one row too many",
        file="schedule.py",
        old="len(self.running) >= self.config.max_num_seqs",
        new="len(self.running) > self.config.max_num_seqs",
        tests=SCHEDULER,
    ),
    Mutant(
        name="a request that fits exactly waits",
        file="schedule.py",
        old="if wanted - len(first.pages) <= self.pool.num_available:",
        new="if wanted - len(first.pages) < self.pool.num_available:",
        tests=SCHEDULER,
    ),
    Mutant(
        name="shared pages that fit exactly wait",
        file="schedule.py",
        old="return missing <= free - idle",
        new="return missing < free - idle",
        tests=SCHEDULER,
    ),
    Mutant(
        name="idle pages of the prompt count twice",
        file="schedule.py",
        old="return missing <= free - idle",
        new="return missing <= free",
        tests=SCHEDULER,
    ),
    Mutant(
        name="no steady steps for a full batch",
        file="schedule.py",
        old="if not running or len(running) > config.max_num_batched_tokens:",
        new="if not running or len(running) >= config.max_num_batched_tokens:",
        tests=(*SCHEDULER, *ENGINE),
    ),
    Mutant(name="steady steps end a step early", file="schedule.py", old="if steps <= 0 or", new="if steps <= 1 or", tests=SCHEDULER),
    Mutant(
        name="a sequence with all its pages holds others up",
        file="schedule.py",
        old="if room - filled < steps and room < request.max_len - 1:",
        new="if room - filled < steps:",
        tests=(*SCHEDULER, *ENGINE),
    ),
    Mutant(
        name="reruns count as reuse",
        file="schedule.py",
        old="self.num_reused += max(0, there - sequence.most_filled)",
        new="self.num_reused += there",
        tests=(*SCHEDULER, *ENGINE),
    ),
    Mutant(
        name="pages ahead of need while one waits to come back",
        file="schedule.py",
        old="back = first is not None and first.most_filled > 0",
        new="back = False",
        tests=(*SCHEDULER, *ENGINE),
    ),
    Mutant(
        name="stripped from the front of the queue",
        file="schedule.py",
        old="last = holders[-1]",
        new="last = holders[0]",
        tests=(*SCHEDULER, *ENGINE),
    ),
    Mutant(
        name="a prompt takes what the budget leaves and one",
        file="schedule.py",
        old="if budget and (count := draft.place_prefill(sequence, budget)):",
        new="if count := draft.place_prefill(sequence, budget + 1):",
        tests=SCHEDULER,
    ),
    # Steps and output
    Mutant(
        name="the first end is that of the first row",
        file="state/steady.py",
        old="first_end=int(left.min()), steps=steps",
        new="first_end=int(left[0]), steps=steps",
        tests=STEADY,
    ),
    Mutant(
        name="a stop token of another row ends a row",
        file="state/steady.py",
        old="if token in self.base[row].request.stop_ids",
        new="if token in self.stop_ids",
        tests=STEADY,
    ),
    Mutant(
        name="a reply is one token longer",
        file="settle.py",
        old='return "length" if sequence.tokens.length >= request.max_len else None',
        new='return "length" if sequence.tokens.length > request.max_len else None',
        tests=ENGINE,
    ),
    Mutant(
        name="length wins over a stop",
        file="settle.py",
        old="    if token in request.stop_ids or (",
        new="    if (token in request.stop_ids and sequence.tokens.length < request.max_len) or (",
        tests=ENGINE,
    ),
    Mutant(
        name="a stop string ends at its last place",
        file="settle.py",
        old="found=stops.start + min(places) if places else None",
        new="found=stops.start + max(places) if places else None",
        tests=OUTPUT,
    ),
    Mutant(
        name="the tail is a character short",
        file="settle.py",
        old="begin = max(0, len(text) - max(map(len, strings)) + 1)",
        new="begin = max(0, len(text) - max(map(len, strings)) + 2)",
        tests=OUTPUT,
    ),
    Mutant(
        name="the stop token is in the text", file="settle.py", old="        ids.pop()\n", new="        pass\n", tests=(*OUTPUT, *ENGINE)
    ),
    Mutant(
        name="the decode speed counts the first token",
        file="settle.py",
        old="decode_tokens_per_second=(generated - 1)",
        new="decode_tokens_per_second=generated",
        tests=(*OUTPUT, *ENGINE),
    ),
    Mutant(
        name="a stop string is not held back whole",
        file="streams.py",
        old="for length in range(min(len(text), len(string) - 1), longest, -1):",
        new="for length in range(min(len(text), len(string) - 2), longest, -1):",
        tests=OUTPUT,
    ),
    Mutant(
        name="tokens run again after a preemption are not counted",
        file="settle.py",
        old="return prompt, max(0, min(sequence.most_filled, start + count) - start)",
        new="return prompt, max(0, min(sequence.most_filled, start + count) - start - 1)",
        tests=ENGINE,
    ),
    Mutant(
        name="a cancelled request's pages are lost",
        file="engine.py",
        old="pool=give_up_pages(state.pool, found), waiting=waiting",
        new="pool=state.pool, waiting=waiting",
        tests=ENGINE,
    ),
    Mutant(
        name="a stuck reply is kept from its caller",
        file="engine.py",
        old='outputs.append(StepOutput(rid, (), "length", output))',
        new="outputs.append(StepOutput(rid, ()))",
        tests=ENGINE,
    ),
    Mutant(
        name="a prompt as long as the engine is accepted",
        file="engine.py",
        old="if num_prompt >= limit:",
        new="if num_prompt > limit:",
        tests=(*ENGINE, *CONTEXT, *CHUNKS),
    ),
    Mutant(
        name="all requests of an engine have one seed",
        file="engine.py",
        old="SeedSequence((seed, request_id))",
        new="SeedSequence((seed, 0))",
        tests=ENGINE,
    ),
    # Sampling
    Mutant(
        name="top-p keeps a token more at the boundary",
        file="sample.py",
        old="sums_BC - weights_BC < wanted_B1",
        new="sums_BC - weights_BC <= wanted_B1",
        tests=SAMPLE,
    ),
    Mutant(
        name="min-p drops a token at the boundary",
        file="sample.py",
        old="(sorted_BC >= least_B1)",
        new="(sorted_BC > least_B1)",
        tests=SAMPLE,
    ),
    Mutant(
        name="top-k keeps a token more",
        file="sample.py",
        old="last_B1 = sorted_BC.gather(1, num_kept_B1 - 1)",
        new="last_B1 = sorted_BC.gather(1, num_kept_B1.clamp(max=sorted_BC.shape[1] - 1))",
        tests=SAMPLE,
    ),
    Mutant(
        name="the looser of two cuts wins",
        file="sample.py",
        old="torch.where(cut_B1, torch.maximum(last_B1, least_B1), least_B1)",
        new="torch.where(cut_B1, last_B1, least_B1)",
        tests=SAMPLE,
    ),
    Mutant(
        name="the presence penalty counts prompts",
        file="sample.py",
        old="return torch.where(drawn_BV & (presence != 0)",
        new="return torch.where((drawn_BV | p.prompt_mask) & (presence != 0)",
        tests=SAMPLE,
    ),
    Mutant(
        name="the repetition penalty raises negative logits",
        file="sample.py",
        old="repeated_BV = torch.where(x_BV > 0, x_BV / repetition, x_BV * repetition)",
        new="repeated_BV = x_BV / repetition",
        tests=SAMPLE,
    ),
    Mutant(
        name="the frequency penalty counts once",
        file="sample.py",
        old="x_BV - frequency * p.counts, x_BV",
        new="x_BV - frequency, x_BV",
        tests=SAMPLE,
    ),
    Mutant(
        name="candidates below the widest top-k",
        file="sample.py",
        old="for c in (32, 128, 1024) if widest <= c",
        new="for c in (32, 128, 1024) if widest <= c + 1",
        tests=SAMPLE,
    ),
    Mutant(
        name="log-probabilities after the penalties",
        file="sample.py",
        old="logprobs_BV = logits.float().log_softmax(1)",
        new="logprobs_BV = x_BV.float().log_softmax(1)",
        tests=SAMPLE,
    ),
    Mutant(
        name="stop ids keep doubles",
        file="sampling_params.py",
        old='return tuple(sorted({_int("stop_token_ids", i, 0, INT32_MAX) for i in ids}))',
        new='return tuple(sorted(_int("stop_token_ids", i, 0, INT32_MAX) for i in ids))',
        tests=OPTIONS,
    ),
    Mutant(
        name="a token id of the vocabulary's size is accepted",
        file="sampling_params.py",
        old="if not 0 <= token_id < vocab_size:",
        new="if not 0 <= token_id <= vocab_size:",
        tests=(*OPTIONS, *ENGINE),
    ),
    Mutant(
        name="a top-k below zero of a checkpoint is refused",
        file="sampling_params.py",
        old="return 0 if value < low else high",
        new="return low if value < low else high",
        tests=OPTIONS,
    ),
    # Chunks
    Mutant(
        name="later gaps are lost where a gap is cut",
        file="compose_layout.py",
        old="for at, offset in chunk.gaps if at > stop)",
        new="for at, offset in chunk.gaps if at > stop + 1)",
        tests=COMPOSE,
    ),
    Mutant(
        name="a gap at the cut counts twice",
        file="compose_layout.py",
        old="for at, offset in chunk.gaps if at <= stop), default=0)",
        new="for at, offset in chunk.gaps if at < stop), default=0)",
        tests=COMPOSE,
    ),
    Mutant(
        name="keys turn as if there were no gaps",
        file="compose_layout.py",
        old="pieces.append((stop - at, place - offset))",
        new="pieces.append((stop - at, place))",
        tests=COMPOSE,
    ),
    Mutant(
        name="a span of whole pages copies its tail",
        file="compose_layout.py",
        old="    if gone % page_size:\n",
        new="    if True:\n",
        tests=COMPOSE,
    ),
    Mutant(
        name="drop by shift keeps a gap at its start",
        file="compose_layout.py",
        old="shared, gaps = start // page_size, tuple(gap for gap in chunk.gaps if gap[0] < start)",
        new="shared, gaps = start // page_size, tuple(gap for gap in chunk.gaps if gap[0] <= start)",
        tests=COMPOSE,
    ),
    Mutant(
        name="the fraction to run again is rounded down",
        file="compose.py",
        old="count = math.ceil(recompute",
        new="count = math.floor(recompute",
        tests=COMPOSE,
    ),
    Mutant(
        name="a truncated chunk keeps its last page",
        file="chunks.py",
        old="pages=chunk.pages.truncate(pages_for(length, page_size)),",
        new="pages=chunk.pages.truncate(min(len(chunk.pages), length // page_size + 1)),",
        tests=CHUNKS,
    ),
    Mutant(
        name="a truncated chunk keeps the gap at its end",
        file="chunks.py",
        old="gaps=tuple(gap for gap in chunk.gaps if gap[0] < length),",
        new="gaps=tuple(gap for gap in chunk.gaps if gap[0] <= length),",
        tests=(*CHUNKS, *COMPOSE),
    ),
    Mutant(
        name="a truncated chunk stays approximate",
        file="chunks.py",
        old="provenance=EXACT if exact == length else chunk.provenance,",
        new="provenance=chunk.provenance,",
        tests=(*CHUNKS, *COMPOSE),
    ),
    Mutant(
        name="spare pages of a reply stay taken",
        file="chunks.py",
        old="pool = pools.release(state.pool, spare.tolist())",
        new="pool = state.pool",
        tests=(*CHUNKS, *GENERATE),
    ),
    Mutant(
        name="a chunk of the engine's size is refused",
        file="chunks.py",
        old="if num_tokens > limit:",
        new="if num_tokens >= limit:",
        tests=CHUNKS,
    ),
    # Chunk files
    Mutant(
        name="positions from zero alone",
        file="chunk_format.py",
        old="if positions[0] < 0 or (np.diff(positions.astype(np.int64)) <= 0).any():",
        new="if positions[0] < 0 or (np.diff(positions.astype(np.int64)) < 0).any():",
        tests=CHUNK_FILES,
    ),
    Mutant(
        name="a file of another version is read",
        file="chunk_format.py",
        old='if metadata.get("version") != VERSION:',
        new="if False:",
        tests=CHUNK_FILES,
    ),
    Mutant(
        name="a file that is too long is read",
        file="chunk_format.py",
        old="    if whole != status.st_size:\n",
        new="    if whole > status.st_size:\n",
        tests=CHUNK_FILES,
    ),
    Mutant(
        name="changed KV is not told",
        file="chunk_format.py",
        old="    if digest.hexdigest() != head.kv_sha256:\n",
        new="    if False:\n",
        tests=CHUNK_FILES,
    ),
    Mutant(
        name="keys of another rotation are loaded",
        file="chunk_file.py",
        old="if head.rope != (rope := _rope(config.rope)):",
        new="if (rope := _rope(config.rope)) is None:",
        tests=CHUNK_FILES,
    ),
    Mutant(
        name="a token id of the vocabulary's size is loaded",
        file="chunk_file.py",
        old="(head.tokens >= config.vocab_size)",
        new="(head.tokens > config.vocab_size)",
        tests=CHUNK_FILES,
    ),
    Mutant(
        name="shared pages are written by a load",
        file="chunk_file.py",
        old="low, (pool, index) = max(token, start), places[layer]",
        new="low, (pool, index) = token, places[layer]",
        tests=CHUNK_FILES,
    ),
    Mutant(
        name="the most recently used chunk goes first",
        file="state/store.py",
        old="        for key in sorted(used, key=used.__getitem__):\n",
        new="        for key in sorted(used, key=used.__getitem__, reverse=True):\n",
        tests=STORE,
    ),
    Mutant(
        name="a store that is just full evicts",
        file="state/store.py",
        old="            if size <= limit:\n",
        new="            if size < limit:\n",
        tests=STORE,
    ),
    Mutant(
        name="a chunk as long as the prompt is passed over",
        file="state/store.py",
        old="entry.num_tokens <= len(tokens)",
        new="entry.num_tokens < len(tokens)",
        tests=STORE,
    ),
    # Text
    Mutant(
        name="tojson ignores sort_keys",
        file="chat_template.py",
        old="separators=separators, sort_keys=sort_keys)",
        new="separators=separators)",
        tests=TOKENIZER,
    ),
    Mutant(
        name="tojson ignores separators",
        file="chat_template.py",
        old="separators=separators, sort_keys=sort_keys)",
        new="sort_keys=sort_keys)",
        tests=TOKENIZER,
    ),
    Mutant(
        name="tojson ignores ensure_ascii",
        file="chat_template.py",
        old="ensure_ascii=ensure_ascii,",
        new="ensure_ascii=False,",
        tests=TOKENIZER,
    ),
    Mutant(
        name="tools without a template of their own",
        file="chat_template.py",
        old='(usual if variables.get("tools") is None else with_tools)',
        new="usual",
        tests=(*TOKENIZER, *TOKENIZER_FILES),
    ),
    Mutant(
        name="no default template is no refusal",
        file="chat_template.py",
        old=") or other)(variables)",
        new=") or with_tools)(variables)",
        tests=(*TOKENIZER, *TOKENIZER_FILES),
    ),
    Mutant(
        name="blocks are not stripped",
        file="chat_template.py",
        old="trim_blocks=True, lstrip_blocks=True",
        new="trim_blocks=True",
        tests=TOKENIZER,
    ),
    Mutant(
        name="a piece ends inside a character",
        file="tokenizer.py",
        old="if not piece or piece.endswith(REPLACEMENT):",
        new="if not piece:",
        tests=TOKENIZER,
    ),
    Mutant(
        name="variables win over messages",
        file="tokenizer.py",
        old='{"tools": None, "documents": None, **self.special_tokens, **variables}',
        new='{"tools": None, "documents": None, **variables, **self.special_tokens}',
        tests=(*TOKENIZER, *TOKENIZER_FILES),
    ),
    Mutant(
        name="a think block begins at a word",
        file="thinking.py",
        old="begin < start and _behind_space",
        new="begin <= start and _behind_space",
        tests=THINKING,
    ),
    # Loading
    Mutant(
        name="two tensors for one parameter", file="weights.py", old="        if name in named:\n", new="        if False:\n", tests=WEIGHTS
    ),
    Mutant(
        name="the fingerprint leaves the end of a tensor out",
        file="weights.py",
        old="for at in (header.start, (header.start + last) // 2, last):",
        new="for at in (header.start, (header.start + last) // 2):",
        tests=WEIGHTS,
    ),
    Mutant(
        name="equal heads are compared by their first bytes",
        file="weights.py",
        old="            left -= size\n",
        new="            left = 0\n",
        tests=WEIGHTS,
    ),
    Mutant(
        name="a tensor in two shards",
        file="headers.py",
        old="            if name in headers:\n",
        new="            if False:\n",
        tests=(*HEADERS, *WEIGHTS),
    ),
    Mutant(
        name="a tensor that the index places elsewhere",
        file="headers.py",
        old="if places is not None and places.get(name) != file:",
        new="if places is not None and name not in places:",
        tests=(*HEADERS, *WEIGHTS),
    ),
    Mutant(
        name="the index may name what is not there",
        file="headers.py",
        old="if places is not None and (absent := sorted(places.keys() - headers.keys())):",
        new="if absent := []:",
        tests=(*HEADERS, *WEIGHTS),
    ),
    Mutant(
        name="a commit's beginning is ambiguous",
        file="checkpoint_folder.py",
        old="    if len(found) == 1:\n",
        new="    if found:\n",
        tests=HUB,
    ),
    Mutant(
        name="rope settings disagree",
        file="hf_config.py",
        old="if value is not None and rope.setdefault(name, value) != value:",
        new="if value is not None and rope.setdefault(name, value) is None:",
        tests=CONFIG,
    ),
    Mutant(
        name="a window as long as the model",
        file="hf_config.py",
        old='if window >= read_int(hf, "max_position_embeddings", window + 1):',
        new='if window > read_int(hf, "max_position_embeddings", window + 1):',
        tests=CONFIG,
    ),
    Mutant(
        name="yarn's mscale is not divided",
        file="hf_config.py",
        old=' / magnitude(read_float(rope, "mscale_all_dim"))',
        new="",
        tests=(*CONFIG, "tests/models/test_parity.py"),
    ),
    Mutant(
        name="long requests from one token too early",
        file="config.py",
        old="if max_model_len is None or max_model_len <= usual:",
        new="if max_model_len is None or max_model_len < usual:",
        tests=CONFIG,
    ),
    Mutant(
        name="an odd head is accepted", file="config.py", old="        if self.head_dim % 2:\n", new="        if False:\n", tests=CONFIG
    ),
    # Shared pages
    Mutant(
        name="a page that a query sees in part is shared",
        file="sharing.py",
        old="rows[whole[rows] > at], at)",
        new="rows[whole[rows] >= at], at)",
        tests=SHARING,
    ),
    Mutant(
        name="runs just worth sharing are not",
        file="sharing.py",
        old="* self.page_size >= RUN_TOKENS",
        new="* self.page_size > RUN_TOKENS",
        tests=SHARING,
    ),
    Mutant(
        name="steps just worth sharing are not",
        file="sharing.py",
        old="if spared >= (1 if self.always else least) else None",
        new="if spared > (1 if self.always else least) else None",
        tests=SHARING,
    ),
    Mutant(
        name="prompts that just fill tiles are not shared",
        file="sharing.py",
        old="* self.group > FULL_TILE * len(counts):",
        new="* self.group >= FULL_TILE * len(counts):",
        tests=SHARING,
    ),
    Mutant(
        name="lost pages of one row count for all",
        file="sharing.py",
        old="np.minimum(whole, lost.argmax(1)), whole)",
        new="0, whole)",
        tests=SHARING,
    ),
    Mutant(
        name="a workspace that is just full is refused",
        file="ops/cascade.py",
        old="if len(work.items) > self.max_items or len(work.members) > self.workspace.num_parts:",
        new="if len(work.items) >= self.max_items or len(work.members) > self.workspace.num_parts:",
        tests=CASCADE,
    ),
    Mutant(
        name="the window is a token wider",
        file="ops/cascade.py",
        old="hidden |= at < visible[:, None] - window",
        new="hidden |= at < visible[:, None] - window - 1",
        tests=CASCADE,
    ),
    # Run-ahead and decode
    Mutant(
        name="a row that only reads runs ahead",
        file="run_ahead.py",
        old="s.pages.length * page_size if s.todo else 0,",
        new="s.pages.length * page_size,",
        tests=AHEAD,
    ),
    Mutant(
        name="a row with just enough room stops the others",
        file="run_ahead.py",
        old="in rooms if room < wanted)",
        new="in rooms if room <= wanted)",
        tests=AHEAD,
    ),
    Mutant(
        name="thrown away rows are not counted",
        file="run_ahead.py",
        old="self.unused += len(gone) if self.launched else 0",
        new="self.unused += 0",
        tests=AHEAD,
    ),
    Mutant(
        name="equal rows change places",
        file="run_ahead.py",
        old='kind="stable")] = np.arange(len(rows))',
        new='kind="stable")[::-1]] = np.arange(len(rows))',
        tests=AHEAD,
    ),
    Mutant(
        name="a stepped carry is accepted",
        file="decode.py",
        old="    if ran != num_steps:\n",
        new="    if ran < num_steps:\n",
        tests=SESSION,
    ),
    Mutant(
        name="sampled positions are a place late",
        file="decode.py",
        old="seq_lens - 1 + carry.active",
        new="seq_lens + carry.active",
        tests=(*SESSION, *ENGINE),
    ),
    Mutant(
        name="a commit counts a step that it has no room for",
        file="session.py",
        old="num_steps = min(num_run, session.room)",
        new="num_steps = num_run",
        tests=SESSION,
    ),
    Mutant(
        name="a session's last room is refused",
        file="session.py",
        old="if len(sequence.tokens) + room > limit:",
        new="if len(sequence.tokens) + room >= limit:",
        tests=SESSION,
    ),
    Mutant(
        name="a context that is wholly filled counts as reused",
        file="session.py",
        old="reused = 0 if num_steps else sum(s.todo == 0 for s in session.sequences)",
        new="reused = 0",
        tests=SESSION,
    ),
    Mutant(
        name="replies are bounded a page short",
        file="generate.py",
        old="limit = min(sequence.request.max_len, (shared + available) * size)",
        new="limit = min(sequence.request.max_len, available * size)",
        tests=GENERATE,
    ),
    Mutant(
        name="replies that fit exactly are refused",
        file="generate.py",
        old="    if needed > available:\n",
        new="    if needed >= available:\n",
        tests=GENERATE,
    ),
)
