"""`PageMachine`: reference counts and the free list against a dict (invariants 1, 2, 3 and 5)."""

from types import ModuleType

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from nanovllm.errors import BrokenInvariantError
from nanovllm.state import pages as page_ops
from nanovllm.state.pages import PageState
from nanovllm.testing.shadows.memory import KeptValues, ShadowPages, expect


class PageMachine(RuleBasedStateMachine):
    """Any order of allocations, retains and releases, and steps back to older values, which must have stayed what they were.

    `ops` is the module under test: another with the same five functions can be put in its place by a subclass.
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
        """An empty pool."""
        self.pages, self.shadow = self.ops.init_pages(num_pages), ShadowPages(num_pages)

    @rule(target=held, count=st.integers(0, 9))
    def allocate(self, count: int):
        """All that was asked for, from the free pages, or None and nothing taken."""
        taken = self.ops.allocate(self.pages, count)
        expect((taken is None) == (count > len(self.shadow.free)), f"{count} of {len(self.shadow.free)} free pages gave {taken}")
        if taken is None:
            return multiple()
        self._move(taken[0])
        expect(len(set(taken[1])) == count and set(taken[1]) <= self.shadow.free, f"{taken[1]} are not {count} of {self.shadow.free}")
        self.shadow.add(taken[1])
        return taken[1]

    @rule(target=held, run=held)
    def retain(self, run: tuple[int, ...]):
        """One more owner; a free page is refused."""
        if not set(run) <= set(self.shadow.owners):
            self._refused(self.ops.retain, run)
            return multiple()
        self._move(self.ops.retain(self.pages, run))
        self.shadow.add(run)
        return run

    @rule(run=consumes(held))
    def release(self, run: tuple[int, ...]) -> None:
        """One owner less; a free page is a double free."""
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
        """A double free raises, whatever stands before it in the call."""
        if page in self.shadow.free:
            self._refused(self.ops.release, (*list(self.shadow.owners)[:1], page))

    @rule()
    def write(self) -> None:
        """A page is writable while it has exactly one owner."""
        for page in range(self.shadow.num_pages):
            if self.shadow.owners.get(page, 0) == 1:
                self.ops.require_writable(self.pages, [page])
            else:
                self._refused(self.ops.require_writable, [page])

    @rule(target=versions)
    def bookmark(self):
        """A value to come back to."""
        return self.pages, self.shadow.copy()

    @rule(version=versions)
    def go_back(self, version: tuple[PageState, ShadowPages]) -> None:
        """Work goes on from an older value; the newer one stays what it is."""
        self.pages, self.shadow = version[0], version[1].copy()

    @invariant()
    def agrees(self) -> None:
        """Counts and free pages are the shadow's."""
        counts = dict(self.pages.refcounts.items())
        expect(counts == self.shadow.owners, f"counts {counts}, owners {self.shadow.owners}", invariant=1)
        free = self.ops.free_pages(self.pages)
        expect(len(free) == len(set(free)) == self.pages.num_free, f"free list {free} of {self.pages.num_free}", invariant=2)
        expect(set(free) == self.shadow.free, f"free {free}, expected {self.shadow.free}", invariant=2)

    @invariant()
    def old_values_stand(self) -> None:
        """Invariant 5."""
        self.kept.require_unchanged()

    def _move(self, pages: PageState) -> None:
        self.kept.keep(self.pages)
        self.pages = pages

    def _refused(self, call, run) -> None:
        try:
            call(self.pages, run)
        except BrokenInvariantError:
            return
        expect(False, f"{call.__name__}({run}) was accepted; owners are {self.shadow.owners}")
