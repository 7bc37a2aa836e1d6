"""From logits to tokens: options, penalties, filters and the draw."""
