"""The engine's side of the socket: requests of front ends come in, and what a step gives goes out, between two steps.

One thread does all but write, read, list and delete files and compile grammars. While requests run it looks at the sockets once a step,
without waiting. A front end that reads nothing while much waits for it is cut off, with its requests: it may have been stopped.
"""

import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from nanovllm.chunks.handles import release
from nanovllm.chunks.offload import relieved
from nanovllm.engine.constrained import compile_grammar
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.failures import as_value
from nanovllm.engine.requests import cancel, capacity, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.server import engine_calls, saved_chunks
from nanovllm.entrypoints.server.chunk_calls import kept, save_kept, save_unasked, unread_by
from nanovllm.entrypoints.server.chunk_pages import explained, moved_away, require_pages, staying
from nanovllm.entrypoints.server.chunk_reads import ChunkReads
from nanovllm.entrypoints.server.engine_metrics import EngineMetrics, Timeline
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.idle_saves import IdleSaves
from nanovllm.entrypoints.server.named_chunks import ChunkLimits, NamedChunks, prefix, without_compositions
from nanovllm.entrypoints.server.news import News, Owner
from nanovllm.entrypoints.server.peer import MOST_UNSENT, STALL_SECONDS, Peer
from nanovllm.entrypoints.server.side_thread import Later, SideThread
from nanovllm.entrypoints.server.unread_chunks import hold_marked
from nanovllm.entrypoints.server.wire import (
    Accepted,
    Answer,
    Ask,
    Cancel,
    Failure,
    Hello,
    Inward,
    Keep,
    Outward,
    Submit,
    take_frames,
)
from nanovllm.errors import EngineDeadError, InvalidRequestError, NanoVLLMError, OutOfPagesError, QueueFullError
from nanovllm.executor.executor import runtime_of
from nanovllm.models.model import Model
from nanovllm.operator_lines import say
from nanovllm.sampling.compiled_grammar import is_compiled
from nanovllm.sampling.grammar import Grammar
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.state.chunk import Chunk
from nanovllm.state.device_errors import message_of
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for

READ = 1 << 18
MOST_FILES = 32  # chunks that are being saved or loaded
MOST_LOOKS = 32  # lists and deletions of chunk files
MOST_COMPILED = 256  # requests whose grammars are being compiled
MOST_KNOWN = 64  # sampling options, and grammars, that are kept for further requests
MOST_USED = 256  # names of chunks that requests have begun with, before they are noted in the folder
LOOK_SECONDS = 1.0  # between two looks at the other ranks of an engine that has nothing to do
IDLE_SECONDS = 0.05  # without requests, after which KV and chunks are written to the disk, and between two pieces of them
FLUSHED = 16 << 20  # bytes of a piece
GATHER_SECONDS = 0.004  # that the first of several requests waits for the others, at most
QUIET_SECONDS = 0.001  # in which one of them must come


class EngineLoop:
    """An engine that serves front ends.

    Args:
        model: The model.
        state: The newest state.
        listener: A socket that front ends connect to.
        max_waiting: How many requests may wait. None: any number.
        max_waiting_tokens: How many tokens the prompts of waiting requests may have together, unless only one waits. None: any number.
        process_logits: A function between the logits and the samples of all requests. None: there is none.
        chunk_limits: What the chunks of clients may use.
        most_unsent: How many bytes may wait for a front end that reads nothing for `stall_seconds`.
        stall_seconds: As above.
    """

    def __init__(
        self,
        model: Model,
        state: EngineState,
        listener: socket.socket,
        *,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        process_logits: LogitsProcessor | None = None,
        chunk_limits: ChunkLimits | None = None,
        most_unsent: int = MOST_UNSENT,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.model, self.state, self.process_logits = model, state, process_logits
        self.named, self.metrics = NamedChunks(limits=chunk_limits or ChunkLimits()), EngineMetrics()
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        self.waiting_tokens = 0
        self._patience = most_unsent, stall_seconds
        self._spoken_to: dict[int, Peer] = {}  # front ends to which something was said since the last flush, by their ids
        self._owners: dict[int, Owner] = {}
        self._decode = msgspec.msgpack.Decoder(Inward).decode
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._known: dict[tuple[Any, ...], SamplingParams] = {}
        self._known_grammars: dict[tuple[str, str], Grammar] = {}
        self._together = 1  # requests that came at about the same time when there was nothing to do, and while the first of them ran
        self._num_first = 0  # of these, those that were there for the first step; 0 later
        self._num_later = 0  # requests that came after those, until the next time that there is nothing to do
        self._files = SideThread("engine-files", MOST_FILES, "{most} chunks are being saved or loaded: try again later")
        self._grammars = SideThread("engine-grammars", MOST_COMPILED, "{most} requests wait for their grammars: try again later")
        self._folders = SideThread("engine-folders", MOST_LOOKS, "{most} calls wait that list or delete chunk files: try again later")
        self._reads = ChunkReads()
        for beside in (self._files, self._grammars, self._folders, self._reads.thread):
            self._selector.register(beside.woken, selectors.EVENT_READ, beside.woken)
        self._ended = False
        self._mirror = runtime_of(state).mirror
        self._rest = None if self._mirror is None else LOOK_SECONDS  # for which it may sleep while there is nothing to do
        self._on_disk = runtime_of(state).disk is not None  # whether KV and named chunks are written when there is nothing to do
        self._unwritten, self._saves = self._on_disk, IdleSaves()
        # Names of chunks that requests have begun with since the last note in the folder, the one used last at the end.
        self._used = dict[tuple[str, str], None]()

    def load_chunks(self, *, again: bool) -> None:
        """Make the chunk folder ready, and, if the engine is started `again` or chunks are kept, take pages for the chunks that the one
        before it had in memory and in files. `run` reads their KV. Those that cannot be loaded are named on stderr.
        """
        saved_chunks.tidy(self.named.limits, again=again)
        if not again and not self.named.limits.kept:
            return
        held, problems = hold_marked(self._held())
        self._hold(held)
        for problem in problems:
            say(f"a chunk was not loaded again: {problem}")

    def save_chunks(self) -> None:
        """After `run`: save the chunks that have no files, if chunks are kept. Those that cannot be saved are named on stderr."""
        self._note_used()
        for problem in save_kept(self._held()):
            say(f"a chunk was not saved: {problem}")

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            EngineDeadError: The engine has failed. All front ends were told.
        """
        try:
            while not self._ended:
                idle = not (self.state.running or self.state.waiting)
                told = False
                if self.named.unread or self._reads.awaited:
                    told = self._reads.go_on(self._held(), idle=idle or self._short_of_pages())
                rests = idle and not told and not any(one.waits for one in (self._files, self._folders, self._grammars, self._reads.thread))
                if not self._look(self._sleep() if rests else 0.0) and rests and self._unwritten:
                    self._unwritten = not self._write_some()
                if self._mirror is not None:
                    self._mirror.require_alive()
                self._turn(self._grammars)
                if idle and self.state.waiting:
                    self._gather()
                elif self._num_first:
                    self._together, self._num_first = self._num_first + self._num_later, 0
                self._turn(self._folders)
                self._turn(self._files)
                self._turn(self._reads.thread)
                self._flush()
                if self.state.running or self.state.waiting:
                    self._step()
                    self._flush()
        except BaseException as error:
            self._die(error)
            raise
        finally:
            self.close()

    def _write_some(self) -> bool:
        """Write some of the KV and the named chunks that a crash would lose. Returns whether all is written, or being written."""
        self._note_used()
        waits = False
        while (key := self._saves.next(self.named)) is not None:
            if waits := self._files.busy:  # one after the other: a slow disk must not fill the queue, in which clients' calls wait, too
                break
            self._saves.begin(key)
            try:
                held, later = save_unasked(self._held(), space=key[0], name=key[1])
            except EngineDeadError:
                raise
            except NanoVLLMError as error:
                self._saves.end(key, self.named, error)
                continue
            self._hold(held)
            self._files.begin(later, lambda value, key=key: self._saves.end(key, self.named, value))
            return False
        return flush_kv(self.state, max_bytes=FLUSHED) and not waits

    def _sleep(self) -> float | None:
        """How long the loop may sleep while there is nothing to do: until KV or a chunk is to be written. None: until something comes."""
        again = self._saves.wait
        if again == 0.0:
            self._unwritten = True
        return IDLE_SECONDS if self._unwritten else min((each for each in (self._rest, again) if each is not None), default=None)

    def _note_used(self) -> None:
        """Note in the folder which chunks requests have begun with, for the order in which the next engine reads them."""
        for space, name in self._used:
            saved_chunks.used(self.named.limits, space, name)
        self._used.clear()

    def _short_of_pages(self) -> bool:
        """Whether requests may soon need pages of chunks, which can only be moved to host memory once they have their KV."""
        pool = self.state.pool
        return pool.host is not None and pool.spare(only_free=False) < 0

    def _turn(self, beside: SideThread) -> None:
        """Do one thing that a thread beside this one waits for, if it does."""
        if beside.waits:
            held, tell = beside.turn(self._held())
            self._hold(held)
            tell()

    def _look(self, seconds: float | None) -> bool:
        """Handle what has come, or comes in this time. Returns whether something has."""
        found = self._selector.select(seconds)
        for key, events in found:
            self._ready(key, events)
        return bool(found)

    def _gather(self) -> None:
        """Wait for the requests that come together with the first one, as many as came the last time that there was nothing to do.

        Each pass over a few prompts costs about as much as one over many. A request that came alone the last time does not wait.
        """
        end = time.perf_counter() + GATHER_SECONDS
        while len(self.state.waiting) < self._together and time.perf_counter() < end and self._look(QUIET_SECONDS):
            pass
        self._num_first, self._num_later = len(self.state.waiting), 0

    def stop(self) -> None:
        """End `run` after this round."""
        self._ended = True

    def stop_on(self, number: int) -> None:
        """End `run` after the round in which a signal comes. Only in the main thread."""
        woken, waking = socket.socketpair()
        for sock in (woken, waking):
            sock.setblocking(False)
        signal.set_wakeup_fd(waking.detach(), warn_on_full_buffer=False)
        signal.signal(number, lambda *_: self.stop())
        self._selector.register(woken, selectors.EVENT_READ, woken)

    def close(self) -> None:
        """Give up files that are open, and close all sockets."""
        self._files.close()
        self._folders.close()
        self._grammars.close()
        self._reads.thread.close()
        for key in [*self._selector.get_map().values()]:
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._selector.close()

    def _die(self, error: BaseException) -> None:
        """Tell all front ends that their requests are lost."""
        kind, message = EngineDeadError.__name__, f"the engine has failed: {type(error).__name__}: {message_of(error)}"
        for peer in {id(owner.peer): owner.peer for owner in self._owners.values()}.values():
            with suppress(OSError):
                peer.add(Failure([*peer.requests], kind, message))
                peer.flush()

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
        if isinstance(key.data, socket.socket):
            key.data.recv(READ)
            return
        if key.data is None:
            with suppress(OSError):
                self._accept(key.fileobj.accept()[0])  # pyright: ignore[reportAttributeAccessIssue]
            return
        peer: Peer = key.data
        try:
            if events & selectors.EVENT_WRITE:
                peer.blocked = False
                self._selector.modify(peer.sock, selectors.EVENT_READ, peer)
                self._spoken_to[id(peer)] = peer
            if events & selectors.EVENT_READ:
                data = peer.sock.recv(READ)
                if not data:
                    raise ConnectionResetError
                peer.inward += data
                for message in self._messages(peer):
                    self._handle(peer, message)
        except OSError:
            self._drop(peer)

    def _messages(self, peer: Peer) -> list[Inward]:
        """The messages that are complete.

        Raises:
            ConnectionAbortedError: The front end speaks nonsense.
        """
        try:
            return [self._decode(body) for body in take_frames(peer.inward)]
        except ValueError as error:  # also msgspec's. Errors of requests are ValueErrors too, so only this is inside
            raise ConnectionAbortedError from error

    def _accept(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer, config = Peer(sock, *self._patience), self.state.config
        self._selector.register(sock, selectors.EVENT_READ, peer)
        hello = Hello(
            max_model_len=capacity(self.state, whole=False),
            vocab_size=self.model.config.vocab_size,
            max_num_seqs=config.max_num_seqs,
            device=str(self.model.device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            num_pages=config.num_pages,
            page_size=config.page_size,
            end_ids=[*self.model.config.eos_token_ids],
        )
        self._send(peer, hello)

    def _drop(self, peer: Peer) -> None:
        """Forget a front end, and cancel its requests."""
        with suppress(KeyError):
            self._selector.unregister(peer.sock)
        peer.sock.close()
        self._spoken_to.pop(id(peer), None)
        self._cancel(peer, [*peer.requests, *peer.coming])

    def _handle(self, peer: Peer, message: Inward) -> None:
        match message:
            case Submit():
                names = [part for parts in message.prompts for part in parts if isinstance(part, str)]
                try:
                    if (number := self.named.first_unread(message.space, names)) is not None:
                        self._reads.wait(number, partial(self._go_on, peer, message))
                        peer.coming.update(message.ids)
                        return
                    new = self._new_grammars(message)
                    self._compile(peer, message, new) if new else self._submit(peer, message)
                except NanoVLLMError as error:
                    self._refuse(peer, message.ids, error)
            case Cancel():
                self._cancel(peer, message.ids)
            case Ask():
                tell = partial(self._answer, peer, message.id)
                try:
                    if (number := unread_by(self.named, message.name, message.arguments)) is not None:
                        self._reads.wait(number, partial(self._go_on, peer, message))
                        return
                    held, value = engine_calls.call(self._held(), message.name, message.arguments)
                except NanoVLLMError as error:
                    tell(error)
                    return
                self._hold(held)
                if isinstance(value, Later):
                    (self._folders if value.short else self._files).begin(value, tell)
                else:
                    tell(value)

    def _go_on(self, peer: Peer, message: Submit | Ask, error: NanoVLLMError | None) -> None:
        """Handle a message whose chunk was read from its file, or could not be. A file that cannot be read can be deleted."""
        if isinstance(message, Submit):
            if not peer.coming.issuperset(message.ids):  # cancelled meanwhile, or the front end has gone
                return
            peer.coming.difference_update(message.ids)
        deletes = isinstance(message, Ask) and message.name == "delete_saved" and not isinstance(error, OutOfPagesError)  # still unread
        if error is None or deletes:
            self._handle(peer, message)
        else:
            self._refuse(peer, message.ids if isinstance(message, Submit) else [message.id], error)

    def _held(self) -> Held:
        return Held(model=self.model, state=self.state, named=self.named, metrics=self.metrics)

    def _hold(self, held: Held) -> None:
        if held.named is not self.named:
            self._unwritten = self._on_disk
        self.state, self.named = held.state, held.named

    def _answer(self, peer: Peer, number: int, value: Any) -> None:
        """Tell what a function returned, or its error."""
        if isinstance(value, NanoVLLMError):
            self._refuse(peer, [number], value)
        elif peer.sock.fileno() >= 0:  # the front end may have gone since it asked
            self._send(peer, Answer(number, value))

    def _new_grammars(self, message: Submit) -> list[Grammar]:
        """The grammars of requests that are not compiled yet."""
        config, grammars = self.model.config, {self._grammar(options["grammar"]) for options in message.params if "grammar" in options}
        return [one for one in grammars if not is_compiled(self.model.tokenizer, one, config.vocab_size, config.eos_token_ids)]

    def _grammar(self, fields: dict[str, Any]) -> Grammar:
        """The grammar of a frame. It takes milliseconds to check a large one, so it is kept for other rows and further requests."""
        return kept_value(self._known_grammars, (fields["form"], fields["source"]), lambda: Grammar(**fields))

    def _compile(self, peer: Peer, message: Submit, grammars: list[Grammar]) -> None:
        """Queue requests when their grammars are compiled, which is done while steps run."""

        def compiled(found: Any) -> None:
            if not peer.coming.issuperset(message.ids):  # cancelled meanwhile, or the front end has gone
                return
            peer.coming.difference_update(message.ids)
            try:
                if isinstance(found, NanoVLLMError):
                    raise found
                self._submit(peer, message)  # if compiling failed in another way, it fails here once more
            except NanoVLLMError as refusal:
                self._refuse(peer, message.ids, refusal)

        peer.coming.update(message.ids)
        work = Later(work=lambda _: [compile_grammar(self.model, one) for one in grammars], end=lambda held, found: (held, found))
        self._grammars.begin(work, compiled)

    def _submit(self, peer: Peer, message: Submit) -> None:
        runs = [[np.frombuffer(part, np.int32) for part in parts if isinstance(part, bytes)] for parts in message.prompts]
        names = [tuple([part for part in parts if isinstance(part, str)]) for parts in message.prompts]
        lengths = [sum(map(len, parts)) for parts in runs]
        self._require_room(len(runs), sum(lengths))
        params: list[SamplingParams | None] = [self._params(options) for options in message.params]
        bases, passing = dict[tuple[str, ...], Chunk](), list[Chunk]()
        try:
            for each in dict.fromkeys(names):
                if each:
                    bases[each], once = self._prefix(message.space, each, message.namespace)
                    passing += [bases[each]] * once
            contexts = [[*([bases[each]] if each else []), *run] for each, run in zip(names, runs, strict=True)]
            totals = [sum(map(len, parts)) for parts in contexts]
            if (keep := message.keep) is not None:
                self._require_keeping(keep, totals, None if not names[0] else bases[names[0]])
            own = {"whole": keep is not None, "namespace": message.namespace}
            self.state = moved_away(self.state, self.named, contexts)
            self.state, self.named = require_pages(self.state, self.named, contexts, **own)
            more = {"priorities": [message.priority] * len(contexts), "process_logits": self.process_logits, "namespace": message.namespace}
            self.state, ids = submit_many(self.model, self.state, contexts, params, keep=keep is not None, **more)
        finally:
            for chunk in passing:  # the requests hold its pages
                self.state = release(self.state, chunk)
        for name in dict.fromkeys(name for each in names for name in each):
            self._used.pop((message.space, name), None)
            self._used[message.space, name] = None
        if len(self._used) > MOST_USED:
            self._note_used()
        now = time.perf_counter()
        for request_id, number, length, total in zip(ids, message.ids, lengths, totals, strict=True):
            own = Owner(peer, number, message.streamed, length, keep, Timeline(now, total), message.namespace)
            owner = self._owners[request_id] = own
            peer.requests[number] = request_id
            if owner.counted:
                self.metrics.submitted(request_id, owner.line)
        self.waiting_tokens += sum(lengths)
        self._num_later += len(ids)
        self._send(peer, Accepted(message.ids))

    def _prefix(self, space: str, names: tuple[str, ...], namespace: int) -> tuple[Chunk, bool]:
        """One chunk of several in a row, and whether it must be released. Older compositions give it their pages if it needs them."""
        try:
            self.state, self.named, found, once = prefix(self.model, self.state, self.named, space, names, namespace)
        except OutOfPagesError:
            if not self.named.composed:
                raise
            self.state, self.named = without_compositions(self.state, self.named)
            self.state, self.named, found, once = prefix(self.model, self.state, self.named, space, names, namespace)
        return found, once

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        """The sampling options of a frame. Those of most requests are the same, and are checked once."""
        if (grammar := options.get("grammar")) is not None:
            options = {**options, "grammar": self._grammar(grammar)}
        key = tuple(options.items())
        try:
            return kept_value(self._known, key, lambda: SamplingParams(**options))
        except TypeError:  # a value is a list
            return SamplingParams(**options)

    def _require_keeping(self, keep: Keep, totals: list[int], base: Chunk | None) -> None:
        """Refuse a request whose chunk would have no name or no room."""
        if len(totals) != 1:
            raise InvalidRequestError(f"keep={keep.name!r} is for one reply, not for {len(totals)}")
        others = [owner.keep for owner in self._owners.values() if owner.keep is not None and owner.keep.space == keep.space]
        new = {other.name for other in others} - {keep.name, *self.named.space(keep.space)}
        size = self.state.config.page_size
        num_pages = pages_for(totals[0], size) - (0 if base is None else len(base) // size)
        asked = {"replaced": keep.replaced, "field": keep.field}
        self.named.require_room(self.state, keep.space, keep.name, coming=len(new), num_pages=num_pages, **asked)

    def _require_room(self, count: int, tokens: int) -> None:
        waiting = len(self.state.waiting)
        places = max(0, self.state.config.max_num_seqs - len(self.state.running))  # for those that wait for the next step alone
        if self.max_waiting is not None and waiting + count > self.max_waiting + places:
            raise QueueFullError(f"{waiting} requests wait, and at most {self.max_waiting} may (--max-waiting): try again later")
        if self.max_waiting_tokens is not None and waiting and self.waiting_tokens + tokens > self.max_waiting_tokens:
            limit = f"at most {self.max_waiting_tokens} may (--max-waiting-tokens)"
            raise QueueFullError(f"requests with {self.waiting_tokens} prompt tokens wait, and {limit}: try again later")

    def _cancel(self, peer: Peer, numbers: list[int]) -> None:
        peer.coming.difference_update(numbers)
        for number in numbers:
            if (request_id := peer.requests.pop(number, None)) is not None:
                owner = self._owners.pop(request_id)
                self.waiting_tokens -= owner.waiting
                self.state = cancel(self.state, request_id)
                if owner.counted:
                    self.metrics.cancelled(request_id)

    def _refuse(self, peer: Peer, numbers: list[int], error: NanoVLLMError) -> None:
        if isinstance(error, EngineDeadError) or self.state.epoch != self.state.runtime.lease.epoch:
            raise error
        if peer.sock.fileno() >= 0:
            told = explained(self.state, error)
            self._send(peer, Failure(numbers, type(told).__name__, str(as_value(told))))

    def _step(self) -> None:
        self._unwritten = self._on_disk
        if self.named.composed and not self.state.pool.num_available:
            self.state, self.named = without_compositions(self.state, self.named)
        self.state = relieved(self.state, staying(self.named))
        waiting, metrics, begin = self.state.waiting, self.metrics, time.perf_counter()
        self.state, outputs = step(self.model, self.state)
        now, firsts, tokens = time.perf_counter(), 0, len(outputs)
        if self.state.waiting is not waiting:
            metrics.left_queue(self.state.waiting, begin)
        news: dict[int, News] = {}
        for out in outputs:
            owner = self._owners[out.request_id]
            if owner.fresh:
                owner.fresh = False
                self.waiting_tokens -= owner.waiting
                owner.waiting = 0
                if owner.counted and out.token_ids:
                    metrics.began(out.request_id, owner.line, begin, now)
                    firsts += 1
            if out.output is None and not owner.streamed:
                continue
            if (told := news.get(id(owner.peer))) is None:
                told = news[id(owner.peer)] = News(owner.peer)
            value = failed = None
            if out.output is not None:
                failed = None if out.output.error is None else explained(self.state, out.output.error)
                del self._owners[out.request_id], owner.peer.requests[owner.number]
                if owner.counted:
                    metrics.ended(out.request_id, owner.line, out.output, now)
                tokens -= not (owner.counted and out.token_ids)
                if owner.keep is not None:
                    held, value = kept(self._held(), out.request_id, owner.keep, out.output, owner.namespace)
                    self._hold(held)
                    value = explained(self.state, value) if isinstance(value, NanoVLLMError) else value
            told.add(owner, out, value, failed)
        metrics.stepped(now, tokens, firsts)
        for told in news.values():
            self._send(told.peer, told.message())

    def _send(self, peer: Peer, message: Outward) -> None:
        """Say something with the next `_flush`."""
        peer.add(message)
        self._spoken_to[id(peer)] = peer

    def _flush(self) -> None:
        """Send what was said, as much as front ends take now."""
        for peer in [*self._spoken_to.values()]:
            if not peer.blocked or peer.stalled:  # a long step may have kept it from what it could have taken
                try:
                    peer.flush()
                except OSError:  # it has gone
                    self._drop(peer)
                    continue
                if peer.blocked:
                    self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            if peer.stalled:
                told = f"a front end reads nothing, and {peer.unsent} bytes wait for it: its {len(peer.requests)} requests are cancelled"
                say(told)
                self._drop(peer)
        self._spoken_to.clear()


def kept_value(values: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The value of a key, made if it is not kept. All are forgotten when there are too many."""
    if key not in values:
        if len(values) >= MOST_KNOWN:
            values.clear()
        values[key] = make()
    return values[key]
