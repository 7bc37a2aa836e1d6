"""`Batch`: the tensors of one step that a forward is given."""

from dataclasses import dataclass

from nanovllm.types import Int32, Tensor, brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """What layers with a window are given of a batch in the place of the fields of the same name, where they are not all layers.

    `page_tables` are of frames, as wide as those of pages, and the dummy frame where a page has none: there no query of the row looks.
    """

    page_tables: Int32[Tensor, "B P"]
    slots: Int32[Tensor, "T"]
    plan: int = 0

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's tokens, all int32 on the model's device. A decode batch has one token a sequence and `cu_seqlens` None.

    `slots` are `page * page_size + offset`; padding, and a token that is run again only for its logits, point into the dummy page.
    `page_tables` rows are padded with the dummy page. `seq_lens` counts what the row's last token attends to, itself included;
    the queries of row b are its tokens `seq_lens[b] - q_len[b] ... seq_lens[b] - 1`. A padding row has seq_len 1 on the dummy page.
    `positions` are what the rotary embedding sees; they differ from a token's index behind a gap.
    `logit_indices` names the tokens whose logits are wanted (None: all). `plan` is the static handle of an attention plan (0: none).
    `window` is that of the layers that the batch is given to, in tokens, a token's own included; 0: they attend to all.

    `page_tables` and `slots` are for the first KV pool: of frames (`state/window_frames.py`) where every layer has a window. `windowed` are
    those of the second one, None where there is none, or where a page's frame has the page's number.
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

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(Windowed, static=("plan",))
register_value(Batch, static=("plan", "window"))
