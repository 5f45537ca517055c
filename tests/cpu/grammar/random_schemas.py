"""Random JSON Schemas whose every keyword a grammar can obey."""

from typing import Any

from hypothesis import strategies as st

_PATTERNS = ("^[a-c]{1,4}$", "^(ab|é)+$", "b", "^[0-9]{2}-[0-9]{2}$")


def _schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON Schemas whose every keyword a grammar can obey."""
    small = st.integers(0, 3)
    spans = st.tuples(st.integers(-30, 30), st.integers(0, 40))
    keys = st.sampled_from(["a", "b", "name", 'q"', "é"])
    leaves = st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}]),
        spans.map(lambda span: {"type": "number", "minimum": span[0], "maximum": sum(span)}),
        spans.map(lambda span: {"type": "integer", "minimum": span[0], "maximum": sum(span)}),
        small.map(lambda low: {"type": "string", "minLength": low, "maxLength": low + 3}),
        st.sampled_from(_PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.lists(st.text(max_size=3) | st.integers(-9, 9) | st.none(), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
        st.just({"$ref": "#/$defs/list"}),
    )

    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        properties = st.dictionaries(keys, inner, max_size=3)
        return st.one_of(
            st.tuples(inner, small, small).map(
                lambda it: {
                    "type": "array",
                    "items": it[0],
                    "minItems": it[1],
                    "maxItems": sum(it[1:]),
                }
            ),
            st.tuples(properties, st.booleans(), st.sampled_from([True, False])).map(
                lambda it: {
                    "type": "object",
                    "properties": it[0],
                    "required": list(it[0])[: len(it[0]) if it[1] else 1],
                    "additionalProperties": it[2],
                }
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
            inner.map(
                lambda value: {
                    "oneOf": [
                        {
                            "type": "object",
                            "properties": {"kind": {"const": kind}, "value": value},
                            "required": ["kind"],
                            "additionalProperties": False,
                        }
                        for kind in ("x", "y")
                    ]
                }
            ),
        )

    linked = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/list"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return st.recursive(leaves, nested, max_leaves=6).map(
        lambda schema: {**schema, "$defs": {"list": linked}}
    )


# Made once: building it takes longer than drawing from it.
SCHEMAS = _schemas()
