"""The store of symmetric memory: processes whose exchanges have other numbers find each other's values."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from nanovllm.ops.distributed.renumbered_store import Renumbered

SECOND = timedelta(seconds=1)


def test_numbers_count_from_the_first_one() -> None:
    inner = dist.HashStore()
    stores = [Renumbered(inner) for _ in range(2)]
    old, new = (dist.PrefixStore("x", store) for store in stores)  # which calls them from C++, as exchanges do
    for turn in range(3):
        old.set(f"Symmetric/{7 + turn}/0", f"old {turn}")
        new.set(f"Symmetric/{turn}/1", f"new {turn}")
        old.wait([f"Symmetric/{7 + turn}/1"])
        new.wait([f"Symmetric/{turn}/0"], SECOND)
        assert old.get(f"Symmetric/{7 + turn}/1") == f"new {turn}".encode()
        assert new.get(f"Symmetric/{turn}/0") == f"old {turn}".encode()


def test_each_name_has_its_own_count_and_other_keys_stay() -> None:
    inner = dist.HashStore()
    inner.set_timeout(SECOND)
    store = Renumbered(inner)
    for key in ("a/5/0", "b/9/0", "plain", "path/to/file", "x/1"):
        store.set(key, key.encode())
    for key in ("a/0/0", "b/0/0", "plain", "path/to/file", "x/1"):
        assert inner.get(key)
    store.set("a/6/3", b"next")
    assert inner.get("a/1/3") == b"next"
    with pytest.raises(RuntimeError):
        store.wait(["a/9/0"], timedelta(milliseconds=20))
