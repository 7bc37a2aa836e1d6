"""A decoder in numpy and float64 that runs one token at a time. Tests compare the model with it when KV is approximate.

It shares only the weights with the engine. It stores keys before rotation and rotates all of them each time a token attends to them. So a
key that the engine moved wrongly cannot agree by accident. Shapes: n tokens · L layers · H query heads · K key/value heads · D head_dim ·
V vocabulary · M hidden_size.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from nanovllm.models.common.params import Layer
from nanovllm.models.model import Model

KeysValues = np.ndarray  # keys before rotation, and values, of one token: `[L, 2, K, D]`


class Reference:
    """A decoder with a model's weights as float64 arrays. It raises `ValueError` for experts and for scaled rotary positions."""

    def __init__(self, model: Model):
        config, params = model.config, model.params
        if config.rope.kind != "default":
            raise ValueError(f"the numpy reference does not support rope kind {config.rope.kind!r}; use a model with rope kind 'default'")
        if config.moe is not None:
            raise ValueError("the numpy reference does not support experts; use a model without them")
        self.config = config
        self.embed, self.final_norm = _array(params.embed), _array(params.final_norm)
        self.head = self.embed if params.head is None else _array(params.head)
        self.layers: list[Layer[Any]] = [replace(w, **{f.name: _array(getattr(w, f.name)) for f in fields(w)}) for w in params.layers]
        self.speeds = np.array([config.rope.theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)])

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotate vectors `[n, ..., D]` for the positions `[n]`; channels i and i + D/2 are the two parts of one complex number."""
        half = x.shape[-1] // 2
        angles = positions.reshape(-1, *[1] * (x.ndim - 1)) * self.speeds
        rotated = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate((rotated.real, rotated.imag), -1)

    def run(
        self, before: Seq[tuple[int, KeysValues]], token: int, position: int, held: KeysValues | None = None
    ) -> tuple[KeysValues, np.ndarray]:
        """Run one token after earlier tokens, and return its keys and values and the logits `[V]` of the next token.

        Args:
            before: Position, and keys and values, of each earlier token.
            token: The token id.
            position: The token's position.
            held: If given, the token attends to these keys and values as its own. The engine does so when a token runs again only for
                its logits.
        """
        positions = np.array([*(p for p, _ in before), position])
        x_M, made = self.embed[token], []
        for index, w in enumerate(self.layers):
            q_HD, own_2KD = self._qkv(w, x_M, position)
            made.append(own_2KD)
            seen = np.stack([*(kv[index] for _, kv in before), own_2KD if held is None else held[index]])
            since = max(0, len(seen) - self.config.window(index)) if self.config.window(index) else 0
            keys, values = self.rotate(seen[since:, 0], positions[since:]), seen[since:, 1]
            x_M = x_M + _linear(self._attend(q_HD, keys, values).ravel(), w.o, w.o_bias)
            assert w.gate_up is not None and w.down is not None
            gate, up = np.split(_linear(self._norm(x_M, w.post_norm), w.gate_up, w.gate_up_bias), 2)
            x_M = x_M + _linear(gate / (1 + np.exp(-gate)) * up, w.down, w.down_bias)
        return np.stack(made), self.head @ self._norm(x_M, self.final_norm)

    def _qkv(self, w: Layer[Any], x_M: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rotated queries `[H, D]`, and keys before rotation and values `[2, K, D]`."""
        heads = _linear(self._norm(x_M, w.input_norm), w.qkv, w.qkv_bias).reshape(-1, self.config.head_dim)
        q_HD, k_KD, v_KD = np.split(heads, (self.config.num_heads, self.config.num_heads + self.config.num_kv_heads))
        if w.q_norm is not None and w.k_norm is not None:
            q_HD, k_KD = self._norm(q_HD, w.q_norm), self._norm(k_KD, w.k_norm)
        return self.rotate(q_HD[None], np.array([position]))[0], np.stack((k_KD, v_KD))

    def _attend(self, q_HD: np.ndarray, k_nKD: np.ndarray, v_nKD: np.ndarray) -> np.ndarray:
        group = q_HD.shape[0] // k_nKD.shape[1]
        k_nHD, v_nHD = k_nKD.repeat(group, 1), v_nKD.repeat(group, 1)
        scores_Hn = np.einsum("hd,nhd->hn", q_HD, k_nHD) / math.sqrt(self.config.head_dim)
        weights = np.exp(scores_Hn - scores_Hn.max(1, keepdims=True))
        return np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), v_nHD)

    def _norm(self, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_norm_eps) * gain


def _array(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.double().numpy()


def _linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return weight @ x if bias is None else weight @ x + bias
