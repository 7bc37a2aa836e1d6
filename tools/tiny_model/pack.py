"""Pack documents into rows of tokens, with the weight of each token in the loss."""

from zlib import crc32

import numpy as np

from tools.tiny_model.text.asking import Document, Fill, recall, recall_chat
from tools.tiny_model.text.chat import CONTEXT
from tools.tiny_model.text.documents import draw_document, filler
from tools.tiny_model.text.grammar import Rng


def _tokenized(tokenizer, documents: list[Document]) -> list[list[tuple[list[int], int] | Fill]]:
    texts = [part[0] for doc in documents for part in doc if not isinstance(part, Fill)]
    ids = iter(e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    return [[part if isinstance(part, Fill) else (next(ids), part[1]) for part in doc] for doc in documents]


def draw_batch(tokenizer, seed: int, step: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (uint16) and their weights in the loss (uint8), both [rows, length + 1]. A pure function of its arguments.

    Long rows contain documents whose questions are far from their facts. Short rows contain only short documents.
    """
    rng = Rng(crc32(f"{seed}/{step}/{length}".encode()))
    need = rows * (length + 1)
    long = length > 1000
    documents: list[Document] = []
    if long:
        for _ in range(rows):
            budget = rng.randint(400, 1900) if rng.chance(0.6) else rng.randint(1500, 1950)
            documents.append(recall(rng, budget) if rng.chance(0.5) else recall_chat(rng, budget))
    first_short = len(documents)
    documents += [draw_document(rng) for _ in range(need // (220 if long else 110))]
    pool_texts: list[Document] = [[(filler(rng) + "\n\n", CONTEXT)] for _ in range(max(rows, 40) if long else 0)]
    encoded = _tokenized(tokenizer, documents + pool_texts)
    pool = [doc[0][0] for doc in encoded[len(documents) :]]
    pool_break = tokenizer.encode("\n\n", add_special_tokens=False).ids
    shorts = iter(encoded[first_short : len(documents)])
    tokens, weights = np.zeros((rows, length + 1), np.uint16), np.zeros((rows, length + 1), np.uint8)
    for row in range(rows):
        ids: list[int] = []
        marks: list[int] = []
        if long:
            if rng.chance(0.3):
                _append(rng, next(shorts, None) or _tokenized(tokenizer, [draw_document(rng)])[0], pool, pool_break, ids, marks)
            _append(rng, encoded[row], pool, pool_break, ids, marks)
        while len(ids) <= length:
            document = next(shorts, None)
            if document is None:
                document = _tokenized(tokenizer, [draw_document(rng)])[0]
            _append(rng, document, pool, pool_break, ids, marks)
        tokens[row], weights[row] = ids[: length + 1], marks[: length + 1]
    return tokens, weights


def _append(rng: Rng, document: list, pool: list[list[int]], pool_break: list[int], ids: list[int], marks: list[int]) -> None:
    order = rng.some(range(len(pool)), min(len(pool), 40)) if any(isinstance(p, Fill) for p in document) else []
    for part in document:
        if isinstance(part, Fill):
            left = part.tokens
            while order and left > 0:
                piece = pool[order.pop()]
                if len(piece) > left + 60:
                    continue
                if len(piece) > 40 and rng.chance(0.15):  # other text may break off in the middle
                    piece = piece[: rng.randint(20, len(piece) - 10)] + pool_break
                ids += piece
                marks += [CONTEXT] * len(piece)
                left -= len(piece)
        else:
            piece, weight = part
            ids += piece
            marks += [weight] * len(piece) if weight >= 0 else [0] + [-weight] * (len(piece) - 1)
