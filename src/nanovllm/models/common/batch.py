"""`Batch`: the tensors of one step, as `forward` takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.types import Int32, Tensor, brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """The fields of a `Batch` for the sliding-window layers of a model that also has other layers.

    They replace the fields of the same name, and address frames. A frame is the KV memory of a sliding-window page.

    Attributes:
        page_tables: Frames of each row, `[B, P]`, as wide as the tables of pages. A page without a frame has the dummy frame; no query of
            the row attends to it.
        slots: `frame * page_size + offset` of each token, `[T]`.
        plan: The handle of an attention plan over these tables; 0 means no plan.
    """

    page_tables: Int32[Tensor, "B P"]
    slots: Int32[Tensor, "T"]
    plan: int = 0

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tokens of one step. All tensors are int32 on the model's device.

    A decode batch has one token per sequence and `cu_seqlens=None`. A padding row has `seq_lens` 1 and lies on the dummy page, the last
    page of the pool. If every layer has a sliding window, `page_tables` and `slots` address frames. A frame is the KV memory of a
    sliding-window page (`state/window_frames.py`).

    Attributes:
        input_ids: Token ids, `[T]`.
        positions: Positions for the rotary embedding, `[T]`. After a gap they differ from the token's index in its sequence.
        slots: Where keys and values are written, `page * page_size + offset`, `[T]`. Padding points into the dummy page, and so does a
            token that is run again only for its logits.
        page_tables: Pages of each sequence in order, `[B, P]`, padded with the dummy page.
        seq_lens: Tokens that the last token of each row attends to, itself included, `[B]`. The queries of row b are its tokens
            `seq_lens[b] - q_len[b]` to `seq_lens[b] - 1`.
        cu_seqlens: Offset of each row's first token in `input_ids`, and the total at the end, `[B+1]`; None for a decode batch.
        logit_indices: Indices into `input_ids` of the tokens whose logits are returned, `[R]`; None for all tokens.
        plan: The handle of an attention plan. It belongs to the pytree's structure; 0 means no plan.
        window: The sliding window of the layer that gets the batch, in tokens, the token itself included; 0 means no window.
        windowed: The tables and slots for the second KV pool, of the sliding-window layers. None if the model has one pool, or if each
            frame has the number of its page.

    Examples:
        Three tokens of a new sequence on page 0, with the logits of the last token:

        >>> def ints(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> batch = nv.Batch(
        ...     input_ids=ints(5, 6, 7),
        ...     positions=ints(0, 1, 2),
        ...     slots=ints(0, 1, 2),
        ...     page_tables=ints([0]),
        ...     seq_lens=ints(3),
        ...     cu_seqlens=ints(0, 3),
        ...     logit_indices=ints(2),
        ... )
        >>> logits, kv = nv.forward(model.params, state.kv, batch, model.config)
        >>> tuple(logits.shape)
        (1, 4096)
    """

    input_ids: Int32[Tensor, "T"]
    positions: Int32[Tensor, "T"]
    slots: Int32[Tensor, "T"]
    page_tables: Int32[Tensor, "B P"]
    seq_lens: Int32[Tensor, "B"]
    cu_seqlens: Int32[Tensor, "B+1"] | None = None
    logit_indices: Int32[Tensor, "R"] | None = None
    plan: int = 0
    window: int = 0
    windowed: Windowed | None = None

    @staticmethod
    def of_prompts(prompts: Sequence[Sequence[int]], *, last_only: bool = False, device: torch.device | str = "cpu") -> "Batch":
        """Make the batch of whole prompts for `forward` with `kv=None`. It names no pages, so it needs no engine.

        Args:
            prompts: The token ids of each prompt, at least one.
            last_only: Whether logits are returned for the last token of each prompt only, in place of all tokens.
            device: The device of the model.

        Returns:
            The batch. Its page tables have no columns, and its slots are -1.

        Raises:
            InvalidRequestError: There is no prompt, or a prompt has no token.

        Examples:
            >>> prompts = [model.tokenizer.encode("Once upon a time"), model.tokenizer.encode("One day")]
            >>> batch = nv.Batch.of_prompts(prompts, last_only=True)
            >>> batch.cu_seqlens.tolist(), batch.positions.tolist()
            ([0, 4, 6], [0, 1, 2, 3, 0, 1])
            >>> logits, _ = nv.forward(model.params, None, batch, model.config)
            >>> [model.tokenizer.decode([token]) for token in logits.argmax(-1).tolist()]
            [',', ',']
        """
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or not all(lengths):
            raise InvalidRequestError(f"prompts of {lengths} tokens: there must be at least one prompt, each of at least one token")

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        ends = list(accumulate(lengths))
        return Batch(
            input_ids=ints([token for prompt in prompts for token in prompt]),
            positions=ints([position for length in lengths for position in range(length)]),
            slots=torch.full((ends[-1],), -1, dtype=torch.int32, device=device),
            page_tables=torch.empty((len(lengths), 0), dtype=torch.int32, device=device),
            seq_lens=ints(lengths),
            cu_seqlens=ints([0, *ends]),
            logit_indices=ints([end - 1 for end in ends]) if last_only else None,
        )

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(Windowed, static=("plan",))
register_value(Batch, static=("plan", "window"))
