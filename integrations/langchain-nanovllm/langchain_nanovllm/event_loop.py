"""`LoopThread`: an event loop in a thread, for calls from programs that have none."""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, which ends with the object or with the program.

    Callers may have a running event loop themselves, as in a notebook: they wait for this one all the same.

    Examples:
        >>> import asyncio
        >>> LoopThread().run(asyncio.sleep(0, "done"))
        'done'
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(self._loop,), daemon=True, name="langchain-nanovllm")
        thread.start()
        weakref.finalize(self, _stop, self._loop, thread)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine. If waiting is interrupted, as by Ctrl-C, the coroutine is cancelled."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The items of an asynchronous iterator, which is closed when this one is."""
        lock = asyncio.Lock()  # an iterator that still waits for an item cannot be closed

        async def following() -> T:
            async with lock:
                return await anext(items)

        async def closed() -> None:
            async with lock:
                await items.aclose()

        try:
            while True:
                yield self.run(following())
        except StopAsyncIteration:
            return
        finally:
            self.run(closed())


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(1.0)
