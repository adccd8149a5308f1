"""Rewrites JSON schemas so that the grammar library enforces them.

The library ignores some keywords and reads others loosely. `enforceable` rewrites a schema with the
keywords that are enforced (missing types are added, lengths become patterns) and raises for others. The
result may allow less than the schema, never more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 1 << 17
MAX_DEPTH = 48
MAX_REPEATS = 100_000
"""Maximum of repetition bounds."""

Schema = dict[str, Any]


class Unenforceable(ValueError):
    """A keyword that cannot be enforced, with its path."""

    def __init__(self, keyword: str, path: str, reason: str = "") -> None:
        super().__init__(
            f"the JSON schema keyword {keyword!r} at {path or 'the top'} cannot be enforced{reason}"
        )
        self.keyword = keyword


ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "deprecated"),
    *("readOnly", "writeOnly", "discriminator", "contentMediaType", "contentEncoding", "propertyOrdering"),
    "strict",  # an OpenAI field that some clients put into the schema
}
DEFINITIONS = ("$defs", "definitions")
FAMILIES: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        *("patternProperties", "propertyNames"),
    },
    "boolean": set(),
    "null": set(),
}
FAMILIES["integer"] = FAMILIES["number"]
KEYWORDS = {"type", *(keyword for family in FAMILIES.values() for keyword in family)}
FORMATS = {
    *("email", "date", "time", "date-time", "duration", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
}
ANNOTATION_FORMATS = {
    "password",
    "enum",
    "int32",
    "int64",
    "float",
    "double",
}  # formats without an effect on validation
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"^{_BYTE}(\.{_BYTE}){{3}}$"
# Characters that JSON strings contain unescaped, without surrogates.
_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
_UNREAD = re.compile(r"\(\?(?!:)|\\[bBkpPux1-9]")
_ESCAPED = re.compile(r'"|\\\\')
"""Characters that JSON escapes."""
MAX_COUNTED_PROPERTIES = 64
"""Maximum of properties of an object with minProperties or maxProperties."""
_MAY_BE_NULL = ("const", "enum", "default")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name(value: Any) -> bool:
    return isinstance(value, str)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_schema, value))


def _named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_schema, value.values()))


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_number, "a number")),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (_count, "a whole number")),
    **dict.fromkeys(("minProperties", "maxProperties"), (_count, "a whole number")),
    **dict.fromkeys(("pattern", "format", "$ref"), (_name, "a string")),
    **dict.fromkeys(("required", "propertyOrdering"), (_names, "a list of strings")),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), (_schemas, "a list of schemas")),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), (_schema, "a schema")),
    **dict.fromkeys(
        ("properties", "patternProperties", *DEFINITIONS), (_named_schemas, "an object of schemas")
    ),
    **dict.fromkeys(("nullable", "uniqueItems"), (lambda value: isinstance(value, bool), "true or false")),
    "multipleOf": (lambda value: _number(value) and value > 0, "a number above 0"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "type": (lambda value: _name(value) or bool(value and _names(value)), "a string, or a list of strings"),
}
"""Validator and expected type of each keyword."""


def enforceable(schema: Any, *, name: str = "the JSON schema") -> Any:
    """Returns the schema for the grammar. Raises ValueError if it cannot be enforced."""
    try:
        if len(json.dumps(schema)) > MAX_CHARACTERS:
            raise ValueError(f"{name} has more than {MAX_CHARACTERS} characters")
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{name} must be an object, or true")
    try:
        return _SchemaRewriter(schema).read(schema, "")
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error


def _well_formed(node: Schema, path: str) -> Schema:
    """Drops null keywords. Raises ValueError for a keyword with an invalid value."""
    keywords = {key: value for key, value in node.items() if value is not None or key in _MAY_BE_NULL}
    for keyword, value in keywords.items():
        if keyword in SHAPES and not SHAPES[keyword][0](value):
            raise ValueError(
                f"the JSON schema keyword {keyword!r} at {path or 'the top'} must be {SHAPES[keyword][1]}"
            )
    return keywords


def check_pattern(pattern: str, keyword: str, path: str = "") -> str:
    """Returns a pattern that the grammar reads as Python does. Raises Unenforceable for other syntax, and
    for characters that JSON escapes.
    """
    if match := _UNREAD.search(pattern) or (_ESCAPED.search(pattern) if keyword != "regex" else None):
        raise Unenforceable(keyword, path, f": its part {match[0]!r}")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{keyword} {pattern!r} is not a regular expression: {error}") from error
    return pattern


class _SchemaRewriter:
    """Rewrites one schema and its definitions."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def read(self, node: Any, path: str) -> Any:
        if path.count("/") > 2 * MAX_DEPTH:
            raise ValueError(f"the JSON schema is nested too deeply, at {path[:80]}")
        if node is True:
            return {}
        if not isinstance(node, dict):
            raise Unenforceable(json.dumps(node), path)
        node = _well_formed(node, path)
        definitions = self._definitions(node, path)
        keywords = {k: v for k, v in node.items() if k not in ANNOTATIONS and not k.startswith("x-")}
        if order := node.get("propertyOrdering"):
            keywords = _ordered(keywords, order)
        if keywords.pop("nullable", False):
            return {"anyOf": [self._one(keywords, path), {"type": "null"}], **definitions}
        return {**self._one(keywords, path), **definitions}

    def _definitions(self, node: Schema, path: str) -> Schema:
        return {
            name: {key: self.read(value, f"{path}/{name}/{key}") for key, value in node.pop(name).items()}
            for name in DEFINITIONS
            if name in node
        }

    def _one(self, node: Schema, path: str) -> Schema:
        for keyword, read in self._readers().items():
            if keyword in node:
                return read(node, path)
        return self._typed(node, path)

    def _readers(self) -> dict[str, Callable[[Schema, str], Schema]]:
        return {
            "$ref": self._reference,
            "allOf": self._all,
            "anyOf": self._any,
            "oneOf": self._any,
            "enum": self._values,
            "const": self._values,
        }

    def _reference(self, node: Schema, path: str) -> Schema:
        if others := sorted(node.keys() - {"$ref"}):
            raise Unenforceable(others[0], path, " beside $ref")
        target, seen = node, set[str]()
        while isinstance(target, dict) and "$ref" in target:
            name = target["$ref"]
            if not isinstance(name, str) or name in seen or not name.startswith("#"):
                raise Unenforceable("$ref", path, f": {name!r}")
            seen.add(name)
            target = self._resolve(name, path)
        return node

    def _resolve(self, name: str, path: str) -> Any:
        target: Any = self._root
        for step in name.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or step not in target:
                raise Unenforceable("$ref", path, f": there is no {name!r}")
            target = target[step]
        return target

    def _all(self, node: Schema, path: str) -> Schema:
        parts = node["allOf"]
        if len(parts) != 1 or len(node) > 1:
            raise Unenforceable("allOf", path)
        return self.read(parts[0], f"{path}/allOf/0")

    def _any(self, node: Schema, path: str) -> Schema:
        keyword = "anyOf" if "anyOf" in node else "oneOf"
        options = node[keyword]
        if others := sorted(node.keys() - {keyword, "type"}):
            raise Unenforceable(others[0], path, f" beside {keyword}")
        if "type" in node:
            both = [_of_types(option, _types(node), path) for option in options]
            options = [option for option in both if option is not None]
            if not options:
                raise Unenforceable(keyword, path, ": it allows nothing")
        if keyword == "oneOf" and not self._disjoint(options):
            raise Unenforceable("oneOf", path, ": what it lists may overlap; say anyOf")
        return {"anyOf": [self.read(option, f"{path}/{keyword}/{n}") for n, option in enumerate(options)]}

    def _disjoint(self, options: list[Any]) -> bool:
        """Returns whether no value can match two options: by type, or by a required constant."""
        full = [self._resolved(option) for option in options]
        kinds = [_types(option) | ({"null"} if option.get("nullable") else set()) for option in full]
        names = {"number" if kind == "integer" else kind for types in kinds for kind in types}
        if all(kinds) and sum(map(len, kinds)) == len(names):
            return True
        shared = set.intersection(*(set(option.get("required", ())) for option in full))
        for name in shared:
            values = [_constants(option.get("properties", {}).get(name)) for option in full]
            flat = [_identity(value) for constants in values for value in constants]
            if all(values) and len(flat) == len(set(flat)):
                return True
        return False

    def _resolved(self, option: Any) -> Schema:
        for _ in range(MAX_DEPTH):
            if not (isinstance(option, dict) and isinstance(option.get("$ref"), str)):
                break
            option = self._resolve(option["$ref"], "")
        return _well_formed(option, "") if isinstance(option, dict) else {}

    def _values(self, node: Schema, path: str) -> Schema:
        keyword = "enum" if "enum" in node else "const"
        if others := sorted(node.keys() - {"enum", "const", "type"}):
            raise Unenforceable(others[0], path, f" beside {keyword}")
        values = node["enum"] if keyword == "enum" else [node["const"]]
        if "const" in node:
            values = [value for value in values if _identity(value) == _identity(node["const"])]
        if kinds := _types(node):
            values = [value for value in values if _kinds_of(value) & kinds]
        if not values:
            raise Unenforceable(keyword, path, ": it allows nothing")
        return {"enum": values}

    def _typed(self, node: Schema, path: str) -> Schema:
        kinds = sorted(_types(node)) or self._guessed(node)
        if not kinds:
            if unknown := sorted(node):
                raise Unenforceable(unknown[0], path)
            return {}
        if unknown := sorted(node.keys() - KEYWORDS):  # keywords of other types have no effect
            raise Unenforceable(unknown[0], path)
        parts = [self._of_kind(kind, node, path) for kind in kinds]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _guessed(self, node: Schema) -> list[str]:
        """Returns the types to which the keywords of a node without type belong."""
        kinds = [
            kind
            for kind, keywords in FAMILIES.items()
            if kind != "integer" and keywords and node.keys() & (keywords - {"format"})
        ]
        return ["string"] if not kinds and "format" in node else kinds

    def _of_kind(self, kind: str, node: Schema, path: str) -> Schema:
        if kind not in FAMILIES:
            raise Unenforceable("type", path, f": {kind!r}")
        own = {key: value for key, value in node.items() if key in FAMILIES[kind]}
        read = {"string": self._string, "array": self._array, "object": self._object}
        if kind in read:
            return read[kind](own, path)
        return self._number(kind, own, path)

    def _number(self, kind: str, node: Schema, path: str) -> Schema:
        if node.pop("format", None) not in {None, *ANNOTATION_FORMATS}:
            raise Unenforceable("format", path)
        if "multipleOf" in node:
            if node.pop("multipleOf") != 1:
                raise Unenforceable("multipleOf", path)
            kind = "integer"
        return {"type": kind, **node}

    def _string(self, node: Schema, path: str) -> Schema:
        if node.get("format") in ANNOTATION_FORMATS:
            del node["format"]
        if "format" in node:
            if others := sorted(node.keys() - {"format"}):
                raise Unenforceable(others[0], path, " beside format")
            if node["format"] == "ipv4":
                return {"type": "string", "pattern": _IPV4}
            if node["format"] not in FORMATS:
                raise Unenforceable("format", path, f": {node['format']!r}")
            return {"type": "string", **node}
        low, high = _bounds(node, "minLength", "maxLength", path)
        if "pattern" in node:
            if low or high is not None:
                raise Unenforceable("pattern", path, " beside minLength or maxLength")
            return {"type": "string", "pattern": check_pattern(node["pattern"], "pattern", path)}
        if low or high is not None:
            return {"type": "string", "pattern": f"^{_CHARACTER}{{{low},{'' if high is None else high}}}$"}
        return {"type": "string"}

    def _array(self, node: Schema, path: str) -> Schema:
        if node.pop("uniqueItems", False):
            raise Unenforceable("uniqueItems", path)
        low, _ = _bounds(node, "minItems", "maxItems", path)
        first = node.get("prefixItems", [])
        if not first or low > len(first):
            node.setdefault("items", {})
            if node["items"] is False and low > len(first):
                raise Unenforceable("minItems", path, ": items allows no more")
        if "items" in node and node["items"] is not False:
            node["items"] = self.read(node["items"], f"{path}/items")
        if first:
            node["prefixItems"] = [self.read(part, f"{path}/prefixItems/{n}") for n, part in enumerate(first)]
        return {"type": "array", **node}

    def _object(self, node: Schema, path: str) -> Schema:
        _bounds(node, "minProperties", "maxProperties", path)
        if "patternProperties" in node or "propertyNames" in node:
            return self._open(node, path)
        properties = node.get("properties", {})
        properties_out = {
            name: self.read(value, f"{path}/properties/{name}") for name, value in properties.items()
        }
        required = node.get("required", [])
        more = node.get("additionalProperties", "properties" not in node and not required)
        for name in required:
            if name not in properties_out:
                if node.get("additionalProperties") is False:
                    raise Unenforceable("required", path, f": additionalProperties excludes {name!r}")
                properties_out[name] = self.read(more, path) if isinstance(more, dict) else {}
        if isinstance(more, dict):
            more = self.read(more, f"{path}/additionalProperties")
        rest = {k: v for k, v in node.items() if k in ("minProperties", "maxProperties")}
        if rest and len(properties_out) > MAX_COUNTED_PROPERTIES:
            raise Unenforceable(min(rest), path, f" with more than {MAX_COUNTED_PROPERTIES} properties")
        fields = {"properties": properties_out} if properties_out else {}
        return {"type": "object", **fields, "required": required, "additionalProperties": more, **rest}

    def _open(self, node: Schema, path: str) -> Schema:
        """Rewrites an object with patternProperties."""
        keyword = "patternProperties" if "patternProperties" in node else "propertyNames"
        allowed = {keyword, "minProperties", "maxProperties"}
        if others := sorted(node.keys() - allowed - {"additionalProperties"}):
            raise Unenforceable(others[0], path, f" beside {keyword}")
        if keyword == "propertyNames" or len(node[keyword]) != 1:
            raise Unenforceable(keyword, path)
        ((pattern, value),) = node[keyword].items()
        check_pattern(pattern, keyword, path)
        return {
            **{key: bound for key, bound in node.items() if key in allowed},
            "type": "object",
            keyword: {pattern: self.read(value, f"{path}/{keyword}")},
            "additionalProperties": False,
        }


def _bounds(node: Schema, low: str, high: str, path: str) -> tuple[int, int | None]:
    minimum, maximum = node.get(low, 0), node.get(high)
    if minimum > MAX_REPEATS or (maximum is not None and maximum < minimum):
        raise Unenforceable(low, path, f": {minimum}")
    if maximum is not None and maximum > MAX_REPEATS:
        maximum = node[high] = MAX_REPEATS
    return minimum, maximum


def _ordered(node: Schema, order: Any) -> Schema:
    properties = node.get("properties")
    if properties is None:
        return node
    names = [name for name in order if name in properties]
    names += [name for name in properties if name not in names]
    return {**node, "properties": {name: properties[name] for name in names}}


def _types(node: Any) -> set[str]:
    value = node.get("type") if isinstance(node, dict) else None
    names = value if isinstance(value, list) else [value]
    kinds = {name.lower() for name in names if isinstance(name, str)}
    return kinds - {"integer"} if "number" in kinds else kinds


def _of_types(option: Any, types: set[str], path: str) -> Any:
    """Restricts an option to `types`; None if no value remains."""
    if not isinstance(option, dict):
        return {"type": sorted(types)} if option is True else option
    option = _well_formed(option, path)
    own = _types(option) or types
    shared = own & types
    if "integer" in own | types and "number" in own | types:
        shared = shared - {"number"} | {"integer"}
    if option.get("nullable") and "null" not in types:
        del option["nullable"]
    return {**option, "type": sorted(shared)} if shared else None


def _identity(value: Any) -> str:
    """Returns the same text for values that are equal in JSON Schema: 1 and 1.0, but not 1 and true."""
    if isinstance(value, list):
        return f"[{','.join(map(_identity, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_identity(value[key])}' for key in sorted(value))}}}"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _constants(schema: Any) -> list[Any]:
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _kinds_of(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    return {{str: "string", list: "array"}.get(type(value), "object")}
