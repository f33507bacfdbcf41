"""A JSON schema as llguidance keeps it exactly; what it would keep only nearly is mended or refused here.

llguidance names the keywords that it does not know, and refuses them. Left to mend:

* Its numbers are 64-bit floats. A bound that is none is moved inward to the next one, and bounds of more than 10^18 are
  taken as 10^18, so a range is never wider than asked; a `const` or `enum` with such a number is refused.
* A draft-4 `exclusiveMinimum: true` would be ignored, and is refused.
* Names of free properties may repeat, so `minProperties` cannot count on more than one of them.
* Control characters could be written in a string only as `\\u0000`, which is not allowed because `"\\u0061"` would be a
  second `"a"`. A `const`, an `enum` or a property with one is refused.
* A schema that no finite text satisfies, such as a list node that requires its next node, would run to the last token.
  Where that is a part, the part is taken as false; where it is the whole, it is refused.

Subschemas are found where they stand, not by their looks: a `const` may hold an object with a key `minimum`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from pagemill.engine.values import shown

MAX_BOUND = 10**18
_ROUNDS = 50

_ONE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

Node = dict[str, Any]


def prepare(schema: Node | bool, *, closed: bool) -> Node | bool:
    """`schema` (changed in place) with the same meaning, or a narrower one. Raises `ValueError` where there is none.

    `closed`: objects that list their properties have no others, unless they say so.
    """
    root = _Root(schema)
    for path, node in root.nodes:
        try:
            _mend(node, is_root=path == "#")
        except ValueError as error:
            raise ValueError(f"at {path}: {error}") from error
        if closed and "properties" in node:
            node.setdefault("additionalProperties", False)
    root.drop_endless()
    return root.holder["#"]  # type: ignore[no-any-return]


class _Root:
    """All subschemas of a schema, with where each stands."""

    def __init__(self, schema: Node | bool) -> None:
        self.holder: dict[str, Any] = {"#": schema}
        self.nodes: list[tuple[str, Node]] = []
        self._places: list[tuple[Any, Any]] = []  # container and key of each node
        seen: set[int] = set()
        queue: list[tuple[str, Any, Any]] = [("#", self.holder, "#")]
        for path, container, key in queue:
            node = container[key]
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            self.nodes.append((path, node))
            self._places.append((container, key))
            queue += _children(path, node)
            place = self._find(node.get("$ref"))
            if place is not None:
                queue.append((node["$ref"], *place))

    def _find(self, reference: object) -> tuple[Any, Any] | None:
        """Container and key of what a JSON pointer in this schema points to."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        container: Any = self.holder
        key: Any = "#"
        for part in reference.split("/")[1:]:
            container = container[key]
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(container, list):
                if not key.isdecimal() or int(key) >= len(container):
                    return None
                key = int(key)
            elif not isinstance(container, dict) or key not in container:
                return None
        return container, key

    def drop_endless(self) -> None:
        """Put false where no finite value is. Raises `ValueError` where that is everywhere."""
        finite: set[int] = set()
        rest = list(range(len(self.nodes)))
        for _ in range(_ROUNDS):
            # Backwards: mostly, a node stands before those that it depends on.
            found = [index for index in reversed(rest) if self._is_finite(self.nodes[index][1], finite)]
            if not found:
                break
            rest = [index for index in rest if id(self.nodes[index][1]) not in finite]
        else:
            return
        for index in rest:
            container, key = self._places[index]
            container[key] = False
        if rest and rest[0] == 0:
            raise ValueError("no finite text satisfies this schema: it requires itself without end")

    def _is_finite(self, node: Any, finite: set[int]) -> bool:
        """Whether some value of `node` is finite if those of `finite` are. Adds it there. Where in doubt, it is."""

        def ends(other: Any) -> bool:
            return not isinstance(other, dict) or id(other) in finite

        place = self._find(node.get("$ref"))
        needed = [place[0][place[1]]] if place is not None else []
        needed += _list(node.get("allOf"))
        choices = [_list(node[name]) for name in ("anyOf", "oneOf") if _list(node.get(name))]
        if not all(map(ends, needed)) or not all(any(map(ends, some)) for some in choices):
            return False
        if "const" not in node and "enum" not in node and not self._type_ends(node, ends):
            return False
        finite.add(id(node))
        return True

    @staticmethod
    def _type_ends(node: Node, ends: Any) -> bool:
        kinds = node.get("type", _TYPES)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list | tuple) or any(kind not in ("object", "array") for kind in kinds):
            return True
        if "object" in kinds:
            listed = _map(node.get("properties"))
            other = True if "patternProperties" in node else node.get("additionalProperties", True)
            names = [name for name in _list(node.get("required")) if isinstance(name, str)]
            if all(ends(listed.get(name, other)) for name in names):
                return True
        if "array" in kinds:
            least = node.get("minItems")
            first = _list(node.get("prefixItems")) or _list(node.get("items"))
            count = least if isinstance(least, int) else 0
            items = node.get("items") if isinstance(node.get("items"), dict) else True
            return all(map(ends, first[:count])) and (count <= len(first) or ends(items))
        return False


def _children(path: str, node: Node) -> Iterator[tuple[str, Any, Any]]:
    for name in _ONE:
        if isinstance(node.get(name), dict):
            yield f"{path}/{name}", node, name
    for name in _LISTS:
        for index in range(len(_list(node.get(name)))):
            yield f"{path}/{name}/{index}", node[name], index
    for name in _MAPS:
        for key in _map(node.get(name)):
            yield f"{path}/{name}/{key}", node[name], key


def _mend(node: Node, is_root: bool) -> None:
    if "$id" in node:
        # Generators give every part a fragment for an id. It names nothing, and would be taken for the whole.
        name = node["$id"]
        if not isinstance(name, str) or not name or name.startswith("#"):
            del node["$id"]
        elif not is_root:
            raise ValueError("$id is supported at the root of a schema only")
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(node.get(name), bool):
            raise ValueError(f"{name} must be a number, as it is since draft 6, got {node[name]}")
    for name in ("minimum", "exclusiveMinimum"):
        if _is_number(node.get(name)):
            node[name] = _inward(max(node[name], -MAX_BOUND), math.inf)
    for name in ("maximum", "exclusiveMaximum"):
        if _is_number(node.get(name)):
            node[name] = _inward(min(node[name], MAX_BOUND), -math.inf)
    for name in ("const", "enum"):
        if name in node:
            _check_value(name, node[name])
    for name in [*_map(node.get("properties")), *_list(node.get("required"))]:
        _check_value("a property's name", name)
    least = node.get("minProperties")
    known = len({name for name in _list(node.get("required")) if isinstance(name, str)})
    if isinstance(least, int) and least > known + 1:
        raise ValueError(
            f"minProperties {least} cannot be kept with {known} required properties: the names of others may repeat"
        )
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]


def _inward(bound: float, towards: float) -> float:
    """The nearest 64-bit float on the inner side of `bound`."""
    if not isinstance(bound, int):
        return bound
    try:
        nearest = float(bound)
    except OverflowError as error:
        raise ValueError("a bound is larger than any 64-bit float") from error
    if (nearest < bound) if towards > 0 else (nearest > bound):
        nearest = math.nextafter(nearest, towards)
    return int(nearest)


def _check_value(name: str, value: Any) -> None:
    """Refuse values that cannot be written as they are."""
    queue = [value]
    for item in queue:
        if isinstance(item, dict):
            queue += [*item, *item.values()]
        elif isinstance(item, list):
            queue += item
        elif isinstance(item, str):
            if any(character < " " and character not in "\b\t\n\f\r" for character in item):
                raise ValueError(f"{name} may not hold a control character: {shown(item)}")
        elif _is_number(item) and not _is_exact(item):
            raise ValueError(f"{name} may not hold {shown(item)}, which 64-bit floats do not hold exactly")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: float) -> bool:
    """Whether the shortest decimal of the nearest 64-bit float, which is what will be written, is `value`."""
    try:
        return abs(value) < 1 << 53 or Decimal(repr(float(value))) == value
    except OverflowError:
        return False


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _map(value: object) -> Node:
    return value if isinstance(value, dict) else {}
