"""Constrained output: the model can write nothing but JSON of this schema. What the schema fixes takes no model step."""

from phloem.runtime import Engine, Grammar, SamplingParams

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}
with Engine("smollm2-135m") as engine:
    params = SamplingParams(grammar=Grammar.json_schema(CITY), temperature=0, max_tokens=60)
    for done in engine.generate(["A city in France, as JSON: ", "A city in Japan, as JSON: "], params):
        print(done.text)
    stats = engine.stats()
    print(f"{stats.generated_tokens} tokens sampled, {stats.forced_tokens} forced by the schema")
