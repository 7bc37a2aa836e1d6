"""Extract records from texts, in the form of a JSON schema.

The text runs once and becomes a chunk. Each field is a branch of it: the beginning of a sentence (its description in the schema), which
the model completes under a grammar of the field's own. A string can only be a word of the text, so that nothing is invented, and a number
has its bounds. All fields run together. A large model may also write the whole object at once (`whole`): then the schema itself is the
grammar. Grammars need the extra `grammar`: `pip install "nanovllm[grammar]"`.
"""

import json
import re
from typing import Any

import nanovllm as nv

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120, "description": "The age of {name} is"},
        "home town": {"type": "string", "maxLength": 16, "description": "The home town of {name} is"},
        "sport": {"type": "string", "maxLength": 16, "description": "The favourite sport of {name} is"},
    },
    "required": ["age", "home town", "sport"],
    "additionalProperties": False,
}
TEXTS = {
    "Otto": "The home town of Otto is Halden. Otto is 47 years old. The favourite sport of Otto is rowing.",
    "Ruth": "Ruth is 12 years old. The favourite sport of Ruth is chess. The home town of Ruth is Velmora.",
    "Jonas": "The favourite sport of Jonas is swimming. The home town of Jonas is Tessin. Jonas is 81 years old.",
}


def grammar_of(field: dict[str, Any], text: str) -> nv.Grammar:
    """What may complete a field's sentence, with the space before it and the period after it: a word of the text, or a number."""
    if field["type"] == "integer":
        return nv.Grammar.regex(rf" (0|[1-9][0-9]{{0,{len(str(field['maximum'])) - 1}}})\.")
    return nv.Grammar.choice([f" {word}." for word in dict.fromkeys(re.findall(r"\w+", text)) if len(word) <= field["maxLength"]])


def filled(model: nv.Model, state: nv.EngineState, name: str, text: str) -> tuple[nv.EngineState, dict[str, Any]]:
    """One record, all of whose fields are branches of the text's chunk."""
    state, chunk = nv.prefill(model, state, text)
    fields = SCHEMA["properties"]
    contexts = [[chunk, "\n\n" + field["description"].format(name=name)] for field in fields.values()]
    params = [nv.SamplingParams(temperature=0, max_tokens=16, grammar=grammar_of(field, text)) for field in fields.values()]
    state, gens = nv.generate_many(model, state, contexts, params)
    values = [gen.text.strip(" .") for gen in gens]
    for used in (chunk, *(gen.chunk for gen in gens)):
        state = nv.release(state, used)
    record = {key: int(value) if fields[key]["type"] == "integer" else value for key, value in zip(fields, values, strict=True)}
    return state, record


def whole(model: nv.Model, state: nv.EngineState, name: str, text: str) -> tuple[nv.EngineState, dict[str, Any]]:
    """One record that the model writes as JSON. The grammar gives it its form, but its sense depends on the model."""
    params = nv.SamplingParams(temperature=0, max_tokens=96, grammar=nv.Grammar.json_schema(SCHEMA))
    state, gen = nv.generate(model, state, f"{text}\n\n{name}: ", params)
    state = nv.release(state, gen.chunk)
    return state, json.loads(gen.text)


def main() -> None:
    """Print a line of JSON for each text, and how many tokens ran."""
    model = nv.load_model("tiny")
    state = nv.init_state(model, num_pages=128)
    for name, text in TEXTS.items():
        state, record = filled(model, state, name, text)
        print(json.dumps({"name": name, **record}))
    stats = state.stats
    print(f"{stats.prefill_tokens} prompt tokens ran, {stats.reused_tokens} were reused, {stats.decode_tokens} tokens of replies ran")
    state, record = whole(model, state, "Otto", TEXTS["Otto"])
    print("whole:", json.dumps(record))
    nv.check(state)
    assert nv.memory(state).num_held == 0


if __name__ == "__main__":
    main()
