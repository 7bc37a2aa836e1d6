"""`PageMachine`: compare reference counts and the free list with a dict (invariants 1, 2, 3 and 5)."""

from types import ModuleType

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from nanovllm.errors import BrokenInvariantError
from nanovllm.state import pages as page_ops
from nanovllm.state.pages import PageState
from nanovllm.testing.shadows.memory import KeptValues, ShadowPages, expect


class PageMachine(RuleBasedStateMachine):
    """Test a page allocator: allocate, retain and release pages in any order, and go back to older values.

    Pools have 1 to 8 pages. Each call takes 0 to 9 pages, so allocations often fail. Releasing a free page and writing to a shared page
    must raise `BrokenInvariantError`.

    Checks invariants 1 (counts), 2 (free pages), 3 (one owner before a write) and 5 (old values do not change).

    Attributes:
        ops: The module under test. A subclass may set any object with `init_pages`, `allocate`, `retain`, `release`,
            `require_writable` and `free_pages`.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.state import pages
        >>> from nanovllm.testing import PageMachine
        >>> class MyPages(PageMachine):
        ...     ops = pages  # your module here
        >>> run_state_machine_as_test(MyPages, settings=settings(max_examples=5, deadline=None))
    """

    ops: ModuleType = page_ops
    held = Bundle("held")
    versions = Bundle("versions")

    def __init__(self) -> None:
        super().__init__()
        self.shadow = ShadowPages(0)
        self.pages: PageState = self.ops.init_pages(0)
        self.kept = KeptValues()

    @initialize(num_pages=st.integers(1, 8))
    def start(self, num_pages: int) -> None:
        """Start with an empty pool."""
        self.pages, self.shadow = self.ops.init_pages(num_pages), ShadowPages(num_pages)

    @rule(target=held, count=st.integers(0, 9))
    def allocate(self, count: int):
        """Allocate pages: the call returns as many free pages as requested, or None and takes nothing."""
        taken = self.ops.allocate(self.pages, count)
        expect((taken is None) == (count > len(self.shadow.free)), f"allocating {count} of {len(self.shadow.free)} free pages gave {taken}")
        if taken is None:
            return multiple()
        self._move(taken[0])
        expect(len(set(taken[1])) == count and set(taken[1]) <= self.shadow.free, f"{taken[1]} are not {count} of {self.shadow.free}")
        self.shadow.add(taken[1])
        return taken[1]

    @rule(target=held, run=held)
    def retain(self, run: tuple[int, ...]):
        """Add an owner to each page of a run; a free page is refused."""
        if not set(run) <= set(self.shadow.owners):
            self._refused(self.ops.retain, run)
            return multiple()
        self._move(self.ops.retain(self.pages, run))
        self.shadow.add(run)
        return run

    @rule(run=consumes(held))
    def release(self, run: tuple[int, ...]) -> None:
        """Remove an owner from each page of a run; a free page is refused as a double free."""
        if not set(run) <= set(self.shadow.owners):
            return self._refused(self.ops.release, run)
        self._move(self.ops.release(self.pages, run))
        self.shadow.remove(run)

    @rule(target=held, run=held)
    def retain_twice(self, run: tuple[int, ...]):
        """Two more owners by one call, which names each page twice."""
        if not set(run) <= set(self.shadow.owners):
            return multiple()
        self._move(self.ops.retain(self.pages, (*run, *run)))
        self.shadow.add((*run, *run))
        return multiple(run, run)

    @precondition(lambda self: self.shadow.owners)
    @rule(data=st.data())
    def release_any(self, data: st.DataObject) -> None:
        """Pages by one call in any order, each as often as it has owners or less often."""
        owned = [page for page, count in sorted(self.shadow.owners.items()) for _ in range(count)]
        run = data.draw(st.permutations(owned))[: data.draw(st.integers(1, len(owned)))]
        self._move(self.ops.release(self.pages, run))
        self.shadow.remove(run)

    @rule(data=st.data())
    def release_too_many(self, data: st.DataObject) -> None:
        """A page that one call names more often than it has owners is a double free."""
        page = data.draw(st.integers(0, self.shadow.num_pages - 1))
        self._refused(self.ops.release, [page] * (self.shadow.owners.get(page, 0) + 1))

    @rule(page=st.integers(0, 7))
    def release_free(self, page: int) -> None:
        """A double free raises, also if valid pages come before it in the call."""
        if page in self.shadow.free:
            self._refused(self.ops.release, (*list(self.shadow.owners)[:1], page))

    @rule()
    def write(self) -> None:
        """A page is writable if it has exactly one owner."""
        for page in range(self.shadow.num_pages):
            if self.shadow.owners.get(page, 0) == 1:
                self.ops.require_writable(self.pages, [page])
            else:
                self._refused(self.ops.require_writable, [page])

    @rule(target=versions)
    def bookmark(self):
        """Remember a value to go back to."""
        return self.pages, self.shadow.copy()

    @rule(version=versions)
    def go_back(self, version: tuple[PageState, ShadowPages]) -> None:
        """Continue from an older value; the newer value does not change."""
        self.pages, self.shadow = version[0], version[1].copy()

    @invariant()
    def agrees(self) -> None:
        """Compare counts and free pages with the shadow."""
        counts = dict(self.pages.refcounts.items())
        expect(counts == self.shadow.owners, f"counts {counts}, owners {self.shadow.owners}", invariant=1)
        free = self.ops.free_pages(self.pages)
        expect(len(free) == len(set(free)) == self.pages.num_free, f"free list {free} of {self.pages.num_free}", invariant=2)
        expect(set(free) == self.shadow.free, f"free {free}, expected {self.shadow.free}", invariant=2)

    @invariant()
    def old_values_stand(self) -> None:
        """Check invariant 5: old values have not changed."""
        self.kept.require_unchanged()

    def _move(self, pages: PageState) -> None:
        self.kept.keep(self.pages)
        self.pages = pages

    def _refused(self, call, run) -> None:
        try:
            call(self.pages, run)
        except BrokenInvariantError:
            return
        expect(False, f"{call.__name__}({run}) should have raised BrokenInvariantError; owners are {self.shadow.owners}")
