"""`EngineState` and `Model` as pytrees: tensors are leaves, all else is structure."""

import torch
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.testing.models import random_model, tiny_config


def test_the_leaves_of_a_state_are_its_kv_memory() -> None:
    model = random_model(tiny_config())
    state, chunk = nv.prefill(model, nv.init_state(model, num_pages=8), [1, 2, 3])
    leaves, structure = pytree.tree_flatten(state)
    assert [leaf.data_ptr() for leaf in leaves] == [pool.data_ptr() for pool in state.kv.pools]
    again = pytree.tree_unflatten(leaves, structure)
    assert (again.pool, again.chunks, again.stats, again.epoch) == (state.pool, state.chunks, state.stats, state.epoch)
    state, _ = nv.generate(model, again, chunk, nv.SamplingParams(temperature=0, max_tokens=2))
    nv.check(state)


def test_the_leaves_of_a_model_are_its_weights() -> None:
    model = random_model(tiny_config(tie_word_embeddings=True))
    weights = [leaf for leaf in pytree.tree_leaves(model) if leaf is not None]
    assert len(weights) > 10
    assert all(isinstance(leaf, torch.Tensor) for leaf in weights)
    assert {leaf.data_ptr() for leaf in weights} == {leaf.data_ptr() for leaf in pytree.tree_leaves(model.params) if leaf is not None}
    doubled = pytree.tree_map(lambda leaf: leaf if leaf is None else leaf * 2, model)
    assert torch.equal(doubled.params.embed, model.params.embed * 2)
    assert doubled.config == model.config
