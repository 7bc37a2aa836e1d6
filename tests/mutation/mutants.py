"""Small bugs that tests must find. Each changes one line of the package and names the tests that should fail on it.

Most are of four kinds that tests miss easily. Inputs are too symmetric to show them, they cost time or memory and leave the tokens right,
they lie exactly at a boundary, or they are in a branch that only raises an error.
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


def bugs(file: str, tests: tuple[str, ...], *changes: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file by (name, old text, new text)."""
    return [Mutant(name=name, file=file, old=old, new=new, tests=tests) for name, old, new in changes]


PAGES = ("tests/state/test_pages.py",)
PREFIX = ("tests/state/test_prefix_cache.py",)
SEQUENCE_PAGES = ("tests/state/test_sequence_pages.py",)
FRAMES = ("tests/state/test_window_frames.py",)
WINDOWS = ("tests/engine/test_windows.py",)
STEADY = ("tests/state/test_steady.py",)
REQUEST = ("tests/state/test_request.py",)
SCHEDULER = ("tests/engine/test_scheduler.py",)
STRANDED = ("tests/engine/test_stranded.py",)
PRIORITIES = ("tests/engine/test_priorities.py",)
PROMPT_ROOM = ("tests/engine/test_prompt_room.py",)
PREFILL_RATE = ("tests/engine/test_prefill_rate.py",)
ROUTING = ("tests/entrypoints/ray/test_routing.py",)
FAILOVER = ("tests/entrypoints/ray/test_failover.py",)
BATCH_FILES = ("tests/entrypoints/ray/test_batch_files.py",)
HEAP = ("tests/state/test_heap.py",)
FUSED_STEP = ("tests/ops/test_fused_step.py",)
EXPECTED_REPLY = ("tests/state/test_expected_reply.py",)
BEGINNINGS = ("tests/engine/test_shared_beginnings.py",)
STEP = ("tests/engine/test_step.py",)
GENERATE = ("tests/chunks/test_generate.py",)
SESSION = ("tests/chunks/test_session.py", "tests/engine/test_donation.py")
SCORE = ("tests/chunks/test_score.py",)
STEP_LOGPROBS = ("tests/engine/test_step_logprobs.py",)
PROMPT_LOGPROBS = ("tests/chunks/test_prompt_logprobs.py",)
SHARED_CONTEXTS = ("tests/chunks/test_shared_contexts.py",)
CAPTURE = ("tests/executor/test_capture.py",)
BRANCHES = ("tests/executor/test_branches.py",)
LOOP = ("tests/chunks/test_loop.py",)
PROCESS_LOGITS = ("tests/chunks/test_process_logits.py", "tests/sampling/test_process_logits.py")
PROGRAMS = ("tests/property/test_session_programs.py",)
OUTPUT = ("tests/engine/test_output.py",)
ASYNC = ("tests/entrypoints/test_async_llm.py",)
CLIENTS = ("tests/engine/test_clients.py",)
DETOKENIZER = ("tests/tokenizer/test_detokenizer.py",)
STEP_LOG = ("tests/state/test_step_log.py",)
CUTS = (
    "tests/sampling/test_sampler.py::test_ties_at_every_cut_are_kept_together",
    "tests/sampling/test_sampler.py::test_a_mass_that_is_reached_exactly_needs_no_further_token",
    "tests/sampling/test_sampler.py::test_a_token_at_exactly_min_p_counts_for_the_mass",
    "tests/sampling/test_sampler.py::test_each_cut_sees_what_the_one_before_left",
)
SLOTS = ("tests/sampling/test_table_slots.py",)
ROW_OPTIONS = ("tests/sampling/test_row_options.py",)
GRAPHS = ("tests/executor/test_graph_executor.py",)
ROWS = ("tests/engine/test_masked_rows.py",)
MASKED = ("tests/engine/test_masked_tokens.py",)
GRAMMAR = ("tests/sampling/test_grammar.py", "tests/engine/test_grammar.py")
COMPOSE = ("tests/chunks/test_compose.py",)
HANDLES = ("tests/chunks/test_handles.py",)
CHUNK_FILES = (
    "tests/chunks/storage/test_file.py::test_ids_that_do_not_fit_are_refused",
    "tests/chunks/storage/test_file.py::test_shared_pages_are_not_written",
)
STORE = (
    "tests/chunks/storage/test_store.py::test_the_longest_exact_prefix",
    "tests/chunks/storage/test_store.py::test_the_least_recently_used_goes_first",
    "tests/chunks/storage/test_store.py::test_a_larger_limit_before",
)
TOKENIZER = ("tests/tokenizer/test_tokenizer.py",)
TEXT_LIMIT = ("tests/tokenizer/test_limit.py",)
TEMPLATE_BOUNDS = (
    "tests/tokenizer/test_hostile_templates.py::test_a_hostile_template_takes_little_memory",
    "tests/tokenizer/test_hostile_templates.py::test_the_message_names_the_limit",
    "tests/tokenizer/test_hostile_templates.py::test_a_long_conversation_is_rendered",
)
TOKENIZER_FILES = ("tests/loading/test_tokenizer_files.py",)
RANKS = (
    "tests/loading/quantisation/test_ranks.py",
    "tests/models/common/test_sharding.py",
    "tests/ops/distributed/test_process_group.py::test_a_prompt_in_two_halves",
)
WEIGHTS = (
    "tests/loading/test_weights.py::test_two_tensors_for_one_parameter_are_refused_by_name",
    "tests/loading/test_weights.py::test_a_head_that_differs_at_its_end_alone_counts",
    "tests/loading/test_weights.py::test_fingerprint_sees_config_headers_and_bytes",
)
HEADERS = ("tests/loading/test_safetensors_headers.py",)
CONFIG = ("tests/models/common/test_hf_config.py",)
HIDDEN = ("tests/models/test_torch_func.py",)
CASCADE_POLICY = ("tests/executor/test_cascade_policy.py",)
RUN_AHEAD = ("tests/executor/test_run_ahead.py",)
CASCADE = ("tests/ops/attention/test_cascade.py",)
HUB = ("tests/loading/test_hub.py",)
LAYOUT = ("tests/chunks/test_layout.py",)
DONATION = ("tests/engine/test_donation.py",)
REQUEST_ERRORS = ("tests/engine/test_request_errors.py",)
PROMPT = ("tests/engine/test_prompt.py",)
CHECK = (
    "tests/models/check/test_check.py::test_the_logits_in_float64_are_capped_as_the_model_caps_them",
    "tests/models/check/test_check.py::test_agreement_counts_each_pair_by_itself",
    "tests/models/check/test_check.py::test_a_fault_of_the_smallest_batch_is_found",
    "tests/models/check/test_check.py::test_a_row_that_other_experts_run_is_no_fault",
    "tests/models/check/test_check.py::test_an_error_that_is_its_bound_is_within_it",
    "tests/models/check/test_check.py::test_the_warning_names_the_error_that_is_most_above_its_bound",
    "tests/models/check/test_check.py::test_keys_that_are_no_numbers_are_said_to_be",
    "tests/models/check/test_check.py::test_each_gain_is_of_its_own_norm",
    "tests/models/check/test_check.py::test_each_figure_is_in_its_own_column",
    "tests/models/check/test_check.py::test_the_clearest_places_of_disagreement_are_shown",
    "tests/models/check/test_check.py::test_a_text_of_all_positions_and_batches_of_all_tokens",
)
CHECK_COMMAND = ("tests/entrypoints/cli/check/test_preflight.py",)
THINKING = ("tests/chunks/test_thinking.py",)
MAIN = "tests/entrypoints/cli/test_main.py"
CONVERSATION = (
    f"{MAIN}::test_a_conversation_of_all_tokens_leaves_no_room_for_a_reply",
    f"{MAIN}::test_the_beginning_of_a_stop_text_is_not_shown",
    "tests/chunks/test_thinking.py::test_the_figures_of_the_turns_are_all_that_ran",
    "tests/chunks/test_thinking.py::test_kept_thinking_leaves_room_for_a_reply",
)
VIEW = (f"{MAIN}::test_a_terminal_without_styles_is_not_steered_either", f"{MAIN}::test_a_prompt_may_have_opened_the_think_block")
ARGUMENTS = ("tests/entrypoints/test_arguments.py",)
COMMANDS = (
    f"{MAIN}::test_of_a_prompt_on_stdin_only_the_last_line_end_goes",
    f"{MAIN}::test_options_of_the_model_reach_the_loader",
    f"{MAIN}::test_options_of_a_chat_reach_it",
    f"{MAIN}::test_a_character_that_the_output_lacks_is_replaced",
    f"{MAIN}::test_a_reset_keeps_the_system_message_and_the_thinking",
    f"{MAIN}::test_a_message_without_any_reply_is_forgotten",
    f"{MAIN}::test_errors_are_one_line_and_exit_2",
)
MEMORY_COMMAND = ("tests/entrypoints/memory/test_memory.py::test_errors_are_one_line_and_exit_2",)
LLM = ("tests/entrypoints/test_llm.py",)

MUTANTS: tuple[Mutant, ...] = (
    # State
    *bugs(
        "state/pages.py",
        PAGES,
        ("owners left are kept in sorted order", "        left = counts.get(unique)\n", ""),
        ("a page retained twice by one call counts once", "owners + times", "owners + 1"),
    ),
    *bugs(
        "state/prefix_cache.py",
        PREFIX,
        (
            "an eviction goes on past its count",
            "due = due[index.contains(due)][: index.num_idle - wanted]",
            "due = due[index.contains(due)]",
        ),
        (
            "the pages after one in the middle of a node are not found",
            "    if page >= 0:  # in the middle",
            "    if page < ROOT:  # in the middle",
        ),
        (
            "a tail follows its own copy, not the indexed page",
            "first, parent = first + len(others), int(others[-1])",
            "first += len(others)",
        ),
    ),
    *bugs(
        "state/pool.py",
        PREFIX,
        ("a released run becomes evictable from its beginning", "    backwards = held[::-1]\n", "    backwards = held\n"),
    ),
    *bugs(
        "state/prefix_keys.py",
        ("tests/state/test_prefix_keys.py",),
        ("namespaces share keys", 'pack("<q", namespace)', 'pack("<q", 0)'),
        ("a key forgets the nodes before", "return parts[::-1], ROOT - page", "return [], ROOT - page"),
    ),
    *bugs(
        "state/offload.py",
        ("tests/state/test_offload.py",),
        (
            "a prefix that is kept already counts as new",
            "    host = replace(host, ages=lru.remove(host.ages, _array(at for at in found if at is not None)))\n",
            "    pass\n",
        ),
        (
            "of too many pages the last ones of the prompt are kept",
            "if at is None and skipped:",
            "if at is None and next(free, None) is None:",
        ),
        ("what was read is replaced first", "once = _array(dict.fromkeys(held[::-1].tolist()))", "once = _array(())"),
        ("lost host pages are found", "[at for at in lost if at in host.key_of]", "[]"),
        ("context costs nothing", "(stop - start + context / self.context_doubling)", "(stop - start)"),
        ("the first tokens have the context of the last", "self._context(stop) - self._context(start)", "(stop - start) * stop"),
        ("windows do not bound context", "min(count, self.most_context)", "count"),
        ("copies that take longer are made", "< rates.seconds_to_run(", "< 2 * rates.seconds_to_run("),
    ),
    *bugs(
        "state/moved_chunks.py",
        ("tests/chunks/test_offload.py",),
        ("chunks in host memory are replaced", "and at in host.key_of]", "]"),
        ("what a call gave up is free at once", "held=(*host.held, *host.moved[liveness].pages))", "held=host.held)"),
        (
            "a second handle owns no host page",
            "used=page_ops.retain(host.used, pages), moved=host.moved.set(new",
            "moved=host.moved.set(new",
        ),
    ),
    *bugs(
        "engine/resident.py",
        ("tests/chunks/test_offload.py",),
        ("a failed call trusts what it overwrote", "state.runtime.lease.lose(lost, taken.host_pages)", "pass"),
    ),
    *bugs(
        "engine/host_copies.py",
        ("tests/engine/test_host_memory.py",),
        (
            "calls on chunks forget their copies",
            "return copied(replace(state, pool=replace(pool, host=host)), moves, taken, host, taken.pages, taken.frames)",
            "return replace(state, pool=replace(pool, host=host))",
        ),
        ("copies out count as copies in", "loaded_tokens=into * size", "loaded_tokens=out * size"),
    ),
    *bugs(
        "engine/host_copies.py",
        ("tests/engine/test_disk_chunks.py",),
        ("what leaves the device is not written", "disk.keep(lasting(host, written))", "pass"),
    ),
    *bugs(
        "ops/kernel_keys.py",
        ("tests/ops/test_kernel_keys.py",),
        ("keys are made when kernels are launched", "if isinstance(function, JITFunction):", "if False:"),
        ("what is no key stays", "function.hash = None", "pass"),
    ),
    *bugs(
        "executor/prompt_graphs.py",
        ("tests/executor/test_prompt_buffers.py",),
        (
            "prompts far behind others replay a graph",
            "if 2 * _attention_flops(host, self._config) > self._flops_while_launching:",
            "if _attention_flops(host, self._config) > self._flops_while_launching:",
        ),
        (
            "tokens before a prompt are no work for attention",
            "counts @ (host.seq_lens - counts // 2)",
            "counts @ (counts - counts // 2)",
        ),
        ("experts count as far as they are stored", "* (routed if stacked else 1.0)", "* 1.0"),
        ("more sizes are those of ranks", "LARGE_SIZES if _shared(model) else BETWEEN_SIZES", "BETWEEN_SIZES"),
        ("no sizes lie between others", "LARGE_SIZES if _shared(model) else BETWEEN_SIZES", "LARGE_SIZES if _shared(model) else ()"),
        ("a busy host counts as a quiet one", "slower = 1 if _shared(model) or moe is not None else BUSY", "slower = 1"),
        ("long prompts of ranks do not run as halves", "slower = 1 if _shared(model) or", "slower = 1 if"),
        (
            "experts have graphs that are slower than launches",
            "slower = 1 if _shared(model) or moe is not None",
            "slower = 1 if _shared(model)",
        ),
        (
            "ranks capture what suits their own GPU",
            "(most,) = least(model.config.mesh, [min(limits.max_num_batched_tokens, _most_tokens(model))])",
            "most = min(limits.max_num_batched_tokens, _most_tokens(model))",
        ),
        (
            "ranks replay what suits their own GPU",
            "(self._flops_while_launching,) = least(model.config.mesh, [int(_flops_while_launching(model))])",
            "self._flops_while_launching = int(_flops_while_launching(model))",
        ),
        ("one rank alone counts as several", "return mesh is not None and mesh.size > 1", "return mesh is not None"),
    ),
    *bugs(
        "executor/kv_disk.py",
        ("tests/engine/test_disk_chunks.py",),
        ("reads of failed calls go on", "any(at in self._under_way for at in pages)", "False"),
    ),
    *bugs(
        "state/disk_pages.py",
        ("tests/state/test_split_reads.py",),
        (
            "pages run as if they came first",
            "rates.seconds_to_run(start * page_size, (start + count) * page_size)",
            "rates.seconds_to_run(0, count * page_size)",
        ),
        ("pages of host memory are no context", "before_run, wanted[first:], start + first)", "before_run, wanted[first:], start)"),
    ),
    *bugs(
        "state/disk_pages.py",
        ("tests/engine/test_disk_chunks.py",),
        ("last pages are written", "is not None and is_full(key)", "is not None"),
        ("reads replace what a chunk has", "for at in there if host.used.refcount(at) == 1]", "for at in there]"),
        ("reads take the room of chunks", "host.used.num_free + host.ages.count - len(idle))", "host.num_pages - len(there))"),
    ),
    *bugs(
        "state/disk_frames.py",
        ("tests/engine/test_disk_windows.py",),
        ("all frames are read", "self.before + count) >= retired", "self.before + count) >= 0"),
        ("frames on the device are read", "inside[:num_here] & ~self.here[:count]", "inside[:num_here]"),
    ),
    *bugs(
        "state/disk_pages.py",
        ("tests/engine/test_disk_windows.py",),
        ("a whole page does not replace a bare one", "(part < WHOLE or known not in bare)", "True"),
        ("frames are not written", "((key,) if at in host.bare else (key, frame_key(key)))", "(key,)"),
        ("too little room is overlooked", "if frames is not None and 0 < first + end < count:", "if False:"),
    ),
    *bugs(
        "engine/disk_lookup.py",
        ("tests/engine/test_disk_windows.py",),
        ("frames on disk are taken for granted", "if stored and self._folder.look(frame_key(key)):", "if stored:"),
        ("chunks read the last window alone", "window = None if asked.keep else pool.frames.window", "window = pool.frames.window"),
    ),
    *bugs(
        "engine/disk_facts.py",
        ("tests/engine/test_disk_windows.py",),
        ("ranks do not tell of frames", "np.minimum.reduce([one[: min(map(len, told))] for one in told])", "had"),
    ),
    *bugs(
        "engine/disk_flush.py",
        ("tests/engine/test_disk_windows.py",),
        ("frames are not flushed", "if second is not None and second[place] >= 0", "if False and second[place] >= 0"),
    ),
    *bugs(
        "engine/preemption.py",
        ("tests/engine/test_windows.py",),
        ("frames of waiting requests are overlooked", "frames.needs.get(pages) == needed[pages]", "needed[pages] < 0"),
    ),
    *bugs(
        "state/split_reads.py",
        ("tests/state/test_split_reads.py",),
        ("a split need not gain anything", "(1 - 1 / GAIN) * min(best, running)", "min(best, running)"),
        ("more is read than there is room for", "loaded = bisect(gone, room) - 1", "loaded = len(gone) - 1"),
        ("a front runs as long as all reads take", "math.ceil(between * read / (run + read))", "between"),
        ("a front stops for reads that are behind it", "if between <= 0 or", "if"),
        ("a front has no context", "seconds_to_run(num_filled, num_filled + page_size)", "seconds_to_run(0, page_size)"),
        ("a pass has no context", "seconds_to_run(num_filled, num_filled + 1)", "seconds_to_run(0, 1)"),
    ),
    *bugs(
        "state/disk_pages.py",
        ("tests/engine/test_split.py",),
        ("a busy device does not matter", "before_run=before_run,\n", "before_run=0.0,\n"),
    ),
    *bugs(
        "engine/meeting.py",
        ("tests/engine/test_split.py",),
        ("what was read is not met", "draft.running[at] = gone_on(draft, sequence)", "draft.running[at] = sequence"),
        (
            "a missing page ends a split",
            "sequence.num_filled, least) if missing else None",
            "sequence.num_filled, least) if False else None",
        ),
    ),
    *bugs(
        "executor/kv_disk.py",
        ("tests/engine/test_split.py",),
        ("the first page of a split is read first", "reversed(order) if last_first else order", "order"),
    ),
    *bugs(
        "engine/host_copies.py",
        ("tests/engine/test_split.py",),
        ("copies begin while pages are read", "first.num_filled or (host.disk is not None and host.disk.reading)", "first.num_filled"),
    ),
    *bugs(
        "engine/host_copies.py",
        ("tests/engine/test_host_windows.py",),
        ("copies begin in models with windows", "not len(host.by_key) or pool.frames is not None:", "not len(host.by_key):"),
    ),
    *bugs(
        "engine/disk_pages.py",
        ("tests/engine/test_split.py",),
        ("prompts that run take no time", "for s in _prompts(state)), 0.0)", "for s in ()), 0.0)"),
    ),
    *bugs(
        "engine/host_pages.py",
        ("tests/engine/test_loading.py",),
        ("what has context is loaded as if it came first", "num_bytes, host.rates, sequence.num_filled)", "num_bytes, host.rates)"),
    ),
    *bugs(
        "engine/host_pages.py",
        ("tests/engine/test_split.py",),
        ("a partly filled page keeps its owner", "pool = pools.release(pool, sequence.pages.array(held))", "pass"),
    ),
    *bugs(
        "engine/disk_flush.py",
        ("tests/engine/test_disk_budget.py",),
        ("what was used first is written", "state.pool, pages=pages,", "state.pool, pages=pages[::-1],"),
        ("a flush writes what waits", "disk.give_up()", "pass"),
        ("files of what was used again are replaced", "disk.touch(known, todo.used)", "pass"),
        ("later pages count as used later", "todo.used -= len(part)", "todo.used += len(part)"),
        ("later host pages count as used later", "todo.used -= len(pairs)", "todo.used += len(pairs)"),
    ),
    *bugs(
        "executor/unwritten.py",
        ("tests/engine/test_disk_budget.py",),
        ("a flush goes on when the folder is full", "self.host_pages.clear()", "pass"),
        ("files take no room", "self.room -= num_bytes", "pass"),
    ),
    *bugs(
        "executor/kv_disk.py",
        ("tests/engine/test_disk_budget.py",),
        ("a small folder does not matter", "memory.num_pages - num_files // 2", "memory.num_pages // 2"),
        ("what was given up is written", "if number < self._num_given_up:", "if False:"),
        ("late pages are written", "self._num_kept - number > self.most_late", "False"),
        ("an idle engine writes all that waits", "self._writers.hold(busy or self._is_small)", "self._writers.hold(busy)"),
    ),
    *bugs(
        "executor/page_folder.py",
        ("tests/executor/test_page_folder.py",),
        ("files of a flush replace each other", "self.max_bytes - max(0, self._spare", "self.max_bytes - min(0, self._spare"),
    ),
    *bugs(
        "executor/page_file.py",
        ("tests/executor/test_page_folder.py",),
        ("files that are too long are trusted", "image, memoryview(more)]", "image]"),
    ),
    *bugs(
        "engine/disk_flush.py",
        ("tests/engine/test_disk.py",),
        ("a piece of a flush looks at all pages", "elif not waits and to_look_at <= 0:", "elif False:"),
    ),
    *bugs(
        "chunks/offload.py",
        ("tests/engine/test_disk_chunks.py",),
        ("chunks do not wait for reads", "state = with_reads_ended(state)", "pass"),
    ),
    *bugs(
        "chunks/storage/reserved.py",
        ("tests/chunks/storage/test_reserved.py", "tests/entrypoints/server/test_unread_chunks.py"),
        ("another chunk's file is read", "if not same or not np.array_equal(head.tokens, chunk.token_ids):", "if not same:"),
        ("pages that are filled are written again", "pages, num_before)(first, rows)", "pages, 0)(first, rows)"),
        ("a chunk that was read is not found", "chunk.token_ids[: chunk.num_exact], chunk.pages", "chunk.token_ids[:0], chunk.pages"),
    ),
    *bugs(
        "entrypoints/server/unread_chunks.py",
        ("tests/entrypoints/server/test_unread_chunks.py",),
        (
            "unread chunks share pages across namespaces",
            "0, held.state.config.page_size, namespace)]",
            "0, held.state.config.page_size, 0)]",
        ),
        ("a chunk counts as filled where another one was read", "int(differ[0]) if len(differ) else len(own)", "len(own)"),
        ("a chunk for which memory is short loses its name", "except OutOfPagesError as error:", "except ZeroDivisionError as error:"),
    ),
    *bugs(
        "entrypoints/server/chunk_reads.py",
        ("tests/entrypoints/server/test_unread_chunks.py", "tests/entrypoints/server/test_engine_loop.py"),
        ("what was used first is read first", "number = max((each for each", "number = min((each for each"),
        ("a busy engine reads what nobody waits for", "if number is None and idle:", "if number is None:"),
        ("the loop rests after it has told that a chunk has gone", "return True", "return False"),
    ),
    *bugs(
        "entrypoints/server/engine_loop.py",
        ("tests/entrypoints/server/test_unread_chunks.py",),
        ("requests do not wait for unread chunks", "self.named.first_unread(message.space, names)) is not None", "None) is not None"),
    ),
    *bugs(
        "entrypoints/server/chunk_pages.py",
        ("tests/entrypoints/server/test_unread_chunks.py",),
        ("unread chunks are moved to host memory", ".union(named.unread.keys())", ""),
    ),
    *bugs(
        "state/kept_ahead.py",
        ("tests/state/test_kept_ahead.py",),
        ("pages are kept although others are free", ", half) - pool.num_free", ", half)"),
        ("all of host memory is used ahead", "(host.used.num_free + host.ages.count) // 2", "host.num_pages"),
        ("a call never continues", "behind=more", "behind=False"),
    ),
    *bugs(
        "state/prefix_cache.py",
        ("tests/state/test_kept_ahead.py",),
        ("one large request fills host memory ahead", "most = min(most, limit - before)", "pass"),
    ),
    *bugs(
        "engine/host_copies.py",
        ("tests/engine/test_host_memory.py",),
        ("replies wait for copies ahead after prompts", "if alone and state.num_steps % ALONE:", "if num_run < 0:"),
        (
            "long prompts overtake copies ahead",
            "0 < num_run <= state.pool.pages.num_pages * config.page_size // (2 * SHARE * ALONE)",
            "num_run",
        ),
        ("an idle engine leaves copies ahead", "alone = busy and replied and few", "alone = replied and few"),
        ("copies ahead are forgotten after prompts", "replace(host, behind=True)", "host"),
    ),
    *bugs(
        "chunks/compose.py",
        ("tests/engine/test_host_memory.py",),
        ("free pages are written while copies ahead read them", "copied(state, None, taken, None, early, ())", "state"),
    ),
    *bugs(
        "state/pool.py",
        ("tests/state/test_kept_ahead.py",),
        ("pages kept later count as kept", "(since >= pool.host.ahead[0])", "(since > pool.host.ahead[0])"),
    ),
    *bugs(
        "state/offload.py",
        ("tests/state/test_kept_ahead.py",),
        ("lost pages count as kept ahead", "return replace(host, ahead=(0, -1))", "return replace(host)"),
    ),
    *bugs(
        "engine/host_pages.py",
        ("tests/engine/test_host_memory.py",),
        ("namespaces share host memory", "find(host, tokens, held, size, namespace, ", "find(host, tokens, held, size, 0, "),
        ("last pages are not found", "if last is not None and", "if False and"),
        (
            "the rates do not matter",
            "not (until or offload.worth_loading(num_tokens, num_bytes, host.rates, sequence.num_filled))",
            "False",
        ),
    ),
    *bugs(
        "engine/host_pages.py",
        ("tests/engine/test_loading.py",),
        ("each request may load as much as a step", "draft.load_room, draft.num_loaded = room - len(found), ", "draft.num_loaded = "),
        ("host pages that a request waits for are replaced like others", "host=offload.needed_soon(host, found[room:])", "host=host"),
        ("a request runs with the first of its pages", "        if filled < until:\n", "        if False:\n"),
    ),
    *bugs(
        "engine/scheduler.py",
        ("tests/engine/test_loading.py",),
        ("a request runs while it loads", "if s.todo > 1 and not s.loading]", "if s.todo > 1]"),
        (
            "a long prompt loads in the step that looks it up",
            "        load_more(draft, came)\n    return",
            "        load_more(draft)\n    return",
        ),
        ("prompts do not shorten loads", "host.loaded_beside(seconds)", "host.loaded_beside(0.0)"),
        (
            "prompts beside loads have no context",
            "seconds_to_run(s.num_filled, s.num_filled + prefill[id_of(s)])",
            "seconds_to_run(0, prefill[id_of(s)])",
        ),
    ),
    *bugs(
        "engine/admission.py",
        ("tests/engine/test_loading.py",),
        ("pages that are on their way are given to others", "draft.config.page_size) + owed_pages(draft)\n", "draft.config.page_size)\n"),
    ),
    *bugs(
        "engine/host_copies.py",
        ("tests/engine/test_loading.py",),
        ("replies wait for pages that are copied in", "    return not any(np.isin(", "    return False and not any(np.isin("),
        ("copies begin of what is on the device", "find(host, tokens, num_matched, size,", "find(host, tokens, 0, size,"),
        ("copies begin beside replies", "host is None or state.running or", "host is None or"),
        ("what has context begins as if it came first", "host.page_bytes, host.rates, filled)", "host.page_bytes, host.rates)"),
        ("copies begin for requests that have pages", "first is None or first.num_filled or", "first is None or"),
        ("copies begin in another namespace", "first.tokens.array(), first.request.namespace", "first.tokens.array(), 0"),
        (
            "copies begin of what runs faster",
            " if offload.worth_loading(num_tokens, len(held)",
            " if held or offload.worth_loading(num_tokens, len(held)",
        ),
    ),
    *bugs(
        "engine/host_pages.py",
        ("tests/engine/test_host_windows.py",),
        ("bare pages count as whole", "at >= 0 and at not in host.bare for at", "at >= 0 for at"),
        ("frames on the device are overlooked", "        have[: len(indexed)] |= frames.have(indexed)\n", ""),
        ("all frames come back", "behind = max(0, retired - held)", "behind = 0"),
    ),
    *bugs(
        "state/host_loads.py",
        ("tests/engine/test_host_windows.py",),
        ("frames of pages on the device do not come back", "framed = (*lacking.tolist(), ", "framed = (*(), "),
        ("frames of pages come from their neighbours", "second.item(place)) for", "second.item(what.frames[0])) for"),
    ),
    *bugs(
        "state/pool.py",
        ("tests/engine/test_host_windows.py",),
        ("frames that are taken are not kept", "host = kept(pool, lost[pool.prefix.contains(lost)])", "host = pool.host"),
        ("a page without KV is kept", "there = np.flatnonzero(first >= 0)", "there = np.arange(len(first))"),
    ),
    *bugs(
        "state/moved_chunks.py",
        ("tests/engine/test_host_windows.py",),
        ("a chunk leaves its frames", "if second is not None and (known_at is None or at in bare):", "if False:"),
    ),
    *bugs(
        "executor/kv_offload.py",
        ("tests/executor/test_kv_offload.py",),
        ("pages are read before their copy has ended", "            copies.hold_engine(copied)\n", ""),
        (
            "a stage is filled before its copy has ended",
            "            copies.hold_engine(stage.free)\n",
            "            pass\n",
        ),
        ("a page is written before it was gathered", "max(gathered.get(page, 0) for _, page in part)", "0"),
        ("a stage is filled before it was scattered", "            copies.hold(stage.free)\n", "            pass\n"),
        ("copies out wait for copies that have begun", " if begun is None else begun.before", ""),
        ("what has begun is used after it has changed", "at not in to or at in out or ", "at not in to or "),
        ("a begun copy waits for copies out", "gathered.get(to[at], 0) > size * len(self._out)", "False"),
        (
            "copies begin before the host page is written",
            "        self._inward.hold(self._outward.mark())\n        self._hold_for_ahead(self._inward, {*held})\n",
            "        self._hold_for_ahead(self._inward, {*held})\n",
        ),
        ("a plan reads before it writes", "fresh = any(at in moved_out for at, _ in part)", "fresh = False"),
        ("only single host pages are copied", "if stop < len(held) and held[stop] == held[stop - 1] + 1:", "if stop < len(held):"),
        (
            "pages are written before they were copied ahead",
            "            self._aside.hold_engine(self._ahead[last].gathered)\n",
            "            pass\n",
        ),
        ("host pages are read before their copies ahead", "                copies.hold(each.ended)\n", "                pass\n"),
        ("copies ahead overtake copies out", "        self._aside.hold(self._outward.mark())\n", ""),
        ("threads do not wait for copies ahead", "self._inward.mark(), self._aside.mark()", "self._inward.mark(), self._outward.mark()"),
    ),
    *bugs(
        "state/sequence_pages.py",
        SEQUENCE_PAGES,
        (
            "indexed pages replace as many of one's own",
            "if len(matched) * page_size <= sequence.num_filled:",
            "if len(matched) * page_size < sequence.num_filled:",
        ),
        (
            "approximate KV enters the index on preemption",
            "tokens, held = sequence.tokens.array(0, sequence.num_exact)",
            "tokens, held = sequence.tokens.array(0, sequence.num_filled)",
        ),
    ),
    *bugs(
        "state/request.py",
        REQUEST,
        ("the queue forgets the turn of a request", "turns, count = pushed(turns, request.turn), count + 1", "count = count + 1"),
        (
            "a turn without a request comes first",
            "while turns is not None and turns.least[1] not in items:",
            "if False and turns is not None:",
        ),
        ("turns without requests pile up", "if count > 2 * len(items) + STALE:", "if count < 0:"),
        (
            "a queue lists its requests by id",
            "key=lambda sequence: sequence.request.turn))",
            "key=lambda sequence: sequence.request.request_id))",
        ),
    ),
    *bugs(
        "state/request.py",
        PRIORITIES,
        ("ageing is ignored", "return priority * AGEING + num_steps", "return (priority << 40) + num_steps"),
        ("priorities are reversed", "return priority * AGEING + num_steps", "return num_steps - priority * AGEING"),
        ("equals run in order of rank alone", "return self.rank, self.request_id", "return self.rank, -self.request_id"),
    ),
    *bugs(
        "state/heap.py",
        HEAP,
        ("a heap that leans to the right", "if left is None or left.height < right.height:", "if left is None:"),
        ("the greater key is on top", "if other.least < one.least:", "if other.least > one.least:"),
    ),
    *bugs(
        "state/expected_reply.py",
        EXPECTED_REPLY,
        ("replies at their limits tell nothing", "return min(expected + expected // 16 + 1, longest)", "return expected"),
        ("preemptions tell nothing", "        expected += expected // 8 + 1", "        expected += 0"),
        ("early replies tell too much", "(num_generated * 2 // 3 - expected) // 16", "(num_generated - expected) // 16"),
    ),
    *bugs(
        "engine/scheduler.py",
        PROMPT_ROOM,
        (
            "a long prompt takes all in the step that admits it",
            "part = room.without_share() if must_leave_share(draft, room) else room",
            "part = room",
        ),
        ("a share is left to a request that has no place", "or len(draft.running) + 1 >= draft.config.max_num_seqs:", "or False:"),
    ),
    *bugs(
        "engine/prompt_room.py",
        PROMPT_ROOM,
        (
            "the bound holds although no reply goes on",
            "bound = config.max_prefill_tokens if num_decoding else None",
            "bound = config.max_prefill_tokens",
        ),
        ("the bound is ignored", "bound = config.max_prefill_tokens if num_decoding else None", "bound = None"),
        ("context counts twice", "start = self.doubling + sequence.num_filled", "start = self.doubling + 2 * sequence.num_filled"),
        ("a long prompt leaves nothing", "self.work - self.bound // SHARE", "self.work"),
        (
            "a long prompt leaves a part to a long one",
            "return self.bound is not None and num_tokens <= self.bound",
            "return self.bound is not None and num_tokens <= 7 * self.bound",
        ),
    ),
    *bugs(
        "engine/prefill_rate.py",
        PREFILL_RATE,
        ("the replies of a step take no time", "rest = max(0.0, max_step_ms - alone)", "rest = max(0.0, max_step_ms)"),
        ("the rate without context is that of the prompt", "alone = each - (of_longer - each)", "alone = each"),
        ("a late measurement has no bound", "(2 - 1 / LEAST_ALONE) * each)", "math.inf)"),
        ("a token has the context of the whole prompt", "count * alone / (of", "2 * count * alone / (of"),
        (
            "the context is measured without one",
            "_milliseconds(model, executor, kv, pool, context, count, STEADY)",
            "_milliseconds(model, executor, kv, pool, 0, count, STEADY)",
        ),
        (
            "only the first steps are measured",
            "took, kv = _milliseconds(model, executor, kv, pool, 0, count, STEADY)",
            "took, kv = _milliseconds(model, executor, kv, pool, 0, count)",
        ),
    ),
    *bugs(
        "state/window_frames.py",
        WINDOWS,
        (
            "a window retires a page too early",
            "min(num_filled, num_tokens - 1) - window + 1)",
            "min(num_filled, num_tokens - 1) - window + 2)",
        ),
    ),
    *bugs(
        "state/window_frames.py",
        FRAMES,
        ("one frame too many for a window", "return 1 + -(-(window - 1) // page_size)", "return 1 + -(-window // page_size)"),
    ),
    *bugs(
        "state/lru.py",
        FRAMES,
        (
            "spare frames are taken youngest first",
            "pages = ages.groups.get(time, NO_PAGES)[:missing]",
            "pages = ages.groups.get(time, NO_PAGES)[-missing:]",
        ),
    ),
    *bugs(
        "state/window_frames.py",
        FRAMES,
        ("a retired page is not reused", "served = np.flatnonzero(behind <= retired)", "served = np.flatnonzero(behind < retired)"),
    ),
    *bugs(
        "state/steady.py",
        STEADY,
        ("the first row is taken for the first to end", "first_end=int(left.min()), steps=steps", "first_end=int(left[0]), steps=steps"),
        ("a stop token of one row ends another row", "if token in self.base[row].request.stop_ids", "if token in self.stop_ids"),
    ),
    *bugs(
        "state/steady.py",
        CLIENTS,
        ("a row gets the log-probabilities of another", "else each[:, at] for each in scores", "else each[:, 0] for each in scores"),
        ("a sequence that is built loses its search", "asked, self.scans.get(row))", "asked)"),
        ("the search of a row goes on in another", "{new: self.scans[row] for new, row in", "{row: self.scans[row] for new, row in"),
        ("a row reads its tokens from the beginning", "self.log.tokens(max(0, older), ", "self.log.tokens(0, "),
        ("rows of rows are taken for rows", "return rows if self.columns is None else self.columns[rows]", "return rows"),
        (
            "steps with fewer results are written among those with more",
            "or (self.scored and log is not None and not log.fits(results))",
            "",
        ),
    ),
    *bugs(
        "state/step_log.py",
        STEP_LOG,
        ("a second value overwrites the steps of the first", "self.used[0] == length < len(", "length < len("),
        ("the steps of a newer value are read", "each[:length, columns]", "each[:, columns]"),
        ("a copy loses the newest step", "copy[:length] = array[:length]", "copy[: length - 1] = array[: length - 1]"),
    ),
    *bugs(
        "state/request.py",
        CLIENTS,
        ("a resumed reply is searched from its beginning", "self.request.num_prompt + self.stops.num_read", "self.request.num_prompt"),
    ),
    *bugs(
        "state/stop_scan.py",
        CLIENTS,
        (
            "a stop string across two tokens is missed",
            "if text.endswith(string, 0, end) or string.endswith(text[:end]):",
            "if text.endswith(string, 0, end):",
        ),
        ("only the first place of a letter is looked at", "end = text.find(string[-1:], end) + 1", "end = 0"),
        ("a stop string with U+FFFD is searched after its last byte", "byte_set(bytes(range(256)))", "byte_set(b'\\xbd')"),
    ),
    # Engine
    *bugs(
        "engine/scheduler.py",
        SCHEDULER + STEP,
        ("a sequence with all its pages holds others up", "if left < steps and lacks_pages(s, size):", "if left < steps:"),
        ("steady steps run until a page is missing", "early = EARLY if may_grow_early(draft) else 0", "early = 0"),
        ("each free place is given away at once", "admits = bool(prefill) or opens(draft, num_steps, gather_until)", "admits = True"),
        (
            "steady steps pass over the end of a wait",
            "else min(steps, steps_held(draft, num_steps, gather_until))",
            "else steps",
        ),
    ),
    *bugs(
        "engine/prompt_pages.py",
        SCHEDULER + STEP,
        (
            "the copy of a shared tail needs no page",
            "spare = draft.pool.num_available - shares_tail(draft.pool, sequence, size)",
            "spare = draft.pool.num_available",
        ),
    ),
    *bugs(
        "engine/decode_pages.py",
        SCHEDULER + STEP,
        ("pages grow although a request could begin with them", "taken = draft.waiting.first() is None or", "taken = True or"),
        ("pages ahead of need while one waits to come back", "only_free=first is not None and first.most_filled > 0", "only_free=False"),
    ),
    *bugs(
        "engine/preemption.py", SCHEDULER + STEP, ("stripped from the front of the queue", "last = holders.pop()", "last = holders.pop(0)")
    ),
    *bugs(
        "engine/reuse.py",
        SCHEDULER + STEP,
        ("tokens run again count as reused", "reused = max(0, filled - sequence.most_filled)", "reused = filled"),
    ),
    *bugs(
        "engine/admission.py",
        SCHEDULER + STEP,
        ("an urgent request waits for places", " or turn_of(first) < turn_of(draft.running[-1])", ""),
        ("a free place waits without an end", "return num_steps % HELD == 0 or places", "return places"),
        ("a few requests wait without an end", "num_steps < gather_until and", "gather_until and"),
        ("no request waits for others", "len(draft.waiting) * CROWD <", "0 * CROWD >"),
        ("a few requests wait a step too long", "return gather_until - num_steps if", "return gather_until + 1 - num_steps if"),
        ("requests that a full step left behind wait", "return 0 if len(plan.waiting) else num_steps", "return num_steps"),
        ("requests without a prompt wait", "or first.todo <= 1 or", "or"),
    ),
    *bugs(
        "engine/scheduler.py",
        PROMPT_ROOM,
        ("nothing is left for the first prompt", "        most -= 1\n", "        most -= 0\n"),
        (
            "a long prompt in the queue has a part of the room",
            "first is not None and room.is_short(first.todo) and",
            "first is not None and",
        ),
    ),
    *bugs(
        "engine/requests.py",
        PRIORITIES,
        ("every request arrives in the first step", "rank=rank_of(priority, state.num_steps),", "rank=rank_of(priority, 0),"),
        ("true is a priority", "if isinstance(priority, bool) or not isinstance(priority, int) or", "if not isinstance(priority, int) or"),
        ("priorities have no bound", " or abs(priority) >= MOST_PRIORITY:", ":"),
    ),
    *bugs(
        "engine/scheduler.py",
        BEGINNINGS,
        ("beginnings are offered only from the next step on", "            offer(draft, [admitted])\n", ""),
        ("the pages of a running prompt are not offered", "offer(draft, [(s, prefill[id_of(s)])", "list([(s, prefill[id_of(s)])"),
    ),
    *bugs(
        "engine/step.py",
        STEP,
        (
            "a carry of an earlier step is used again",
            "prefilled, loaded, decoded, ends = None, None, None, ",
            "prefilled, loaded, decoded, ends = None, state.loaded, None, ",
        ),
        ("a request waits after a row has ended", "steps=0 if state.waiting else after.steps)", "steps=after.steps)"),
    ),
    *bugs(
        "engine/requests.py",
        STEP,
        ("all requests of an engine have one seed", "SeedSequence((seed, request_id))", "SeedSequence((seed, 0))"),
        ("a prompt as long as the engine is accepted", "if num_prompt >= limit:", "if num_prompt > limit:"),
    ),
    *bugs(
        "engine/admission.py",
        STRANDED,
        ("a prompt does not wait for pages of replies", "missing > free + num_freed(draft, others)", "missing > free"),
        ("pages of a stuck sequence are forgotten", "if draft.stuck or (draft.running and", "if (draft.running and"),
    ),
    *bugs(
        "engine/preemption.py",
        STRANDED,
        (
            "what waits is stripped for nothing",
            "if not holders or not _suffice(draft, holders, wanted):",
            "if not holders:",
        ),
    ),
    *bugs(
        "engine/admission.py",
        SCHEDULER,
        ("a request that fits exactly waits", "return missing <= free - idle", "return missing < free - idle"),
        ("a request is admitted that cannot grow", "(fits(draft, first) and can_grow(draft, first))", "fits(draft, first)"),
        ("shared pages count as growth", "num_busy(draft.pool, reusable(draft, first)[0])", "0"),
        ("idle pages of a prompt count twice", "return missing <= free - idle", "return missing <= free"),
    ),
    *bugs(
        "engine/output.py",
        STEP,
        (
            "length wins over a stop",
            "    if complete or token in request.stop_ids or (",
            "    if complete or (token in request.stop_ids and sequence.tokens.length < request.max_len) or (",
        ),
        (
            "tokens run again after a preemption are not counted",
            "return prompt, max(0, min(sequence.most_filled, start + count) - start)",
            "return prompt, max(0, min(sequence.most_filled, start + count) - start - 1)",
        ),
    ),
    *bugs(
        "engine/output.py",
        OUTPUT,
        (
            "a stop string counts that ends in the first tokens",
            "text + detokenizer.rest(), stops.barred - stops.start)",
            "text + detokenizer.rest())",
        ),
        (
            "a stop string ends at its last place",
            "found=stops.start + min(places) if places else None",
            "found=stops.start + max(places) if places else None",
        ),
        (
            "the end kept for stop strings is a character short",
            "begin = max(0, len(text) - longest + 1)",
            "begin = max(0, len(text) - longest + 2)",
        ),
        ("text that is held back is not searched", 'detokenizer.rest(enough) if enough else ""', '""'),
        ("the stop token is in the text", "        ids.pop()\n", "        pass\n"),
        ("the decode speed counts the first token", "decode_tokens_per_second=(generated - 1)", "decode_tokens_per_second=generated"),
    ),
    *bugs(
        "engine/constrained.py",
        MASKED,
        ("a reply may end a token late", "if length < request.sampling.min_tokens:", "if length <= request.sampling.min_tokens:"),
        ("a grammar may end a reply before its least length", ">= rows.least", ">= 0"),
        ("a bad word is known by too few tokens", "max(0, length - bad.reach)", "max(0, length - bad.reach + 1)"),
    ),
    *bugs(
        "engine/masked_rows.py",
        ROWS,
        ("matchers that others have moved are used", "self._turn == matchers.turn and ", "self._turn >= 0 and "),
        ("matchers of an interrupted step are used", "        self._turn = -1  # an", "        # an"),
        ("matchers stay at other tokens", " and np.array_equal(self._newest, newest)", ""),
    ),
    *bugs(
        "sampling/matchers.py",
        ROWS,
        ("a mask that allows nothing is kept", "words[rows[left, None], where] = before[left]", "pass"),
        ("a matcher that has failed is not seen", "enumerate(matchers) if matcher.failed", "enumerate(matchers) if False"),
        ("late tokens are not seen", "if not words[lines[place]].any()]", "if True]"),
    ),
    *bugs(
        "sampling/token_masks.py",
        MASKED,
        ("a mask may allow nothing", "    if left.any():\n", "    if True:\n"),
        ("a mask allows what no token is", "if vocab_size % 32:", "if False:"),
    ),
    *bugs(
        "engine/output.py",
        MASKED,
        ("a stop string of the first tokens ends a reply", "params.min_tokens - stops.num_read)]", "0)]"),
    ),
    *bugs(
        "engine/output.py",
        CLIENTS,
        ("a search that is behind reads the newest token alone", "running.reply(row, stops.num_read)", "[int(token_ids[row])]"),
        ("all of a held text is searched at every token", "detokenizer.rest(enough) if enough", "detokenizer.rest() if enough"),
    ),
    *bugs(
        "tokenizer/detokenizer.py",
        DETOKENIZER,
        ("text that was held back is lost", "return None, _joined(held) + text", "return None, text"),
        ("a run that ends in a character is text", "if self.broken or self.unfinished:", "if self.broken:"),
        ("all of a held text is read", "while rope is not None and (last is None or count < last):", "while rope is not None:"),
        ("a space that bytes begin with stays", "        if strip and self.text is None:\n", "        if False:\n"),
        ("the bytes of a character are forgotten", "unfinished=given[used:]), piece", 'unfinished=b""), piece'),
        ("special tokens are kept in the window", "(i for i in ids if self.texts[i])", "ids"),
        ("a token without text begins the reply", "begun or bool(text or run.num_bytes), _Run()", "True, _Run()"),
    ),
    *bugs(
        "tokenizer/token_texts.py",
        DETOKENIZER,
        ("a special token has text", "if token is None or token in self.special:", "if token is None:"),
        ("a token that is left out ends a run", '"" if self.spelling == "other" else b""', 'b"" if self.spelling == "bytes" else ""'),
        ("two letters stand for one byte", "chr(256 + n): byte", "chr(257 + n): byte"),
        ("a token has the bytes that it lacks", "= ~byte_set(", "= byte_set("),
    ),
    *bugs(
        "tokenizer/stream.py",
        OUTPUT,
        (
            "a stop string is not held back whole",
            "max(0, len(text) - len(string) + 1)",
            "max(0, len(text) - len(string) + 2)",
        ),
    ),
    # Sampling
    *bugs(
        "ops/sampling/least_kept.py",
        CUTS,
        ("top-p keeps a token more at the boundary", "sums_BC - weights_BC < wanted_B1", "sums_BC - weights_BC <= wanted_B1"),
        ("min-p drops a token at the boundary", "(sorted_BC >= least_B1)", "(sorted_BC > least_B1)"),
        (
            "top-k keeps a token more",
            "last_B1 = sorted_BC.gather(1, num_kept_B1 - 1)",
            "last_B1 = sorted_BC.gather(1, num_kept_B1.clamp(max=sorted_BC.shape[1] - 1))",
        ),
        (
            "the looser of two cuts wins",
            "torch.where(cut_B1, torch.maximum(last_B1, least_B1), least_B1)",
            "torch.where(cut_B1, last_B1, least_B1)",
        ),
    ),
    *bugs(
        "sampling/table_slots.py",
        SLOTS,
        ("a slot that holds other tokens is kept", "if slot < 0 or self._entries[slot].length != row.length:", "if slot < 0:"),
        (
            "a slot of a loaded row is taken",
            "kept = {slot for slot in others if self._entries[slot].loaded}",
            "kept = set[int]()",
        ),
        ("a slot is trusted before it is filled", "next(spare) if slot < 0 else slot, -1", "next(spare) if slot < 0 else slot, length"),
        ("rows that have ended keep their slots", "if not entry.loaded or id(entry.of()) in left}", "}"),
        ("the first token of a prompt is not expected", "row.length if entry.loaded else row.length + 1", "row.length"),
        ("rows of the batch before still count steps", "                entry.loaded = False", "                pass"),
    ),
    *bugs(
        "sampling/penalty_tables.py",
        ROW_OPTIONS,
        ("a position is counted twice", "(self.counted[at] < lengths)", "(self.counted[at] <= lengths)"),
        ("rows without a slot count in the first", "new = (slots >= 0) & (", "new = (slots >= -1) & ("),
        ("a slot keeps another's biases", "        bias.zero_()\n", ""),
        ("a slot keeps another's tokens", "        marks.zero_()\n", ""),
    ),
    *bugs(
        "sampling/matchers.py",
        GRAMMAR,
        (
            "an error of the parser looks like a complete reply",
            "        if self.failed:\n            raise NotAllowedError(told(self._native))\n        if not may",
            "        if not may",
        ),
        ("end tokens stay where a reply may not end", "if words.any():", "if not words.any():"),
        ("a matcher that is ahead stays there", "if length < len(self.token_ids):", "if length < 0:"),
        ("another newest token is taken for the same", "if self.token_ids and tokens[0] != self.token_ids[-1]:", "if False:"),
        ("matchers are kept for ever", "if len(self._known) > MOST:", "if len(self._known) < 0:"),
    ),
    *bugs(
        "sampling/grammar_bounds.py",
        GRAMMAR,
        ("nested repetitions do not multiply", "last, place = most.pop(), place + 1", "last, place = most.pop() and 1, place + 1"),
        ("braces in a class count", "last, place = 1, _after_class(pattern, place)", "last, place = 1, place + 1"),
        ("references are not followed", "linked = depth + sum(", "linked = depth + 0 * sum("),
        ("multiples are looked at one by one", "math.lcm(multiples, _digits(", "math.lcm(1, _digits("),
    ),
    *bugs(
        "executor/graph_executor.py",
        GRAPHS,
        (
            "masks go to the lines of other rows",
            "self._mask_lines[place] for place in self._ahead.places",
            "self._mask_lines[place] for place in range(len(self._ahead.places))",
        ),
    ),
    *bugs(
        "engine/step.py",
        GRAMMAR,
        (
            "a reply goes on after its grammar has ended",
            "by_grammar = [row for row in running.masked if running.ids[row] in ends] if ends else []",
            "by_grammar = list[int]()",
        ),
    ),
    *bugs(
        "sampling/row_options.py",
        ROW_OPTIONS,
        ("padding has a slot", "0.0, 0.0, -1.0, -1.0)", "0.0, 0.0, 0.0, -1.0)"),
        ("a bias needs no table", "return p.logit_bias is not None or penalises(p)", "return penalises(p)"),
    ),
    *bugs(
        "executor/cuda_graphs.py",
        GRAPHS,
        ("the token to count next is the one before", "targets = [batch.input_ids, newest] if", "targets = [batch.input_ids] if"),
        ("pages are given to other rows", "order = np.argsort(np.concatenate(", "order = (np.concatenate("),
        ("tokens are drawn for the place before", "batch.seq_lens - 1  # the step", "batch.seq_lens - 2  # the step"),
        ("ranks exchange tokens that are replaced", "return parts_of(self._config) is not None and not carry.processing", "return False"),
        (
            "functions do not see tokens that were drawn at random",
            "if carry.token_ids is not None:\n            last",
            "if False:\n            last",
        ),
    ),
    *bugs(
        "executor/graph_executor.py",
        GRAPHS,
        ("steps are not noted", "            self._rows.ran()\n", "            pass\n"),
        ("a step ahead outlives growth that it needs", "if grew and not self._ahead.outlives_growth():", "if False:"),
        ("tables are trusted after a failed step", "return step.kind.sampling not in TABLED or self._rows.holds(rows)", "return True"),
    ),
    # Chunks and their files
    *bugs(
        "chunks/layout.py",
        LAYOUT,
        (
            "later gaps are lost where a gap is cut",
            "for at, offset in chunk.gaps if at > stop)",
            "for at, offset in chunk.gaps if at > stop + 1)",
        ),
        (
            "a gap at the cut counts twice",
            "for at, offset in chunk.gaps if at <= stop), default=0)",
            "for at, offset in chunk.gaps if at < stop), default=0)",
        ),
        ("keys rotate as if there were no gaps", "pieces.append((stop - at, place - offset))", "pieces.append((stop - at, place))"),
        (
            "drop by shift keeps a gap at its start",
            "shared, gaps = start // page_size, tuple(gap for gap in chunk.gaps if gap[0] < start)",
            "shared, gaps = start // page_size, tuple(gap for gap in chunk.gaps if gap[0] <= start)",
        ),
    ),
    *bugs(
        "chunks/handles.py",
        HANDLES,
        (
            "a truncated chunk keeps its last page",
            "pages=chunk.pages.truncate(min(len(chunk.pages), pages_for(length, page_size))),",
            "pages=chunk.pages.truncate(min(len(chunk.pages), length // page_size + 1)),",
        ),
    ),
    *bugs(
        "chunks/handles.py",
        COMPOSE,
        (
            "a truncated chunk keeps the gap at its end",
            "gaps=tuple(gap for gap in chunk.gaps if gap[0] < length),",
            "gaps=tuple(gap for gap in chunk.gaps if gap[0] <= length),",
        ),
    ),
    *bugs(
        "chunks/handles.py",
        GENERATE,
        ("spare pages of a reply stay taken", "pool = pools.release(state.pool, spare.tolist())", "pool = state.pool"),
    ),
    *bugs(
        "chunks/storage/format.py",
        CHUNK_FILES,
        (
            "two tokens at one position are loaded",
            "if positions[0] < 0 or (np.diff(positions.astype(np.int64)) <= 0).any():",
            "if positions[0] < 0 or (np.diff(positions.astype(np.int64)) < 0).any():",
        ),
    ),
    *bugs(
        "chunks/storage/file.py",
        CHUNK_FILES,
        ("a token id of the vocabulary's size is loaded", "(head.tokens >= config.vocab_size)", "(head.tokens > config.vocab_size)"),
        (
            "shared pages are written by a load",
            "low, (pool, index) = max(token, start), places[layer]",
            "low, (pool, index) = token, places[layer]",
        ),
    ),
    *bugs(
        "chunks/storage/store.py",
        STORE,
        (
            "the most recently used chunk goes first",
            "        for key in sorted(used, key=used.__getitem__):\n",
            "        for key in sorted(used, key=used.__getitem__, reverse=True):\n",
        ),
        ("a store that is just full evicts", "            if size <= limit:\n", "            if size < limit:\n"),
        ("a chunk as long as the prompt is passed over", "entry.num_tokens <= len(tokens)", "entry.num_tokens < len(tokens)"),
    ),
    *bugs(
        "chunks/session.py",
        SESSION,
        ("a session's last room is refused", "if len(sequence.tokens) + room > limit:", "if len(sequence.tokens) + room >= limit:"),
        ("the carries of an abandoned session go on", "        ended.lease.committed = True\n        if carry", "        if carry"),
        (
            "an abandoned session of another engine is taken",
            "if ticket not in state.sessions or not same_memory(carry.kv, state.kv):",
            "if False:",
        ),
    ),
    *bugs(
        "chunks/session_rows.py",
        SESSION,
        (
            "a filled context without steps is not reused",
            "reused = 0 if num_steps else sum(s.todo == 0 for s in sequences)",
            "reused = 0",
        ),
        ("a row that was stopped from the start has not run", "    if len(tokens) and count == 0:", "    if False:"),
        (
            "a reply goes on after an end token",
            "count = int(ends[0]) + 1 if len(ends) else count",
            "count = int(ends[-1]) + 1 if len(ends) else count",
        ),
    ),
    *bugs(
        "chunks/score.py",
        SCORE,
        (
            "contexts that fit exactly are refused",
            "if own + spare > after.pool.num_available:",
            "if own + spare >= after.pool.num_available:",
        ),
        ("approximate contexts of equal tokens share", "None if base is None or base.provenance.exact else base.liveness", "None"),
        ("shared contexts are not counted as reused", "(len(task.continuations) - 1) * len(task.tokens)", "0"),
        (
            "the last tokens of continuations run",
            "context.tokens.extend(ids[:-1]), len(context.tokens)",
            "context.tokens.extend(ids), len(context.tokens)",
        ),
        ("logits without a bound", "max(0, run.first - run.at) + room)", "max(0, run.first - run.at) + room + 1)"),
    ),
    *bugs(
        "chunks/prefill.py",
        SHARED_CONTEXTS,
        ("a token that runs later is offered", "max(0, owners[i].todo - kept_back)", "max(0, owners[i].todo)"),
        ("contexts of one call share nothing", "pool, owners[i] = _begun_with_offered(pool, owners[i], kept_back)", "pass"),
        ("shared tokens are not counted", "reused += owners[i].most_filled - sequences[i].most_filled", "pass"),
        ("a first step has no bound", "if most_todo is not None and (count", "if False and (count"),
    ),
    *bugs(
        "chunks/session_rows.py",
        SHARED_CONTEXTS,
        ("unfilled pages stay in the index", "        state = _without_unfilled(state, sequences)\n", "        pass\n"),
    ),
    *bugs(
        "chunks/score.py",
        SHARED_CONTEXTS,
        ("a context begins before an earlier one has ended", "            if count < left:\n                break\n", ""),
    ),
    *bugs(
        "state/steady.py",
        STEP_LOGPROBS,
        ("rows that stay keep the options of others", "tuple([self.num_top[row] for row in kept.tolist()])", "self.num_top[: len(kept)]"),
        ("a stream gets the first log-probabilities again", "self.log.part(self.age - new, self.age,", "self.log.part(0, new,"),
    ),
    *bugs(
        "state/logprobs.py",
        (*CLIENTS, *STEP_LOGPROBS),
        ("log-probabilities are the row's of the first", "each[row : row + 1] for each in arrays", "each[:1] for each in arrays"),
        ("the first tokens of a part are given for its last", "each[-count:]", "each[:count]"),
        ("a row's alternatives are all that the step has", "self.top_ids[row, :num_top].tolist()", "self.top_ids[row].tolist()"),
    ),
    *bugs(
        "engine/step.py",
        STEP_LOGPROBS,
        ("a token after a prompt has no log-probabilities", "row_scores(sequence, prefilled, row)", "None"),
        ("the last token of a steady row has none", "failed.get(rid), scored)", "failed.get(rid))"),
    ),
    *bugs(
        "executor/scoring.py",
        PROMPT_LOGPROBS,
        (
            "the most probable tokens are another place's",
            "top.indices[own].int()",
            "top.indices[torch.arange(len(own)) % len(piece)].int()",
        ),
        ("a whole batch is normalised at once", "PIECE_BYTES // (4 * logits.shape[1])", "LOGIT_BYTES // (4 * logits.shape[1])"),
    ),
    *bugs(
        "executor/scoring.py",
        SCORE,
        (
            "a token that runs again writes its page",
            "np.where(again, np.int32(first_dummy(dummy_page, frames) * page_size), host.slots)",
            "host.slots",
        ),
        ("a piece of logits begins one late", "np.arange(0, len(logits) + size, size)", "np.arange(1, len(logits) + size, size)"),
    ),
    *bugs(
        "chunks/generate.py",
        GENERATE,
        ("replies that fit exactly are refused", "    if needed > available:\n", "    if needed >= available:\n"),
    ),
    # Text
    *bugs(
        "tokenizer/bounded_jinja.py",
        TOKENIZER,
        ("tojson ignores sort_keys", "indent=indent, separators=separators, sort_keys=sort_keys)", "indent=indent, separators=separators)"),
        ("tojson ignores separators", "indent=indent, separators=separators, sort_keys=sort_keys)", "indent=indent, sort_keys=sort_keys)"),
    ),
    *bugs(
        "tokenizer/bounded_jinja.py",
        TEMPLATE_BOUNDS,
        (
            "a padded text is not counted",
            "self.charge(64 + 4 * max(len(owner), operator.index(args[0]) if args else 0))",
            "self.charge(64 + 4 * len(owner))",
        ),
        ("a repeated text is not counted", "self.charge(64 + times * _size(repeated))", "self.charge(64)"),
        ("a template is blamed for a long conversation", "self.left += 64 * _num_characters(self.variables)", "self.left += 0"),
        ("a template has ten seconds", "elif now - self.started > MAX_SECONDS:", "elif now - self.started > 40 * MAX_SECONDS:"),
    ),
    *bugs(
        "tokenizer/limit.py",
        TEXT_LIMIT,
        ("composed characters are forgotten", "return COMPOSED\n", "return 1.0\n"),
        ("a pre-tokenizer drops characters", 'return pre_tokenizer["behavior"] != "Removed"', "return True"),
        ("unknown characters have a token each", "model.unk_token is not None and not model.fuse_unk", "model.unk_token is not None"),
        ("spaces at a token are forgotten", "strips=any(token.lstrip or token.rstrip for token in added)", "strips=False"),
        ("a text of just the limit is refused", "if self._num_settled(text[:size]) > most:", "if self._num_settled(text[:size]) >= most:"),
    ),
    *bugs(
        "tokenizer/chat_template.py",
        TOKENIZER + TOKENIZER_FILES,
        ("tools without a template of their own", '(usual if variables.get("tools") is None else with_tools)', "usual"),
        ("a model without a default template gets another", ") or other)(variables)", ") or with_tools)(variables)"),
    ),
    *bugs(
        "tokenizer/tokenizer.py",
        TOKENIZER + TOKENIZER_FILES,
        ("a panic is no error", '!= ("pyo3_runtime", "PanicException")', '!= ("pyo3_runtime", "Panic")'),
        (
            "special tokens win over the caller's variables",
            '{"tools": None, "documents": None, **self.special_tokens, **variables}',
            '{"tools": None, "documents": None, **variables, **self.special_tokens}',
        ),
    ),
    # Loading
    *bugs(
        "loading/weights.py",
        WEIGHTS,
        ("two tensors map to one parameter", "        if name in named:\n", "        if False:\n"),
        (
            "the fingerprint leaves the end of a tensor out",
            "for at in (header.start, (header.start + last) // 2, last):",
            "for at in (header.start, (header.start + last) // 2):",
        ),
        ("equal heads are compared by their first bytes", "            left -= size\n", "            left = 0\n"),
    ),
    # Quantised matrices on ranks
    *bugs(
        "loading/weights.py",
        RANKS,
        (
            "groups that would be too small are not refused by the name of the matrix",
            "        require_shares(table, stored, rounding, mesh)\n",
            "",
        ),
    ),
    *bugs(
        "loading/quantisation/on_ranks.py",
        RANKS,
        (
            "a scale that ranks share is that of their own columns",
            "quantise(kept, kind, group, largest=shared[",
            "quantise(kept, kind, group, largest=magnitudes[",
        ),
        ("the scale of a row is that of a rank's columns", "mesh).amax(0))", "mesh)[mesh.rank])"),
    ),
    *bugs(
        "ops/linear/quantised_ranges.py",
        RANKS,
        ("parts of a group keep its size", "found = math.gcd(group, first, last)", "found = group"),
        ("the last rank's groups are larger", "math.gcd(group, first, last)", "math.gcd(group, first)"),
        ("scales are those of the first groups", "torch.arange(first, last, group", "torch.arange(0, last - first, group"),
        ("codes of 4 bits begin at a block", "[..., first - start * BLOCK :]", "[..., : last - first]"),
    ),
    *bugs(
        "models/fast/fused.py",
        RANKS,
        (
            "experts of prompts leave the residual out",
            "_begin_sum_normed(y.unsqueeze(0), None, x, gain,",
            "_begin_sum_normed(y.unsqueeze(0), None, 0 * x, gain,",
        ),
        (
            "the norm after experts has another weight",
            "_begin_sum_normed(y.unsqueeze(0), None, x, gain,",
            "_begin_sum_normed(y.unsqueeze(0), None, x, 2 * gain,",
        ),
    ),
    *bugs(
        "loading/safetensors_headers.py",
        HEADERS,
        (
            "a tensor is in another shard than the index says",
            "if places is not None and places.get(name) != file:",
            "if places is not None and name not in places:",
        ),
    ),
    *bugs(
        "loading/hub.py",
        HUB,
        ("an ambiguous commit is taken for the first", "    if len(matching) == 1:\n", "    if matching:\n"),
    ),
    *bugs(
        "config.py",
        CONFIG,
        (
            "a long rotary embedding is used a token too early",
            "if max_model_len is None or max_model_len <= usual:",
            "if max_model_len is None or max_model_len < usual:",
        ),
    ),
    # Decode steps, run-ahead, shared pages
    *bugs(
        "executor/cascade_policy.py",
        CASCADE_POLICY,
        ("a page that a query sees in part is shared", "int(whole[group].min()))", "int(whole[group].max()))"),
        (
            "steps just worth sharing are not",
            "if spared >= (1 if self.always else least) else None",
            "if spared > (1 if self.always else least) else None",
        ),
        (
            "prompts that just fill tiles are not shared",
            "* self.group > FULL_TILE * len(counts):",
            "* self.group >= FULL_TILE * len(counts):",
        ),
    ),
    *bugs(
        "executor/run_ahead.py",
        RUN_AHEAD,
        ("a step ahead stays though its place is missing", "return self.launched and self.left > 0", "return self.launched"),
        (
            "rows that must not run ahead do after an end",
            "(steps_ahead(rows, self.page_size) if self.allowed else 0)",
            "steps_ahead(rows, self.page_size)",
        ),
        ("a row that only reads runs ahead", "s.pages.length * page_size if s.todo else 0,", "s.pages.length * page_size,"),
        ("a row with just enough room stops the others", "in rooms if room < wanted)", "in rooms if room <= wanted)"),
        ("equal rows change places", 'kind="stable")] = np.arange(len(rows))', 'kind="stable")[::-1]] = np.arange(len(rows))'),
    ),
    *bugs(
        "executor/fresh_carry.py",
        SESSION,
        ("a stepped carry is accepted", "    if ran != num_steps:\n", "    if ran < num_steps:\n"),
    ),
    *bugs(
        "ops/attention/cascade.py",
        CASCADE,
        ("the window is a token wider", "masked |= at < visible[:, None] - window", "masked |= at < visible[:, None] - window - 1"),
    ),
    # Composition
    *bugs(
        "chunks/compose.py",
        COMPOSE,
        (
            "an operation is named twice",
            "operations = dict.fromkeys((*(name for source in sources for name in source.provenance.operations), operation))",
            "operations = (*(name for source in sources for name in source.provenance.operations), operation)",
        ),
        ("only the first chunk says how it was made", "for source in sources for name", "for source in sources[:1] for name"),
        ("chunks that just fit are not composed", "if num_tokens > capacity(state):", "if num_tokens >= capacity(state):"),
        ("a chunk that just fits is not run", "if len(tokens) > capacity(state, base):", "if len(tokens) >= capacity(state, base):"),
        ("the exact beginning of an approximate chunk runs again", "if first.num_exact else None", "if first.provenance.exact else None"),
        ("learned positions are shifted", '    if mode == "shift":\n', '    if mode == "turn":\n'),
    ),
    *bugs(
        "chunks/compose.py",
        WINDOWS,
        (
            "windowed layers rotate by the frequencies of the others",
            "model.params.inv_freq if local is None else local)",
            "model.params.inv_freq)",
        ),
    ),
    # Donation and prompts
    *bugs(
        "engine/donation.py",
        DONATION,
        (
            "a model of another dtype is accepted",
            "model_key(model) != lease.model:",
            "model_key(model).fingerprint != lease.model.fingerprint:",
        ),
        ("a carry that a failed call advanced is used again", "waiting=waiting, loaded=None)", "waiting=waiting)"),
        ("a failed call that took no pages changed nothing", "if lease.dirty else state", "if lease.lost else state"),
    ),
    *bugs(
        "state/lease.py",
        ("tests/engine/test_threads.py",),
        ("calls of two threads work at once", "            self._holder = threading.get_ident()\n", "            pass\n"),
        (
            "two threads commit one state",
            "            self._require(epoch)\n            self.epoch += 1\n",
            "            self.epoch += 1\n",
        ),
        ("a call goes on with pages that another thread lost", "self._seen.get(thread, self._failed) != self._failed", "False"),
    ),
    *bugs(
        "engine/donation.py",
        ("tests/engine/test_threads.py",),
        ("a call that has ended keeps the lease", "        lease.give_back()\n", "        pass\n"),
    ),
    *bugs(
        "engine/failures.py",
        ("tests/property/test_planted_faults.py::test_a_step_that_only_copies_pages_in_ends_its_requests_if_the_device_has_no_memory",),
        ("copies that find no memory end the call", "(num_tokens > 0 or len(stuck) > 0)", "num_tokens > 0"),
    ),
    *bugs(
        "engine/failures.py",
        ("tests/engine/test_host_memory.py",),
        ("a stuck reply ends with an error if its copies fail", "if plan is not None and stuck:", "if False:"),
    ),
    *bugs(
        "engine/failures.py",
        REQUEST_ERRORS,
        ("a prompt without pages ends by its length", "None if sequence.num_generated else _out_of_pages(sequence, pool)", "None"),
        ("a budget that is lowered by one token only", "budget = max(1, num_tokens // 2 + (", "budget = max(1, num_tokens - 1 + ("),
        (
            "the tokens of the other pass are cut too",
            'num_tokens // 2 + (others if attempt.stage == "prefill" else 0)',
            "num_tokens // 2 + 0",
        ),
        ("rows that decode wait for a prompt's tokens", 'others if attempt.stage == "prefill" else 0', "others"),
        ("memory that a function lacks is the engine's", " and not culprit:", ":"),
        (
            "a budget that grows at once",
            "return replace(state, token_budget=None if more",
            "return replace(state, token_budget=None if 1 or more",
        ),
        ("all rows of a function end with one whose init raises", "if not culprit.request_ids or _id(s) in culprit.request_ids]", "]"),
        (
            "all rows end with those of a function",
            "theirs = [s for s in rows if culprit.processor is None or s.request.process_logits == culprit.processor]",
            "theirs = rows",
        ),
        ("a kept error holds the state", "            one.__traceback__ = None\n", ""),
        ("all requests end while memory is short", "not (short and failed)", "True"),
        ("a shortage in a step is not counted", "stats = stats.add(memory_shortages=1)", "stats = stats.add(memory_shortages=0)"),
        ("an error does not say whose it is", "error.request_id, error.__cause__ = request_id, cause", "error.__cause__ = cause"),
    ),
    *bugs(
        "engine/step.py",
        REQUEST_ERRORS,
        ("a failed step loses its first errors", "[*outputs, *more] if outputs else more", "more"),
    ),
    *bugs(
        "chunks/generate.py",
        REQUEST_ERRORS,
        ("a failed reply keeps its pages", "pool=give_up_pages(inner.pool, inner.kept[out.request_id])", "pool=inner.pool"),
        ("one reply that fails is committed", "                    if alone:\n", "                    if False:\n"),
    ),
    *bugs(
        "state/device_errors.py",
        ("tests/engine/test_dead_engine.py",),
        ("an error of a capture kills the engine", '    "unknown error",\n', '    "unknown error",\n    "operation not permitted",\n'),
        ("only the newest error is read", "    for one in chain(error):\n        text", "    for one in [error]:\n        text"),
    ),
    *bugs(
        "state/lease.py",
        ("tests/engine/test_dead_engine.py",),
        (
            "a dead engine is used again",
            "        if self.dead is not None:\n            raise self.kill(self.dead)\n        thread",
            "        thread",
        ),
    ),
    *bugs(
        "executor/fresh_carry.py",
        ("tests/engine/test_dead_engine.py",),
        ("a session goes on with a dead engine", "        engine.require_alive()\n", "        pass\n"),
    ),
    *bugs(
        "engine/prompt.py",
        PROMPT,
        ("an empty part takes the start token away", "first=total == 0", "first=base is None and not runs"),
        ("a text after a chunk has a start token", "first=total == 0", "first=not any(map(len, runs))"),
        ("the last wrong token is named", "flat[(flat < 0) | (flat >= vocab_size)][0]", "flat[(flat < 0) | (flat >= vocab_size)][-1]"),
        ("parts after a token id are token ids", "(*context[:1], *context[-1:])", "context[:1]"),
        ("the first part has no number", 'if len(parts) > 1 else "")', 'if place else "")'),
        ("a released chunk is continued", "base, total = require_live(state, part), len(part)", "base, total = part, len(part)"),
    ),
    # Hidden states, and prompts without KV memory
    *bugs(
        "ops/attention/whole_prompts.py",
        ("tests/ops/attention/test_whole_prompts.py",),
        (
            "a prompt's first token is the last one's of the prompt before",
            "(index[:, None] >= cu_seqlens[1:])",
            "(index[:, None] > cu_seqlens[1:])",
        ),
        ("a window without pages holds one token more", "(distance < window)", "(distance <= window)"),
        ("scores without pages are not capped", "        scores = (scores / softcap).tanh() * softcap\n", "        pass\n"),
    ),
    *bugs(
        "models/common/decoder.py",
        HIDDEN,
        ("the last layer's state is returned for every layer", "captured[number] for number in", "x_TM for number in"),
        ("a decode batch needs no KV", "if kv is None and batch.cu_seqlens is None:", "if False:"),
        ("gradients over pages lack attention", "differentiable=kv is None)", "differentiable=True)"),
    ),
    *bugs(
        "models/common/hidden.py",
        HIDDEN,
        (
            "layers are counted from the end too",
            "0 <= operator.index(layer) < num_layers",
            "-num_layers <= operator.index(layer) < num_layers",
        ),
        ("a float32 vector widens the residual stream", "(x_TM + more).to(x_TM.dtype)", "x_TM + more"),
    ),
    *bugs(
        "models/fast/fused.py",
        HIDDEN,
        ("a fused last layer's state lacks tokens", " and at not in asked, kv.pools[pool]", ", kv.pools[pool]"),
        ("a fused step with the last state has all logits", "        x, h = _wanted(x, batch), _wanted(h, batch)\n", "        pass\n"),
    ),
    # The check of a model
    *bugs(
        "models/check/agree.py",
        CHECK,
        (
            "agreement with float64 is that with the plain layers",
            "fast_exact=sum(a == c for a, _, c in rows)",
            "fast_exact=sum(a == b for a, b, _ in rows)",
        ),
    ),
    *bugs(
        "models/check/report.py",
        CHECK,
        (
            "the gain of queries is that of keys",
            "None if w.q_norm is None else _largest(w.q_norm)",
            "None if w.k_norm is None else _largest(w.k_norm)",
        ),
    ),
    *bugs(
        "entrypoints/cli/check/report_text.py",
        CHECK,
        ("the least clear disagreements are shown", "key=lambda each: -each.margin", "key=lambda each: each.margin"),
        ("no more disagreements are said to follow", "* (len(apart) > SHOWN)", "* (len(apart) >= SHOWN)"),
        ("keys that are NaN are passed over", "math.isfinite(each.plain.output + each.plain.kv)", "math.isfinite(each.plain.output)"),
        ("keys have the bound of the output", "e.fast.kv, e.bound.kv)", "e.fast.kv, e.bound.output)"),
    ),
    *bugs(
        "models/check/compare.py",
        CHECK,
        ("an error that is its bound is above it", "fast.kv <= error_bound(plain.kv, dtype)", "fast.kv < error_bound(plain.kv, dtype)"),
        ("only the largest batch counts", ", len(forms), 2).amax(1)", ", len(forms), 2)[:, -1]"),
        ("a row of other experts is a fault", "routed=w.experts is not None)", "routed=False)"),
        ("logits in float64 are not capped", "yield soft_cap(logits, model.config.logit_softcap)", "yield logits"),
    ),
    *bugs(
        "models/check/examine.py",
        CHECK,
        (
            "a text of all positions is refused",
            "1 <= num_tokens <= model.config.max_position_embeddings",
            "1 <= num_tokens < model.config.max_position_embeddings",
        ),
        ("a batch of all tokens is left out", "if count <= num_tokens)", "if count < num_tokens)"),
        ("NaN is not the worst error", 'return error / bound if error <= bound or error > bound else float("inf")', "return error / bound"),
    ),
    *bugs(
        "entrypoints/cli/check/command.py",
        CHECK_COMMAND,
        ("all of the memory is too much", "if not 0 < options.memory_fraction <= 1:", "if not 0 < options.memory_fraction < 1:"),
        ("the maximum length is not that of the check", "options.dtype, **limits, **{**where", "options.dtype, **{**where"),
    ),
    # Steps that a caller runs
    *bugs(
        "executor/session_lease.py",
        CAPTURE,
        ("the host overlooks a traced step", " and _version(counters) == self._version", ""),
        ("any carry is the newest one", "self._newest() is num_steps and _version", "_version"),
        ("tensors without versions are trusted", "None if version is None else weakref.ref(num_steps)", "weakref.ref(num_steps)"),
        ("only one counter counts", "sum(counter._version for counter in counters)", "counters[0]._version"),
        ("the newest carry of shared memory is outdated", " and (self._newest is None or self._newest() is not num_steps)", ""),
        ("memory that is not shared is outdated", "return bool(self._static) and num_steps.data_ptr() in self._static and", "return"),
    ),
    *bugs(
        "executor/capture.py",
        CAPTURE,
        ("a trial leaves its pages in the carry", "            pages[:, last.long()] = values", "            pass"),
        (
            "a captured function needs the room of one step",
            "require_room(log, require_fresh(log), advanced)",
            "require_room(log, require_fresh(log))",
        ),
        (
            "a change in place is found in the trial alone",
            "        result = function(carry, *inputs)\n        require_unchanged(function, before, carry)\n",
            "        result = function(carry, *inputs)\n",
        ),
        ("a function may return a narrower carry", "if structure_of(after) != structure_of(carry) or shapes_of(old)", "if shapes_of(old)"),
        ("a used carry can be captured", "    require_fresh(log_of(carry))\n    if carry.prompt", "    if carry.prompt"),
    ),
    *bugs(
        "executor/capture_checks.py",
        CAPTURE,
        (
            "a captured function takes carries of any shape",
            "(structure_of(carry) != spec or shapes_of(leaves) != shapes_of(own_leaves))",
            "structure_of(carry) != spec",
        ),
        (
            "a captured function takes carries of any options",
            "(structure_of(carry) != spec or shapes_of(leaves) != shapes_of(own_leaves))",
            "shapes_of(leaves) != shapes_of(own_leaves)",
        ),
        ("a captured function takes the carries of other engines", "if not same_memory(carry.kv, own.kv):", "if False:"),
        ("an input may have another dtype", "or old.shape != new.shape or old.dtype != new.dtype", "or old.shape != new.shape"),
        ("an input that is no tensor may change", "(old is not new and old != new)", "False"),
    ),
    *bugs(
        "executor/branches.py",
        BRANCHES,
        ("a stopped row takes another token", "torch.where(going & (log.num_steps > 0), token_ids, old)", "token_ids"),
        ("a split replaces the last token of a prompt", "going & (log.num_steps > 0), token_ids", "going, token_ids"),
        ("the log of a stopped row takes another token", "torch.where(newest & going.unsqueeze(1)", "torch.where(newest"),
        (
            "rows split beyond the room",
            "torch.where(log.num_steps > log.token_ids.shape[1], itself, ",
            "torch.where(log.num_steps < 0, itself, ",
        ),
        (
            "rows do not split in the last step",
            "torch.where(log.num_steps > log.token_ids.shape[1], itself, ",
            "torch.where(log.num_steps >= log.token_ids.shape[1], itself, ",
        ),
        ("children of a row share its last page", "        copy_pages(pages, last[rows].contiguous(), spare)\n", ""),
        ("a row loses its unused pages", "ahead = columns - (taken - own).unsqueeze(1)", "ahead = columns.expand(len(rows), -1)"),
        ("the last page of a row is lost", "spares.append(donated(spare, last))", "spares.append(donated(spare, spare))"),
        ("penalties count the token that was replaced", "counts.scatter_add(1, old.long().unsqueeze(1), -one)", "counts"),
        (
            "a child has the prompt of its own row in its penalties",
            "donated(penalties.prompt_mask, penalties.prompt_mask[rows])",
            "penalties.prompt_mask",
        ),
        ("a child keeps the origin of its row", "origins=donated(branches.origins, branches.origins[rows])", "origins=branches.origins"),
        ("a split is not counted", "ran=branches.ran.add_(1)", "ran=branches.ran"),
    ),
    *bugs(
        "executor/branches.py",
        PROCESS_LOGITS,
        ("carried tensors stay where they are in a split", "carried=mapped(follow, one.carried)", "carried=one.carried"),
        ("a processor sees the token that was replaced", "_placed(carry.token_ids[rows], seq_lens, newest)", "carry.token_ids[rows]"),
    ),
    *bugs(
        "executor/decode.py",
        PROCESS_LOGITS,
        (
            "carried tensors are overwritten before they are read",
            "carried, logits = [mapped(torch.clone, each) for each in carried], logits.clone()",
            "logits = logits.clone()",
        ),
        (
            "logits are overwritten before they are read",
            "[mapped(torch.clone, each) for each in carried], logits.clone()",
            "[mapped(torch.clone, each) for each in carried], logits",
        ),
        (
            "a processor sees tokens one step late",
            ".scatter_(1, last, token_ids.unsqueeze(1))",
            ".scatter_(1, last, batch.input_ids.unsqueeze(1))",
        ),
    ),
    *bugs(
        "executor/decode.py",
        (*LOOP, *BRANCHES),
        ("a stopped row goes on", "torch.where(carry.active > 0, token_ids, batch.input_ids)", "token_ids"),
        ("a stopped row logs its tokens", "torch.where(active, sampled.token_ids, -1)", "sampled.token_ids"),
    ),
    *bugs(
        "executor/fresh_carry.py",
        (*LOOP, *BRANCHES),
        ("a split carry is not refused", "if log.branches is not None and int(log.branches.ran)", "if False and int(log.branches.ran)"),
        ("the host does not see splits", "return (log.ran,) if log.branches is None else (log.ran, log.branches.ran)", "return (log.ran,)"),
    ),
    *bugs(
        "executor/fresh_carry.py",
        PROGRAMS,
        ("a committed carry is fresh", "        ran = -1\n", "        ran = num_steps\n"),
    ),
    *bugs(
        "chunks/loop.py",
        LOOP,
        ("a loop goes on after all rows have stopped", "return not bool((carry.active > 0).any())", "return False"),
        (
            "all rows stop with the first",
            "active = torch.where(over, 0, carry.active)",
            "active = torch.where(over.any(), 0, carry.active)",
        ),
        ("results of stopped rows are kept", "torch.where(going, tensor, torch.zeros_like(tensor))", "tensor"),
        ("steps that did not run are missing", "* missing])", "* 0])"),
        ("until may return one value", "or over.shape != carry.active.shape or", "or"),
        ("until may return numbers", " or over.dtype != torch.bool", ""),
        ("a loop ends beyond the room", "if num_steps + steps > room:", "if num_steps + steps > room + 1:"),
    ),
    *bugs(
        "chunks/session.py",
        BRANCHES,
        ("a committed carry keeps its spare pages", "            spare.fill_(pages.shape[1] - 1)", "            pass"),
    ),
    *bugs(
        "chunks/session_rows.py",
        (*BRANCHES, "tests/chunks/test_process_logits.py"),
        (
            "pages beyond the room are committed",
            "pages_for(min(length, most), state.config.page_size)",
            "pages_for(length, state.config.page_size)",
        ),
        (
            "a split writes into a page of another owner",
            "full = [s.todo == 0 and len(s.tokens) % size == 0 for s in sequences]",
            "full = [False for s in sequences]",
        ),
        (
            "the alternatives of a token are those of another row",
            "[each[: len(token_ids), row] for each in tops]",
            "[each[: len(token_ids), 0] for each in tops]",
        ),
        ("carried tensors are those of init", "mapped(torch.clone, first_carried(processor, tokens))", "first_carried(processor, tokens)"),
        ("a failed beginning leaves a plan", "        executor_of(state).end(ticket)\n        raise\n", "        raise\n"),
        (
            "one page per row serves splits of any rows",
            "(pages_for(len(s.tokens), page_size) + room + 1) * page_size",
            "(pages_for(len(s.tokens) + room, page_size) + 1) * page_size",
        ),
        (
            "the newest token of a split session runs again",
            "start + count - 1 + (split and count < len(tokens))",
            "start + count - 1",
        ),
        ("a reply holds the tokens of a stopped row", "int(stopped[0]) if len(stopped) else len(tokens)", "len(tokens)"),
    ),
    *bugs(
        "sampling/process_logits.py",
        PROCESS_LOGITS,
        ("a processor serves all rows", "            new = torch.where(uses.unsqueeze(1), new, logits)\n", ""),
        ("a processor carries for all rows", "torch.where(_like(uses, value), value, old)", "value"),
        ("logits may be integers", " or not new.is_floating_point()", ""),
        (
            "carried tensors may change their dtype",
            "if not alike or any(a.shape != b.shape or a.dtype != b.dtype",
            "if not alike or any(a.shape != b.shape",
        ),
        ("init may return fewer rows", " or leaf.shape[0] != rows", ""),
        ("all functions get tokens", "return 1 if one else 2", "return 2"),
        (
            "the last entry of a full row is not valid",
            "< self.lengths.unsqueeze(1)",
            "< self.lengths.unsqueeze(1).clamp(max=self.token_ids.shape[1] - 1)",
        ),
    ),
    *bugs(
        "chunks/processed.py",
        PROCESS_LOGITS,
        ("end tokens do not end a row", "(out.token_ids.unsqueeze(1) == ends).any(1) | ", ""),
        ("a row runs one step too long", "carry.log.num_steps >= limits", "carry.log.num_steps > limits"),
        ("a session that failed keeps its plan", "        executor.end(ticket)\n", ""),
        ("stop strings do not stop rows", "active[row], after[row] = 0, None", "after[row] = None"),
    ),
    # Thinking, and how it is shown
    *bugs(
        "chunks/thinking.py",
        THINKING,
        ("a chunk that is all thinking keeps all of it", "        spans = spans[1:]\n", "        spans = []\n"),
        (
            "a tag that the user wrote opens a block",
            "chunk.token_ids, start, model.config.eos_token_ids)",
            "chunk.token_ids, start)",
        ),
    ),
    *bugs(
        "entrypoints/conversation.py",
        CONVERSATION,
        ("kept thinking takes the room of the reply", "if kept + len(tokens) - shared < room]", "if kept + len(tokens) - shared <= room]"),
        ("an answer runs again in its own turn", 'asked.retain in ("shift", "gap"):', 'asked.retain != "all":'),
        ("the beginning of a stop string is shown", "TextStream.of(model.tokenizer, params.stop,", "TextStream.of(model.tokenizer, (),"),
        ("a full conversation is not told to reset", "if len(tokens) >= capacity(state):", "if len(tokens) > capacity(state):"),
    ),
    *bugs(
        "entrypoints/display/terminal.py",
        VIEW,
        ("a block that the prompt opened is shown as text", "chat_prompt.rstrip().endswith(OPEN)", "chat_prompt.endswith(OPEN)"),
        ("a terminal without styles is steered", "clean=stream.isatty(), inside", "clean=terminal, inside"),
    ),
    # The entry points
    *bugs(
        "entrypoints/arguments.py",
        ARGUMENTS,
        ("--memory-fraction is dropped", '"memory_fraction", "max_step_ms",', '"max_step_ms",'),
        ("--max-step-ms is dropped", '"max_step_ms", "tuning", "kv_dtype")', '"tuning", "kv_dtype")'),
        ("--tuning is dropped", '"max_step_ms", "tuning", "kv_dtype")', '"max_step_ms", "kv_dtype")'),
        ("--kv-dtype is dropped", '"tuning", "kv_dtype")', '"tuning")'),
        ("--kv-dir is dropped", '"kv_dir": options.kv_dir, ', '"kv_dir": None, '),
        ("--eager is dropped", '"compile": False if options.eager else None', '"compile": None'),
        ("--revision is dropped", '"revision": options.revision', '"revision": None'),
    ),
    *bugs(
        "entrypoints/cli/chat.py",
        COMMANDS,
        ("--system is dropped", "system=options.system, thinking", "system=None, thinking"),
        ("--retain is dropped", ", retain=options.retain)", ")"),
        (
            "a reset forgets the system message",
            "replace(self._conversation, messages=self._opening, chunk=None), None",
            "replace(self._conversation, messages=(), chunk=None), None",
        ),
        ("a message without a reply stays", "    if not figures.reply:", "    if figures.reply is None:"),
    ),
    *bugs(
        "entrypoints/cli/generate.py",
        COMMANDS,
        ("a system message needs no chat", "(options.system or options.no_think)", "options.no_think"),
        ("white space at the end of a prompt is lost", '.removesuffix("\\n")', ".rstrip()"),
    ),
    *bugs(
        "entrypoints/cli/load.py",
        COMMANDS,
        ("generate loads for the usual length", ", max_model_len=options.max_model_len, **where)", ", **where)"),
    ),
    *bugs(
        "entrypoints/cli/main.py",
        COMMANDS,
        ("a character that the output lacks is an error", 'reconfigure(errors="replace")', 'reconfigure(errors="strict")'),
    ),
    *bugs(
        "entrypoints/cli/memory.py",
        MEMORY_COMMAND,
        ("memory drops --num-frames", '"num_frames": options.num_frames, ', ""),
    ),
    *bugs(
        "entrypoints/llm.py",
        LLM,
        (
            "a chat thinks always",
            "tokens = self.chat_tokens(messages, tools=tools, enable_thinking=enable_thinking)",
            "tokens = self.chat_tokens(messages)",
        ),
        ("an LLM has one seed", '            "seed": seed,\n', ""),
        (
            "an LLM loads for the usual length",
            "load_model(model, place, dtype, max_model_len=max_model_len, **where)",
            "load_model(model, place, dtype, **where)",
        ),
        (
            "a stream has options of its own",
            "from_generation_config(self.model.generation_config) if sampling_params is None",
            "SamplingParams() if sampling_params is None",
        ),
    ),
    *bugs(
        "state/digest.py",
        ("tests/state/test_digest.py",),
        ("a digest misses the newest tokens", "running.left - running.age, newest)", "running.left - running.age)"),
        ("a digest depends on what was read", "running.left - running.age, newest)", "running.left, newest)"),
        ("a digest misses the live chunks", "len(state.chunks), *sorted(state.chunks), *[", "*["),
    ),
    *bugs(
        "entrypoints/ranks/codec.py",
        ("tests/entrypoints/ranks/test_codec.py",),
        ("bools cross as integers", "if set(map(type, value)) == {int}:", "if value and all(isinstance(one, int) for one in value):"),
        ("options cross without the grammar", "for name in OPTIONS}", "for name in OPTIONS if name != 'grammar'}"),
    ),
    *bugs(
        "entrypoints/ranks/calls.py",
        ("tests/entrypoints/ranks/test_calls.py",),
        ("a call with a donated state is sent", "or given.epoch != lease.epoch:", "or given.epoch > lease.epoch:"),
        ("a call with a released chunk is sent", "or chunk.liveness not in given.chunks for", "for"),
        ("a cut chunk is not sent", "fork, truncate, release", "fork, release"),
    ),
    *bugs(
        "entrypoints/ranks/leader.py",
        ("tests/entrypoints/ranks/test_faults.py",),
        ("states are not compared", "(one.digest, one.error) != (own.digest, own.error)", "one.error != own.error"),
        ("different engines begin", "if any(one.digest != own.digest for one", "if any(one.digest == '' for one"),
    ),
    *bugs(
        "entrypoints/ranks/followers.py",
        ("tests/entrypoints/ranks/test_paths.py",),
        ("ranks import from a folder that rank 0 does not look into", '[sys.executable, "-P", ', "[sys.executable, "),
    ),
    *bugs(
        "ops/import_paths.py",
        ("tests/entrypoints/ranks/test_paths.py",),
        (
            "ranks do not find what is in the current folder",
            "filter(None, (path or _current_folder() for path in sys.path))",
            "filter(None, sys.path)",
        ),
    ),
    *bugs(
        "entrypoints/ranks/follower.py",
        ("tests/entrypoints/ranks/test_ranks.py",),
        ("a rank collects garbage over its whole engine", "freeze()  # all", "pass  # all"),
    ),
    *bugs(
        "entrypoints/ranks/followers.py",
        ("tests/entrypoints/ranks/test_faults.py",),
        ("a rank without beats lives", "elif now - one.at > (", "elif now - one.at > 1e9 + ("),
    ),
    *bugs(
        "entrypoints/ranks/followers.py",
        ("tests/entrypoints/ranks/test_followers.py",),
        ("an engine that ends keeps its graphs", "                self.free()", "                pass"),
        (
            "graphs are freed under a call that replays them",
            "if holder is None:\n                self.free",
            "if True:\n                self.free",
        ),
    ),
    *bugs(
        "ops/distributed/process_group.py",
        ("tests/ops/distributed/test_process_group.py",),
        ("whoever gives up waits for graphs", "ending.start()", "ending.run()"),
        ("unlike GPUs share memory", "bool(one[0]) and torch.equal(one, ranks[0])", "bool(one[0])"),
        ("memory that no rank reaches is shared", "bool(one[0]) and torch.equal", "torch.equal"),
    ),
    *bugs(
        "executor/graph_executor.py",
        ("tests/executor/test_graph_executor.py",),
        ("the start records gradients", "@torch.no_grad()\n    def _warm_up", "def _warm_up"),
    ),
    *bugs(
        "executor/prompt_graphs.py",
        ("tests/executor/test_graph_executor.py",),
        ("captured prompts are not freed", "step.graph.reset()", "pass"),
    ),
    *bugs(
        "entrypoints/engine_thread.py",
        ASYNC,
        ("a call that failed keeps its other requests", "if len(call.results) < call.count:", "if not call.complete:"),
        (
            "the end of a thread forgets its inbox",
            "self.ended = refusal, True\n        while not",
            "self.ended = refusal, True\n        while False and not",
        ),
        (
            "a closed engine takes calls that nobody runs",
            "        if self.ended:\n            raise",
            "        if False:\n            raise",
        ),
        ("every token of a whole reply calls the loop", "outputs if self._num_streams[loop] else ended", "outputs"),
        ("an ended stream still counts", "self._num_streams[loop] -= call.streamed", "pass"),
        ("a closed loop keeps its requests", "if loop.is_closed()]", "if False]"),
        (
            "an engine goes on without its state",
            "(lease.dead is None and self.state.epoch == lease.epoch)",
            "lease.dead is None",
        ),
        ("a state of another engine is taken", "if state.runtime.lease is not lease:", "if False:"),
        ("an error of the engine keeps its frames", "refusal.__cause__ = as_value(error)", "refusal.__cause__ = error"),
        ("a call that was taken in keeps its place", "self._queued.discard(call)", "pass"),
        ("a call that was cancelled keeps its place", "self._encoding.discard(call)", "pass"),
        ("a call of nothing keeps its loop", "        if call.ids:\n", "        if True:\n"),
        ("running requests need no room", "len(state.running) + len(state.waiting)\n", "len(state.waiting)\n"),
        ("a second close does not cut a drain short", "self._draining and drain", "self._draining"),
        ("a drain ends at once", "self._draining and drain", "False"),
        ("a function that ends a request leaves its call waiting", "if sequence_of(state, i) is None]", "if False]"),
        ("a thread that has ended is kept by the exit", "atexit.unregister(self._exit)", "pass"),
        ("a refusal is one exception for all", "error = type(self.refusal)(*self.refusal.args)", "error = self.refusal"),
    ),
    *bugs("entrypoints/calls.py", ASYNC, ("a stream wakes only at its end", "if self.streamed or self.complete:", "if self.complete:")),
    *bugs(
        "entrypoints/async_llm.py",
        ASYNC,
        ("an engine goes on without its object", "weakref.finalize(self, self._engine.close).atexit = False", "pass"),
        ("long texts are encoded in the loop", "<= SHORT", "<= SHORT * 99"),
        ("texts are encoded in the engine", "if texts:", "if False:"),
        (
            "a reader gets tokens twice",
            "token_ids, call.token_ids = call.token_ids, []",
            "token_ids, call.token_ids = call.token_ids * 2, []",
        ),
        (
            "a stream that is left runs on",
            "logprobs=None if logprobs is None else tuple(logprobs))\n        finally:\n            self._engine.cancel(call)",
            "logprobs=None if logprobs is None else tuple(logprobs))\n        finally:\n            pass",
        ),
    ),
    *bugs(
        "entrypoints/ray/routing.py",
        ROUTING,
        ("a replica may run one more than its share", "if load >= most:", "if load > most:"),
        ("the request that comes is left out of the mean", "(num_running + 1)", "num_running"),
        ("the shortest prefix wins", "return 0, -depths[replica]", "return 0, depths[replica]"),
        ("of equal prefixes the busiest replica wins", "load if known else 0", "-load if known else 0"),
        ("prompts that nobody has follow the load", "load if known else 0", "load"),
        ("a request that has ended still counts", "self._running.pop(request, None)\n\n    def keep", "pass\n\n    def keep"),
        ("a replica that failed a request is asked again", "if replica not in avoid]", "]"),
        ("prefixes are never forgotten", "while len(self._holders) > self._most_keys:", "while False:"),
    ),
    *bugs(
        "entrypoints/ray/failover.py",
        FAILOVER,
        ("a stream that has begun is sent twice", "            if begun:\n", "            if False:\n"),
        ("a comment counts as a beginning", "begun = begun or not _is_comment(piece)", "begun = True"),
        ("a second head is sent", "if told is None:\n                        told = head", "if True:\n                        told = head"),
        (
            "a replica that ends is believed",
            "return msgspec.json.decode(piece.removeprefix",
            "return False and msgspec.json.decode(piece.removeprefix",
        ),
    ),
    *bugs(
        "entrypoints/ray/batch_units.py",
        BATCH_FILES,
        ("a unit has a row too many", 'found[-1]["rows"] == unit_rows', 'found[-1]["rows"] > unit_rows'),
        (
            "empty lines are rows",
            "            if line.strip():\n                if not found",
            "            if True:\n                if not found",
        ),
        ("units that are done run again", "if plan.part(folder, unit).name not in there]", "]"),
        (
            "errors of bad lines go to other rows",
            "bads if isinstance(row, BadRow) else goods",
            "goods if isinstance(row, BadRow) else bads",
        ),
    ),
    *bugs(
        "ops/attention/fused_plan.py",
        FUSED_STEP,
        ("few rows of one KV head are few programs", "if num_kv_heads <= FEW_KV_HEADS // 2:", "if False:"),
        ("many rows of one KV head are few programs", "if num_kv_heads > FEW_KV_HEADS:", "if True:"),
        ("a plan of one KV head reads no more tokens", "total * heads <= MOST_TOKENS * KV_HEADS", "total <= MOST_TOKENS"),
        ("one row of one KV head may be as long as eight rows", "most = min(MOST_TOKENS, MOST_TILES", "most = min(1 << 20, MOST_TILES"),
        ("long rows in FP8 go by KV heads", "KV_HEADS if self.fp8 else min", "min"),
        ("a long row is the same part of all with one KV head", "total * heads // (8 * KV_HEADS)", "total // 8"),
    ),
    *bugs(
        "ops/linear/linear_add_norm.py",
        FUSED_STEP,
        ("programs of few outputs have few loads on the way", "stages = min(most, memory", "stages = min(3, memory"),
        ("few rows have tiles of 64", "few = known and rows <= FEW_ROWS", "few = False"),
        ("programs have no loads on the way", "if stages >= 3 else ()", "if stages >= 1 else ()"),
        ("an A100 has no tile of four steps", "*more, (WideTile(), 1), (wide, 1)", "*more, (wide, 1)"),
        ("loads on the way exceed the memory", "memory * 7 // 8 //", "memory * 8 // 7 //"),
    ),
)
