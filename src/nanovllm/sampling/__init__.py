"""From logits to tokens: options, penalties, filters and sampling."""
