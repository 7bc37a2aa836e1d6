"""`Batch`: the tensors of one step."""

from dataclasses import dataclass

from .types import Int32, Tensor, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's tokens, all int32 on the model's device. A decode batch has one token a sequence and `cu_seqlens` None.

    `slots` are `page * page_size + offset`; padding, and a token that is run again only for its logits, point into the dummy page.
    `page_tables` rows are padded with the dummy page. `seq_lens` counts what the row's last token attends to, itself included;
    the queries of row b stand at positions `seq_lens[b] - q_len[b] ... seq_lens[b] - 1`. A padding row has seq_len 1 on the dummy page.
    `logit_indices` names the tokens whose logits are wanted (None: all). `plan` is the static handle of an attention plan (0: none).
    """

    input_ids: Int32[Tensor, "T"]
    positions: Int32[Tensor, "T"]
    slots: Int32[Tensor, "T"]
    page_tables: Int32[Tensor, "B P"]
    seq_lens: Int32[Tensor, "B"]
    cu_seqlens: Int32[Tensor, "B+1"] | None = None
    logit_indices: Int32[Tensor, "R"] | None = None
    plan: int = 0


register_value(Batch, static=("plan",))
